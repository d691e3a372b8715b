from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from tripool.errors import WrongArchitecture
from tripool.text.decoding import TextStream, read_decoder

DECODERS = {
    "llama": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    "strip_two": [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0), decoders.Replace("▁", " ")],
    "strip_each": [decoders.Strip("x", 2, 0), decoders.Replace("▁▁", "="), decoders.ByteFallback(), decoders.Fuse()],
    "late": [decoders.ByteFallback(), decoders.Replace("▁", " ")],
    "metaspace": [decoders.Metaspace()],
    "metaspace_never": [decoders.Metaspace("_", "never"), decoders.ByteFallback()],
    "nested": [decoders.Sequence([decoders.Replace("▁", " ")]), decoders.ByteFallback()],
    "byte_level": [decoders.ByteLevel()],
    "stripped_byte_level": [decoders.Replace("▁", "Ġ"), decoders.ByteLevel(), decoders.Strip(" ", 1, 0)],
}
# Parts of characters, in both spellings, among words: lead bytes, continuations, bytes that are never UTF-8.
BYTES = bytes.fromhex("20 0A 41 C3 A9 E2 82 AC F0 9F 99 82 ED A0 C0 FF EF BF BD")
ALPHABET = ["Ã", "©", "â", "Ĥ", "¬", "ð", "Ł", "Ļ", "Ĥ", "í", "Ġ", "À", "ÿ", "Ċ", "ï", "¿", "½"]
WORDS = ["▁", "▁the", "▁▁▁a", "xx", "xxxa", "_b", "\ufffd", "", " ", "  c", "é", "<0xZZ>", "<0x1>", "🙂", "two words"]
tokens = st.lists(st.sampled_from([f"<0x{byte:02X}>" for byte in BYTES] + ALPHABET + WORDS), max_size=16)


def build(name: str) -> decoders.Decoder:
    parts = DECODERS[name]
    return parts[0] if len(parts) == 1 else decoders.Sequence(parts)


@pytest.mark.parametrize("name", list(DECODERS))
@given(tokens=tokens)
@example(tokens=["<0x20>", "<0xFF>", "▁a"])
@example(tokens=["<0xF0>", "<0x9F>", "▁a", "<0x0A>", "<0xC3>"])
@settings(max_examples=200, deadline=None, derandomize=True)
def test_streams_what_the_library_decodes_at_once(name: str, tokens: list[str]) -> None:
    decoder = build(name)
    stream = TextStream(read_decoder(json.loads(decoder.__getstate__())))
    settled, unsettled = "", ""
    steps = []
    for token in tokens:
        steps.append(stream.push(token))
    steps.append(stream.finish())
    for step in steps:
        unsettled = ("" if step.void else unsettled) + step.text
        if step.settled:
            settled, unsettled = settled + unsettled, ""
    assert steps[-1].settled
    assert settled == decoder.decode(tokens)


def test_a_run_of_bytes_is_a_guess_until_it_ends() -> None:
    stream = TextStream(read_decoder({"type": "ByteFallback"}))
    assert stream.push("<0x0A>") == ("\n", False, False)
    assert stream.push("<0xC3>") == ("", False, False)
    assert stream.push("<0xA9>") == ("é", False, False)
    assert stream.push("a") == ("a", False, True)
    assert stream.push("<0x0A>") == ("\n", False, False)
    assert stream.push("<0xFF>") == ("\ufffd\ufffd", True, True)
    assert stream.push("<0x0A>") == ("\ufffd", False, True)
    assert stream.push("b") == ("b", False, True)
    assert stream.push("<0xC3>") == ("", False, False)
    assert stream.finish() == ("\ufffd", True, True)


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "CTC"}, "CTC"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}, "Regex"),
        ({"type": "Strip", "content": " ", "start": 0, "stop": 1}, "Strip"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}, "ByteLevel"),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": " "}],
            },
            "'ab'",
        ),
    ],
)
def test_refuses_by_name_what_it_cannot_stream(decoder: dict[str, object], name: str) -> None:
    with pytest.raises(WrongArchitecture, match=name):
        read_decoder(decoder)
