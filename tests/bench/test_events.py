"""Streams of events: read alike however they are cut, and every way to go wrong has a name."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.bench.events import EventReader
from tripool.bench.wire import ExchangeFailed

from .made_samples import made


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def chat(**delta: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None})


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}, "other": {}}
CHAT = (
    chat(role="assistant", content="")
    + chat(content="Hé")
    + b": keep-alive\n\n"
    + chat(reasoning_content="hm")
    + chat(tool_calls=[{"index": 0, "function": {"arguments": "{"}}])
    + event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    + event({"choices": [], "usage": USAGE})
    + b"data: [DONE]\n\n"
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, len(CHAT)), max_size=6), st.booleans())
def test_the_cut_does_not_matter(cuts, crlf):
    stream = CHAT.replace(b"\n", b"\r\n") if crlf else CHAT
    sample = made(output_tokens=4)
    reader = EventReader(sample, started_s=100.0)
    edges = [0, *sorted(cuts), len(stream)]
    for second, (low, high) in enumerate(pairwise(edges)):
        reader.feed(200, stream[low:high], 100.0 + second)
    reader.finish(200)
    assert len(sample.events_s) == 3
    assert list(sample.events_s) == sorted(sample.events_s)
    assert (sample.prompt_tokens, sample.completion_tokens, sample.cached_tokens) == (9, 4, 3)


def test_only_text_counts_as_the_first_token():
    sample = made()
    reader = EventReader(sample, started_s=0.0)
    reader.feed(200, chat(role="assistant", content=""), 1.0)
    reader.feed(200, chat(content="x"), 2.0)
    assert list(sample.events_s) == [2.0]


def test_completions():
    sample = made()
    reader = EventReader(sample, started_s=0.0)
    reader.feed(200, event({"choices": [{"text": ""}]}) + event({"choices": [{"text": "a"}]}), 1.0)
    reader.feed(200, event({"choices": [{"text": "b", "logprobs": None}]}) + b"data: [DONE]\n\n", 2.0)
    reader.finish(200)
    assert list(sample.events_s) == [1.0, 2.0]
    assert sample.completion_tokens is None


@pytest.mark.parametrize(
    ("status", "body", "kind", "detail"),
    [
        (429, b'{"error": {"message": "full", "code": "overloaded"}}', "http 429 overloaded", "full"),
        (400, b'{"object": "error", "message": "bad", "code": 400}', "http 400", "bad"),
        (422, b'{"detail": "no"}', "http 422", "no"),
        (404, b'{"error": "nothing here"}', "http 404", "nothing here"),
        (502, b"<html>", "http 502", "<html>"),
        (503, b"", "http 503", ""),
        (200, b'data: {"choices": []}\n\n', "cut off", "the stream ended without [DONE]"),
    ],
)
def test_refusals_have_names(status, body, kind, detail):
    reader = EventReader(made(), started_s=0.0)
    reader.feed(status, body, 1.0)
    with pytest.raises(ExchangeFailed) as failed:
        reader.finish(status)
    assert (failed.value.kind, failed.value.detail) == (kind, detail)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"data: {nonsense\n", "garbled"),
        (b'data: {"choices": 5}\n', "garbled"),
        (event({"error": {"message": "gone", "code": "engine_stopped"}}), "stream engine_stopped"),
        (event({"error": "gone"}), "stream"),
    ],
)
def test_what_goes_wrong_inside_a_stream(line, kind):
    reader = EventReader(made(), started_s=0.0)
    with pytest.raises(ExchangeFailed) as failed:
        reader.feed(200, line, 1.0)
    assert failed.value.kind == kind


def test_a_line_without_end():
    reader = EventReader(made(), started_s=0.0)
    for _ in range(4):
        reader.feed(200, b"x" * 2**20, 1.0)
    with pytest.raises(ExchangeFailed):
        reader.feed(200, b"x", 1.0)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_named(noise):
    reader = EventReader(made(), started_s=0.0)
    with suppress(ExchangeFailed):
        reader.feed(200, b"data: " + noise + b"\n\n", 1.0)
        reader.finish(200)
