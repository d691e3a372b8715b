"""Streaming against decoding everything at once, and against a search of the whole text after every token."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.core import SamplingParams
from tripool.text import Detokenizer, Tokenizer

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
KINDS = ["byte_level", "llama", "late_replace", "gemma", "early_metaspace", "unigram", "words"]
TEXTS = ["The fox. Stop here.\n\n", "🙂👍🏽", "User: hello\n", "狐狸 fox", "Größe\n", "  two  spaces ", "é\n\nñ"]

slow = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def id_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Random tokens (unknown ids among them) between encoded texts, so that both broken and whole characters occur."""
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            ids += draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=6))
        elif tokenizer.vocab_size > 100:  # the kind with eight words cannot write these
            encoded = tokenizer.encode(draw(st.sampled_from(TEXTS)), special=draw(st.booleans()))
            ids += encoded[: draw(st.integers(0, len(encoded)))]
    return ids


def run(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> tuple[list[str], str | None, int | None]:
    """Deltas (the last is what finish gave), the stop string, and how many tokens it took to see it."""
    detokenizer = Detokenizer(tokenizer, params)
    deltas, stopped_after = [], None
    for count, token_id in enumerate(ids, start=1):
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stopped is not None and stopped_after is None:
            stopped_after = count
    deltas.append(detokenizer.finish())
    return deltas, detokenizer.stopped, stopped_after


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip_special=st.booleans())
@slow
def test_deltas_join_to_the_decoded_text(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject, skip_special: bool
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(id_lists(tokenizer))
    deltas, stopped, _ = run(tokenizer, ids, SamplingParams(skip_special_tokens=skip_special))
    whole = tokenizer.decode(ids, skip_special=skip_special)
    assert "".join(deltas) == whole
    assert stopped is None
    if "\ufffd" not in whole:
        assert not any("\ufffd" in delta for delta in deltas)
    for delta in deltas:
        delta.encode()  # half a surrogate pair would not encode


def visible(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text so far without the character that is not complete yet; the plain way, from the beginning."""
    ids = [i for i in ids if i not in tokenizer.special_ids and tokenizer.token(i) is not None]
    run_start = len(ids)
    while run_start and BYTE_TOKEN.fullmatch(str(tokenizer.token(ids[run_start - 1]))):
        run_start -= 1
    byte_run = b"".join(tokenizer.token_bytes(i) for i in ids[run_start:])
    try:
        byte_run.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            ids = ids[: run_start + error.start]
    return tokenizer.decode(ids)


def visible_byte_level(tokenizer: Tokenizer, ids: list[int]) -> str:
    data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids)
    return codecs.utf_8_decode(data, "replace", False)[0]


def same_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Expected:
    text: str
    stopped: str | None
    stopped_after: int | None


def oracle(tokenizer: Tokenizer, ids: list[int], params: SamplingParams, kind: str) -> Expected:
    """The first token that adds an occurrence, among the min_tokens-th and later; cut where the first one starts."""
    look = visible_byte_level if kind == "byte_level" else visible
    before = ""
    for count in range(1, len(ids) + 2):
        at_end = count > len(ids)
        text = tokenizer.decode(ids) if at_end else look(tokenizer, ids[:count])
        unchanged = same_start(before, text)
        hits = [
            (at, len(stop), stop)
            for stop in params.stop
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > unchanged
        ]
        if hits and min(count, len(ids)) >= params.min_tokens:
            at, length, stop = min(hits)
            cut = at + length if params.include_stop_str_in_output else at
            return Expected(text[:cut], stop, None if at_end else count)
        before = text
    return Expected(before, None, None)


@st.composite
def stop_params(draw: st.DrawFn, whole: str) -> SamplingParams:
    """Stop strings cut out of the text itself, so that they are hit, and others that are nearly hit."""
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(whole) - 1, 0)))
        stops.append((whole[at : at + draw(st.integers(1, 5))] or "x") + draw(st.sampled_from(["", "", "", "q"])))
    return SamplingParams(
        stop=tuple(stops),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3, 6])),
        include_stop_str_in_output=draw(st.booleans()),
    )


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(slow, max_examples=200)
def test_stop_strings_as_a_search_of_the_whole_text_finds_them(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(id_lists(tokenizer))
    params = data.draw(stop_params(tokenizer.decode(ids)))
    deltas, stopped, stopped_after = run(tokenizer, ids, params)
    expected = oracle(tokenizer, ids, params, kind)
    assert Expected("".join(deltas), stopped, stopped_after) == expected
    if stopped_after is not None:
        assert not any(deltas[stopped_after:])


@given(data=st.data())
@slow
def test_only_the_beginning_of_a_stop_string_is_held_back(
    tokenizers_by_kind: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = data.draw(id_lists(tokenizer))
    params = data.draw(stop_params(tokenizer.decode(ids)))
    detokenizer = Detokenizer(tokenizer, params)
    given_out = ""
    for count, token_id in enumerate(ids, start=1):
        given_out += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            return
        text = visible_byte_level(tokenizer, ids[:count])
        assert text.startswith(given_out)
        held = text[len(given_out) :]
        assert any(stop.startswith(held) and stop != held for stop in params.stop)


def push_text(detokenizer: Detokenizer, tokenizer: Tokenizer, text: str) -> list[str]:
    return [detokenizer.push(i) for i in tokenizer.encode(text, special=False)]


def test_an_emoji_comes_whole(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["llama"]
    ids = tokenizer.encode("🦊 a", special=False)
    assert len(ids) > 4
    deltas, _, _ = run(tokenizer, ids, SamplingParams())
    assert "".join(deltas) == "🦊 a"
    assert next(delta for delta in deltas if delta).startswith("🦊")


def test_a_stop_across_tokens_is_not_seen_by_the_client(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("\nUser:",)))
    deltas = push_text(detokenizer, tokenizer, "hello\nUse\nUser: bye")
    assert "".join(deltas) + detokenizer.finish() == "hello\nUse"
    assert detokenizer.stopped == "\nUser:"
    assert detokenizer.push(5) == ""


def test_text_held_for_a_stop_that_never_came_is_given_at_the_end(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("lazy dog!",)))
    assert "".join(push_text(detokenizer, tokenizer, "The lazy dog")) == "The "
    assert detokenizer.finish() == "lazy dog"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped is None


def test_a_newline_byte_stops_at_once(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """In byte-fallback vocabularies a newline is a byte token, whose text is otherwise held until its run ends."""
    tokenizer = tokenizers_by_kind["gemma"]
    newline, broken = (i for i in range(tokenizer.vocab_size) if tokenizer.token(i) in ("<0x0A>", "<0xFF>"))
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("\n",)))
    assert detokenizer.push(newline) == ""
    assert detokenizer.stopped == "\n"
    ignored = Detokenizer(tokenizer, SamplingParams(stop=("\n",), min_tokens=2))
    assert [ignored.push(newline), ignored.push(broken), ignored.finish()] == ["", "\ufffd\ufffd", ""]
    assert ignored.stopped is None


def test_min_tokens_turns_early_stops_into_text(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = tokenizer.encode("a.b.c.d", special=False)
    assert len(ids) == 7
    for min_tokens, expected in [(0, "a"), (2, "a"), (3, "a.b"), (4, "a.b"), (5, "a.b.c"), (7, "a.b.c.d")]:
        deltas, _, _ = run(tokenizer, ids, SamplingParams(stop=(".",), min_tokens=min_tokens))
        assert "".join(deltas) == expected


def test_special_tokens_show_only_when_asked(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["llama"]
    ids = [1, *tokenizer.encode("The fox", special=False), 2]
    assert "".join(run(tokenizer, ids, SamplingParams())[0]) == "The fox"
    assert "".join(run(tokenizer, ids, SamplingParams(skip_special_tokens=False))[0]) == "<s> The fox</s>"


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_long_answers_do_not_slow_down(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    """Decoding the text so far once per token would take minutes here."""
    tokenizer = tokenizers_by_kind[kind]
    text = "The fox 🦊狐 and so on\n" * 2000 + "狐" * 10_000
    ids = tokenizer.encode(text, special=False)
    assert len(ids) > 20_000
    deltas, _, _ = run(tokenizer, ids, SamplingParams(stop=("so on so forth", "🦊🦊")))
    assert "".join(deltas) == tokenizer.decode(ids)
