"""Log-probabilities of a prompt's tokens: those that the plain network gives, however the prompt is cut and cached."""

from __future__ import annotations

import pytest
import torch

from tripool.core import Request, SamplingParams
from tripool.llm import LLM
from tripool.prefill.scheduler import SCORED_TOKENS

LONG = "Once upon a time there was a little dog who lived by the sea. " * 20


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny", precision="float32", kv_gb=0.05, threads=1)


def scored(llm: LLM, text: str, top: int = 3, **more):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=top, **more)
    return llm.generate(text, params)[0]


def reference(llm: LLM, ids) -> torch.Tensor:
    """The next-token distribution after every token, from one pass without chunks."""
    from tripool.engine.runner import Runner, Work

    runner = Runner(llm._engine.executor.runner.model, num_blocks=-(-len(ids) // 64))
    work = Work(list(ids), 0, list(range(-(-len(ids) // 64))), False)
    return runner.logits(runner.hidden([work])).log_softmax(-1)


def test_they_are_those_of_the_network(llm):
    answer = scored(llm, LONG)
    ids = answer.prompt_ids
    assert len(ids) > SCORED_TOKENS, "several chunks"
    expected = reference(llm, ids)
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(ids) - 1
    for position, scores in enumerate(answer.prompt_logprobs):
        row = expected[position]
        assert scores.chosen == pytest.approx(float(row[ids[position + 1]]), abs=1e-3)
        assert [score for _, score in scores.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_a_known_prefix_changes_nothing(llm):
    first = scored(llm, LONG)
    again = scored(llm, LONG)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.usage.cached_tokens == 0
    (plain,) = llm.generate(LONG, SamplingParams(max_tokens=1, temperature=0))
    assert plain.prompt_logprobs is None and plain.usage.cached_tokens > 0
    assert plain.token_ids == first.token_ids


def test_a_prompt_of_one_token_has_none_but_was_asked(llm):
    (answer,) = llm.generate([[300]], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2))
    assert answer.prompt_logprobs == ()


def test_several_choices_share_them(llm):
    alone, several = scored(llm, "A dog", top=0), scored(llm, "A dog", top=0, n=3)
    assert several.prompt_logprobs == alone.prompt_logprobs
    assert all(not scores.top for scores in alone.prompt_logprobs or ())


def test_a_preempted_prompt_is_scored_once(llm):
    engine = llm._engine
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    prompt = scored(llm, LONG).prompt_ids
    engine.add(Request(id="p", prompt_ids=prompt, params=params, seed=0))
    assert engine.step() == []
    seq = engine.scheduler.requests["p"][0]
    assert 0 < len(seq.prompt_scores) <= SCORED_TOKENS
    engine.scheduler.preempt(seq)
    events = []
    while engine.busy:
        events += engine.step()
    (event,) = events
    assert event.prompt_logprobs is not None and len(event.prompt_logprobs) == len(prompt) - 1
