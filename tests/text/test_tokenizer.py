"""Tokenizer against transformers as an independent oracle."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import tripool.text
from tripool.engine.fake import fake_text
from tripool.errors import CheckpointCorrupt, InvalidRequest, WrongArchitecture
from tripool.text import TextFiles, Tokenizer

ids_of_any_kind = st.lists(st.integers(0, 460), max_size=40)
some_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def reference(library: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=library,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )


@given(ids=ids_of_any_kind, skip_special=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_decode_equals_transformers(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, ids: list[int], skip_special: bool
) -> None:
    expected = reference.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids, skip_special=skip_special) == expected


@given(text=some_text, special=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_encode_equals_transformers(kind: str, tokenizers_by_kind, libraries, text: str, special: bool) -> None:
    if kind == "words":
        return  # its vocabulary cannot write arbitrary text; see below
    reference = PreTrainedTokenizerFast(tokenizer_object=libraries[kind])
    assert tokenizers_by_kind[kind].encode(text, special=special) == reference.encode(text, add_special_tokens=special)


@given(text=some_text)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_bytes_of_tokens_are_the_bytes_of_the_text(tokenizers_by_kind, text: str) -> None:
    byte_level, llama = tokenizers_by_kind["byte_level"], tokenizers_by_kind["llama"]
    ids = byte_level.encode(text, special=False)
    assert b"".join(byte_level.token_bytes(i) for i in ids) == text.encode()
    if text and "▁" not in text and "<" not in text:  # these two the encoder itself confuses with its own marks
        ids = llama.encode(text, special=False)
        assert b"".join(llama.token_bytes(i) for i in ids) == b" " + text.encode()


def test_bytes_and_text_of_single_tokens(tokenizers_by_kind) -> None:
    byte_level, llama, unigram = (tokenizers_by_kind[kind] for kind in ("byte_level", "llama", "unigram"))

    def look(tokenizer: Tokenizer, spelling: str) -> tuple[bytes, str]:
        (token_id,) = [i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == spelling]
        return tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)

    assert look(byte_level, "Ġthe") == (b" the", " the")
    assert look(byte_level, "Ċ") == (b"\n", "\n")
    assert look(byte_level, "ð") == (b"\xf0", "\ufffd")
    assert look(byte_level, "</s>") == (b"</s>", "</s>")
    assert look(byte_level, " two words") == (b" two words", " two words")
    assert look(llama, "▁the") == (b" the", " the")
    assert look(llama, "<0x0A>") == (b"\n", "\n")
    assert look(llama, "<0xF0>") == (b"\xf0", "\ufffd")
    assert look(unigram, "▁") == (b" ", " ")
    assert llama.token_bytes(10**6) == b""
    assert llama.token_text(10**6) == ""
    assert look(tokenizers_by_kind["words"], "狐") == ("狐".encode(), "狐")


def test_ids_it_tells_about(text_files: dict[str, TextFiles]) -> None:
    data = json.loads(text_files["words"].tokenizer_json)
    data["model"]["vocab"]["gap"] = 99
    tokenizer = Tokenizer(replace(text_files["words"], tokenizer_json=json.dumps(data)))
    assert tokenizer.vocab_size == 100
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.end_ids == {2}
    assert tokenizer.token(50) is None


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(text_files: dict[str, TextFiles]) -> None:
    files = text_files["byte_level"]
    library = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    library.enable_truncation(4)
    library.enable_padding(length=32)
    text = "The quick brown fox jumps over the lazy dog"
    altered = Tokenizer(replace(files, tokenizer_json=library.to_str()))
    assert altered.encode(text) == Tokenizer(files).encode(text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text + "}",
        lambda text: "\ud800" + text,
        lambda text: text.replace('"BPE"', '"Nonsense"'),
        lambda text: text.replace('"ByteLevel"', '"Nonsense"'),
        lambda text: json.dumps({**json.loads(text), "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}),
    ],
)
def test_damaged_tokenizers_are_corrupt_checkpoints(text_files: dict[str, TextFiles], damage) -> None:
    files = text_files["byte_level"]
    with pytest.raises(CheckpointCorrupt, match=r"tokenizer\.json"):
        Tokenizer(replace(files, tokenizer_json=damage(files.tokenizer_json)))


def test_a_decoder_that_cannot_be_streamed_is_refused_when_loading(text_files: dict[str, TextFiles]) -> None:
    library = tokenizers.Tokenizer.from_str(text_files["words"].tokenizer_json)
    library.decoder = tokenizers.decoders.CTC()
    with pytest.raises(WrongArchitecture, match="CTC"):
        Tokenizer(TextFiles(tokenizer_json=library.to_str()))


@pytest.mark.parametrize("text", ["half \ud83d of a pair", "\udfff", None, 3, b"bytes", ["list"]])
def test_what_is_not_text_is_refused(tokenizers_by_kind, text: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizers_by_kind["byte_level"].encode(text)
    assert caught.value.param == "prompt"


def test_text_outside_the_vocabulary_is_refused(tokenizers_by_kind) -> None:
    assert tokenizers_by_kind["words"].encode("the fox") == [3, 4]
    with pytest.raises(InvalidRequest, match="cannot tokenize"):
        tokenizers_by_kind["words"].encode("the wolf")


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_ids_that_no_vocabulary_could_have_are_refused(tokenizers_by_kind, ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="token id"):
        tokenizers_by_kind["byte_level"].decode(ids)


def test_chat_is_rendered_then_encoded_without_a_second_begin_token(text_files: dict[str, TextFiles]) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(replace(text_files["byte_level"], chat_template=source))
    conversation = [{"role": "user", "content": "The fox"}]
    assert tokenizer.render_chat(conversation) == "<s>user: The fox"
    assert tokenizer.encode_chat(conversation) == tokenizer.encode("user: The fox", special=True)
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize("source", [None, "", "  \n"])
def test_a_model_without_template_does_not_chat(text_files: dict[str, TextFiles], source: str | None) -> None:
    tokenizer = Tokenizer(replace(text_files["byte_level"], chat_template=source))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert caught.value.hint


def test_the_room_imports_only_what_it_may() -> None:
    """A gateway or a planner must be able to load this room on a machine without torch."""
    allowed = {"tokenizers", "jinja2", "tripool", *sys.stdlib_module_names}
    inside = ("tripool.core", "tripool.errors", "tripool.text")
    for file in Path(tripool.text.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert name.split(".")[0] in allowed, (file.name, name)
                assert not name.startswith("tripool") or name.startswith(inside), (file.name, name)


class PanicException(BaseException):
    """As PyO3 makes of a panic in Rust: no Exception, so that most code lets it through."""


class _Panicking:
    def encode_batch_fast(self, *_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    decode_batch = encode_batch_fast


def test_a_panic_of_the_library_is_a_refusal(monkeypatch):
    tokenizer = Tokenizer(fake_text())
    monkeypatch.setattr(tokenizer, "_library", _Panicking())
    with pytest.raises(InvalidRequest, match="tokenize"):
        tokenizer.encode("a")
    with pytest.raises(InvalidRequest, match="as text"):
        tokenizer.decode([1])
