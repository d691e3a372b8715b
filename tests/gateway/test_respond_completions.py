"""Text completions: the shapes that differ from chat."""

from __future__ import annotations

from typing import Any

import pytest

from tripool import LLM, Generation, SamplingParams
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake

PROMPTS = ["Once upon a pool", "The second prompt"]


def expected(prompts: Any, **options: Any) -> list[Generation]:
    with LLM(PagedFake(fake_text())) as llm:
        return llm.generate(prompts, SamplingParams(**options))


def test_one_prompt(server):
    answer = server.openai.completions.create(model="fake", prompt=PROMPTS[0], seed=1)
    (want,) = expected(PROMPTS[0], seed=1)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (want.text, "stop")
    assert answer.usage.prompt_tokens == len(want.prompt_ids)


def test_several_prompts_with_choices(server):
    wants = expected(PROMPTS, seed=1, n=2)
    answer = server.openai.completions.create(model="fake", prompt=PROMPTS, seed=1, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [choice.text for want in wants for choice in want.choices]
    assert answer.usage.prompt_tokens == sum(want.usage.prompt_tokens for want in wants)
    assert answer.usage.completion_tokens == sum(want.usage.completion_tokens for want in wants)


def test_several_prompts_stream(server):
    texts: list[str] = [""] * 4
    finishes: list[Any] = [None] * 4
    with server.openai.completions.create(model="fake", prompt=PROMPTS, seed=1, n=2, stream=True) as stream:
        for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.text for want in expected(PROMPTS, seed=1, n=2) for choice in want.choices]
    assert finishes == ["stop"] * 4


def test_stop_string_ends_one_prompt_and_leaves_the_other(server):
    first, second = (want.text for want in expected(PROMPTS, seed=1))
    stop = next(first[i : i + 5] for i in range(len(first) - 5) if first[i : i + 5] not in second)
    answer = server.openai.completions.create(model="fake", prompt=PROMPTS, seed=1, stop=stop)
    assert [choice.text for choice in answer.choices] == [first[: first.index(stop)], second]


@pytest.mark.parametrize("many", [False, True])
def test_token_ids_as_prompt(server, many):
    ids = [list(want.prompt_ids) for want in expected(PROMPTS, seed=1)]
    answer = server.openai.completions.create(model="fake", prompt=ids if many else ids[0], seed=1)
    assert [c.text for c in answer.choices] == [want.text for want in expected(PROMPTS, seed=1)][: 2 if many else 1]


def test_logprobs(server):
    (want,) = expected(PROMPTS[0], seed=1, logprobs=3, max_tokens=5)
    answer = server.openai.completions.create(model="fake", prompt=PROMPTS[0], seed=1, logprobs=3, max_tokens=5)
    got = answer.choices[0].logprobs
    assert "".join(got.tokens) == want.text
    assert got.token_logprobs == [token.chosen for token in want.logprobs]
    assert got.text_offset == [len("".join(got.tokens[:i])) for i in range(5)]
    for token, logprob, top in zip(got.tokens, got.token_logprobs, got.top_logprobs, strict=True):
        assert top[token] == logprob
    with server.openai.completions.create(
        model="fake", prompt=PROMPTS[0], seed=1, logprobs=3, max_tokens=5, stream=True
    ) as stream:
        chunks = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs]
    assert [token for chunk in chunks for token in chunk.tokens] == got.tokens
    assert [offset for chunk in chunks for offset in chunk.text_offset] == got.text_offset


def test_finish_with_usage_in_stream(server):
    with server.openai.completions.create(
        model="fake", prompt=PROMPTS, seed=1, max_tokens=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *_, last = stream
    assert last.choices == []
    assert last.usage.completion_tokens == 4
