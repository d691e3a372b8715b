"""Tool calls found in text: the same ones however the text was cut, and no letter lost."""

from __future__ import annotations

import json
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.gateway.tool_parser import ParsedOutput, ToolParser
from tripool.grammar.tools import CLOSING, NAME, OPENING


def read_calls(text: str) -> ParsedOutput:
    reader, parsed = ToolParser(), ParsedOutput()
    for piece in reader.push(text) + reader.finish():
        parsed.add(piece)
    parsed.complete = reader.complete
    return parsed


def written(name: str, arguments: dict) -> str:
    return f"{OPENING}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSING}"


def streamed(pieces: list[str]) -> ParsedOutput:
    reader, parsed = ToolParser(), ParsedOutput()
    for piece in pieces:
        for part in reader.push(piece):
            parsed.add(part)
    for part in reader.finish():
        parsed.add(part)
    assert len(parsed.calls) == reader.num_calls
    parsed.complete = reader.complete
    return parsed


def cut(text: str, rng: Random) -> list[str]:
    marks = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 12)))
    return [text[start:stop] for start, stop in zip([0, *marks], [*marks, len(text)], strict=True)]


names = st.from_regex(NAME, fullmatch=True)
tricky = st.text(alphabet='{}[]"\\\n\t<>/tool_call é🦊', max_size=20)
arguments = st.dictionaries(
    tricky, st.recursive(tricky | st.integers() | st.none(), st.lists, max_leaves=4), max_size=3
)
texts = st.text(alphabet='ab<tool_call>\n{}"é', max_size=30).filter(lambda text: OPENING not in text)


@given(texts, st.lists(st.tuples(names, arguments), max_size=3), st.randoms(use_true_random=False))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_text_and_calls_come_back(text, calls, rng):
    # A text that ends like the beginning of a mark would turn into one, as it would for any reader.
    if calls and any(text.endswith(OPENING[:size]) for size in range(1, len(OPENING))):
        text += "."
    whole = text + "\n".join(written(*call) for call in calls)
    parsed = read_calls(whole)
    assert parsed.content == text
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert streamed(cut(whole, rng)) == parsed
    assert streamed(list(whole)) == parsed


@given(
    st.lists(st.sampled_from([OPENING, CLOSING, '\n{"name": "', 'f", "arguments": ', "{", "}", '"', "\\", "\n", "x"]))
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_any_text_is_read_alike_whole_and_in_letters(parts):
    """Also what no grammar would have let through: cut off, out of order, nested."""
    whole = "".join(parts)
    assert streamed(list(whole)) == streamed(parts) == read_calls(whole)


def test_a_call_that_is_cut_off():
    whole = written("f", {"a": "bc"})
    head = whole.index("{", whole.index("arguments"))
    assert read_calls(whole).complete
    for size in range(len(whole)):
        parsed = read_calls(whole[:size])
        assert parsed.complete == (size < len(OPENING))
        if size <= head:
            assert (parsed.content, parsed.calls) == (whole[:size] if size < len("<tool") else "", [])
        else:
            assert parsed.content == ""
            assert [call.arguments for call in parsed.calls] == [whole[head : min(size, whole.index("}\n"))]]
