"""Traces in, requests out; what is wrong is said with its line."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.bench.trace import BadTrace, parse_trace


def line(**changes: object) -> str:
    fields = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def test_a_trace_of_three():
    lines = [line(timestamp=1500), "", line(timestamp=2750, hash_ids=[0, 2]), line(timestamp=2000, output_length=7)]
    first, second, third = parse_trace(lines)
    assert (first.arrival_s, first.input_tokens, first.output_tokens, first.block_ids) == (0.0, 700, 5, (0, 1))
    assert (second.arrival_s, second.output_tokens) == (0.5, 7)
    assert (third.arrival_s, third.block_ids) == (1.25, (0, 2))


def test_only_the_first_ones():
    lines = [line(timestamp=9), line(timestamp=1), "not even JSON"]
    assert [request.arrival_s for request in parse_trace(lines, max_requests=2)] == [0.0, 0.008]


def test_full_blocks_alone_may_be_hashed():
    assert parse_trace([line(hash_ids=[0])])[0].block_ids == (0,)
    assert parse_trace([line(input_length=512, hash_ids=[0])])[0].input_tokens == 512
    assert parse_trace([line(input_length=40, hash_ids=[0, 1, 2])], block_tokens=16)[0].input_tokens == 40


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not an object"),
        (line(timestamp=None), "line 2: timestamp is None"),
        (line(timestamp=-1), "line 2: timestamp is -1"),
        (line(timestamp=True), "line 2: timestamp is True"),
        (line(timestamp=float("nan")), "line 2: timestamp is nan"),
        (line(input_length=0), "line 2: input_length is 0"),
        (line(input_length="700"), "line 2: input_length is '700'"),
        (line(output_length=1.5), "line 2: output_length is 1.5"),
        (line(hash_ids="01"), "line 2: hash_ids"),
        (line(hash_ids=[0, None]), "line 2: hash_ids"),
        (line(hash_ids=[0, 1, 2]), "line 2: 700 tokens have 2 blocks of 512, not 3"),
        (line(hash_ids=[]), "line 2: 700 tokens have 2 blocks of 512, not 0"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text, said):
    with pytest.raises(BadTrace) as refused:
        parse_trace([line(), text])
    assert refused.value.message.startswith(said)
    assert refused.value.hint


def test_an_empty_trace():
    with pytest.raises(BadTrace, match="no requests"):
        parse_trace(["", "  \n"])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text):
    with suppress(BadTrace):
        assert parse_trace(text.split("\n"))
