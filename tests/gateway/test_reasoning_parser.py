"""Reasoning is split from the answer: by the text alone, however it was cut, and without losing a character."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.serving import ScriptedEngine
from tripool.engine.fake import fake_text
from tripool.gateway.output_parser import OutputParser
from tripool.gateway.reasoning_parser import CLOSING, OPENING, ReasoningParser
from tripool.gateway.tool_parser import Content, ParsedOutput

HELLO: Any = [{"role": "user", "content": "hello"}]


def read(pieces: list[str], *, opened: bool) -> ParsedOutput:
    reader, parsed = ReasoningParser(opened=opened), ParsedOutput()
    for piece in pieces:
        for part in reader.push(piece):
            assert part.text, "an empty piece"
            parsed.add(part)
    for part in reader.finish():
        parsed.add(part)
    return parsed


def all_cuts(text: str) -> Iterator[list[str]]:
    """In one, in letters, and in two and three pieces at every place."""
    yield [text]
    yield list(text)
    for first in range(len(text) + 1):
        yield [text[:first], text[first:]]
        for second in range(first, len(text) + 1, 3):
            yield [text[:first], text[first:second], text[second:]]


EXAMPLES = [
    ("plain", False, "", "plain"),
    ("", False, "", ""),
    ("<think>hm</think>yes", False, "hm", "yes"),
    ("\n<think>\nhm\n\nhm\n</think>\n\nyes\n", False, "hm\n\nhm", "yes\n"),
    ("hm\n</think>\n\nyes", True, "hm", "yes"),
    ("never closed\n", True, "never closed\n", ""),
    ("<think>cut </thi", False, "cut </thi", ""),
    ("<think>", False, "", ""),
    ("<think></think>", False, "", ""),
    ("<thin", False, "", "<thin"),
    ("<thinner", False, "", "<thinner"),
    ("not <think>at the start</think>", False, "", "not <think>at the start</think>"),
    (" " * 17 + "<think>a</think>", False, "", " " * 17 + "<think>a</think>"),
    ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
    ("<think><</think><", False, "<", "<"),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), EXAMPLES)
def test_examples_at_every_cut(text, opened, reasoning, content):
    for pieces in all_cuts(text):
        parsed = read(pieces, opened=opened)
        assert (parsed.reasoning, parsed.content) == (reasoning, content), pieces


@given(st.lists(st.sampled_from([OPENING, CLOSING, "\n", " ", "a", "<", "/", "think>", "<tool_call>"])), st.booleans())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_any_text_is_read_alike(parts, opened):
    whole = "".join(parts)
    want = read([whole], opened=opened)
    for pieces in all_cuts(whole):
        assert read(pieces, opened=opened) == want


@given(st.text(alphabet="ab<th/ink>\n ", max_size=40).filter(lambda text: not text.lstrip().startswith("<th")))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_text_without_the_mark_is_untouched(text):
    assert read(list(text), opened=False) == ParsedOutput(content=text)


def test_speech_counts_reasoning_tokens_and_knows_when_it_is_plain():
    parser = OutputParser(calls=False, thinks=False)
    for text in ("<think>", "hm", "</think>"):
        parser.push(text, last=False)
        assert not parser.plain
    assert parser.reasoning_tokens == 3
    assert parser.push("\n\n", last=False) == []
    assert parser.push("yes", last=False) == [Content("yes")]
    assert parser.plain
    assert parser.reasoning_tokens == 3
    quiet = OutputParser(calls=False, thinks=False)
    quiet.push("<thinner", last=True)
    assert quiet.reasoning_tokens == 0


def test_calls_come_after_the_reasoning():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text = f"<think>shall I {call}?</think>\nI do.{call}"
    for pieces in all_cuts(text):
        parser = OutputParser(calls=True, thinks=False)
        for piece in pieces:
            parser.push(piece, last=False)
        parser.push("", last=True)
        assert parser.called
        assert parser.parsed.reasoning == f"shall I {call}?"
        assert parser.parsed.content == "I do."
        assert [(c.name, c.arguments) for c in parser.parsed.calls] == [("f", "{}")]


THOUGHTS = "hm peer\nor pool?"
SCRIPTS = [
    (False, f"<think>\n{THOUGHTS}\n</think>\n\nA pool.", THOUGHTS, "A pool."),
    (True, f"{THOUGHTS}\n</think>\n\nA pool.", THOUGHTS, "A pool."),
    (True, THOUGHTS, THOUGHTS, ""),
    (False, "A pool. <think>", "", "A pool. <think>"),
]


@pytest.mark.parametrize(("opened", "script", "reasoning", "content"), SCRIPTS)
def test_over_http(serve, opened, script, reasoning, content):
    text = fake_text()
    if opened:
        assert text.chat_template is not None
        text = replace(text, chat_template=text.chat_template.replace("<|assistant|>{%", "<|assistant|><think>\n{%"))
    with serve(engine=ScriptedEngine(script, text=text)) as served:
        answer = served.openai.chat.completions.create(model="fake", messages=HELLO)
        message = answer.choices[0].message
        assert getattr(message, "reasoning_content", "") == getattr(message, "reasoning", "") == reasoning
        assert message.content == content
        details = answer.usage.completion_tokens_details
        assert (details.reasoning_tokens > 0) == bool(reasoning)
        assert details.reasoning_tokens <= answer.usage.completion_tokens

        with served.openai.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        ) as stream:
            *chunks, last = stream
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == content
        for name in ("reasoning_content", "reasoning"):
            assert "".join(getattr(delta, name, None) or "" for delta in deltas) == reasoning
        assert last.usage.completion_tokens_details == details

        blocks = served.anthropic.messages.create(model="fake", messages=HELLO, max_tokens=500).content
        shown = [("thinking", reasoning)] * bool(reasoning) + [("text", content)] * bool(content)
        assert [(block.type, getattr(block, block.type)) for block in blocks] == shown
        with served.anthropic.messages.stream(model="fake", messages=HELLO, max_tokens=500) as events:
            streamed = events.get_final_message().content
        assert [(block.type, getattr(block, block.type)) for block in streamed] == shown


def test_it_can_be_turned_off_and_sent_back(serve):
    script = f"<think>{THOUGHTS}</think>A pool."
    with serve(engine=ScriptedEngine(script)) as served:
        extra = {"separate_reasoning": False}
        whole = served.openai.chat.completions.create(model="fake", messages=HELLO, extra_body=extra)
        assert whole.choices[0].message.content == script
        split = served.openai.chat.completions.create(model="fake", messages=HELLO)
        turns = [*HELLO, split.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
        assert served.openai.chat.completions.create(model="fake", messages=turns).choices


def test_it_can_be_left_out(serve):
    script = f"<think>{THOUGHTS}</think>A pool."
    with serve(engine=ScriptedEngine(script)) as served:
        body = {"model": "fake", "messages": HELLO, "include_reasoning": False}
        answer = served.http.post("/v1/chat/completions", json=body).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == "A pool." and not message.keys() & {"reasoning", "reasoning_content"}
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        streamed = served.http.post("/v1/chat/completions", json=body | {"stream": True}).text
        assert "reasoning" not in streamed and THOUGHTS[:5] not in streamed
        body = {"model": "fake", "input": "hello", "include_reasoning": False}
        items = served.http.post("/v1/responses", json=body).json()["output"]
        assert [item["type"] for item in items] == ["message"]
        assert "reasoning" not in served.http.post("/v1/responses", json=body | {"stream": True}).text.replace(
            "reasoning_tokens", ""
        ).replace('"reasoning":{', "")
