"""Chat completions through the official client, against the Python API over the same deterministic engine."""

from __future__ import annotations

from typing import Any

import pytest

from tripool import LLM, Generation, SamplingParams
from tripool.answer import Answer
from tripool.core import Request, TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.gateway.respond import usage_shape
from tripool.text import Tokenizer

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which pool? é"}]


def expected(**options: Any) -> Generation:
    with LLM(PagedFake(fake_text())) as llm:
        return llm.chat(MESSAGES, SamplingParams(**options))[0]


def test_answer_is_the_engines(server):
    answer = server.openai.chat.completions.create(model="fake", messages=MESSAGES, seed=7)
    want = expected(seed=7)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == want.text != ""
    assert choice.finish_reason == want.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == len(want.prompt_ids)
    assert answer.usage.completion_tokens == len(want.token_ids)
    assert answer.usage.total_tokens == len(want.prompt_ids) + len(want.token_ids)


def test_stream_gives_the_same_text(server):
    with server.openai.chat.completions.create(
        model="fake", messages=MESSAGES, seed=7, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    want = expected(seed=7)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.role for c in chunks[1:-1]] == [None] * (len(chunks) - 2)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == want.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(want.token_ids)


def test_stream_without_usage_has_none(server):
    body = {"messages": MESSAGES, "stream": True, "seed": 1, "max_tokens": 3}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert not any("usage" in line for line in lines)


def test_two_choices_differ_and_stream_alike(server):
    whole = server.openai.chat.completions.create(model="fake", messages=MESSAGES, seed=3, n=2)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert texts == [choice.text for choice in expected(seed=3, n=2).choices]
    assert texts[0] != texts[1]
    streamed = ["", ""]
    with server.openai.chat.completions.create(model="fake", messages=MESSAGES, seed=3, n=2, stream=True) as stream:
        for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_answer(server, stream):
    want = expected(seed=7)
    stop = want.text[10:13]
    cut = want.text[: want.text.index(stop)]
    answer = server.openai.chat.completions.create(model="fake", messages=MESSAGES, seed=7, stop=[stop], stream=stream)
    if stream:
        chunks = list(answer)
        text, finish = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len(expected(seed=7, stop=(stop,)).token_ids) < len(want.token_ids)
    assert (text, finish) == (cut, "stop")


def test_stop_string_of_one_choice_leaves_the_other(server):
    first, second = (choice.text for choice in expected(seed=3, n=2).choices)
    stop = next(first[i : i + 5] for i in range(len(first) - 5) if first[i : i + 5] not in second)
    answer = server.openai.chat.completions.create(model="fake", messages=MESSAGES, seed=3, n=2, stop=stop)
    assert [choice.message.content for choice in answer.choices] == [first[: first.index(stop)], second]


def test_length(server):
    answer = server.openai.chat.completions.create(model="fake", messages=MESSAGES, seed=7, max_completion_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_logprobs(server):
    answer = server.openai.chat.completions.create(
        model="fake", messages=MESSAGES, seed=7, logprobs=True, top_logprobs=2, max_tokens=6
    )
    want = expected(seed=7, logprobs=2, max_tokens=6)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [token.chosen for token in want.logprobs]
    assert "".join(entry.token for entry in content) == want.text
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == want.text
    assert [len(entry.top_logprobs) for entry in content] == [2] * 6
    with server.openai.chat.completions.create(
        model="fake", messages=MESSAGES, seed=7, logprobs=True, top_logprobs=2, max_tokens=6, stream=True
    ) as stream:
        streamed = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == content


def test_logprobs_keep_a_token_for_every_entry_with_stop_strings(server):
    """Text that is held back for a stop string must not lose its tokens' logprobs."""
    body = {
        "messages": MESSAGES,
        "seed": 7,
        "logprobs": True,
        "max_tokens": 6,
        "stop": [expected(seed=7).text[:9] + "?"],
    }
    answer = server.openai.chat.completions.create(model="fake", stream=True, **body)
    entries = [e for c in answer if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert "".join(entry.token for entry in entries) == expected(seed=7, max_tokens=6).text


def test_every_option_reaches_the_engine(server):
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    server.openai.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        seed=-5,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logit_bias={"12": -100, "13": 1.5},
        stop=["<1>", "<2>"],
        max_tokens=4,
        user="someone",
        metadata={"a": "b"},
        extra_body=extra,
    )
    (request,) = server.engine.added
    assert request.seed == -5
    assert request.params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        logit_bias={12: -100, 13: 1.5},
        stop=("<1>", "<2>"),
        max_tokens=4,
        seed=-5,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.5,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(9,),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )


def test_without_max_tokens_the_context_is_the_limit(server):
    server.openai.chat.completions.create(model="fake", messages=MESSAGES)
    assert server.engine.added[0].params.max_tokens is None


def test_seeds_are_drawn_when_none_is_given(server):
    for _ in range(2):
        server.openai.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=1)
    first, second = server.engine.added
    assert first.seed != second.seed


def test_cached_tokens_are_counted(server):
    messages: Any = [{"role": "user", "content": "cached " * 100}]
    first, second = (
        server.openai.chat.completions.create(model="fake", messages=messages, max_tokens=1).usage for _ in range(2)
    )
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens // 64 * 64 > 0


def test_drafts_are_counted():
    tokenizer = Tokenizer(fake_text())
    answers = []
    for drafted, accepted in ((5, 3), (2, 2)):
        request = Request(id="r", prompt_ids=(5,), params=SamplingParams(), seed=0)
        answers.append(Answer(request, tokenizer))
        event = TokenEvent("r", 0, 0, 9, "length", num_draft_tokens=drafted, num_accepted_draft_tokens=accepted)
        answers[-1].take(event)
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2, "reasoning_tokens": 0}
    assert usage_shape([answer.usage for answer in answers])["completion_tokens_details"] == details


def test_content_parts_and_developer_role_are_text(server):
    parts: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Which pool? é"},
    ]
    answer = server.openai.chat.completions.create(model="fake", messages=parts, seed=7)
    assert answer.choices[0].message.content == expected(seed=7).text


def test_the_answer_can_be_sent_back(server):
    """What the client gives us for an assistant's turn is its own dump of our message, nulls included."""
    answer = server.openai.chat.completions.create(model="fake", messages=MESSAGES, seed=7)
    turn: Any = answer.choices[0].message.model_dump()
    again = server.openai.chat.completions.create(
        model="fake", messages=[*MESSAGES, turn, {"role": "user", "content": "And?"}]
    )
    assert again.usage.prompt_tokens > answer.usage.total_tokens - 1
