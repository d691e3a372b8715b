"""Whatever a request may ask and a network may say: the chosen token exists, and the grammar allows it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tripool.core import MAX_LOGPROBS, Request, SamplingParams
from tripool.engine.device_sampler import DeviceSampler
from tripool.engine.sampler import Sampler
from tripool.sequence import Seq

VOCAB = 40
TINY = (5e-324, 1e-46, 1e-38, 1.2e-38, 1e-30, 1e-10, 1e-6)

ids = st.integers(0, VOCAB - 1)
positive = st.sampled_from(TINY) | st.floats(0, 1, exclude_min=True)
options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from((0, *TINY, 1e-5, 100)) | st.floats(0, 100),
        "top_p": positive,
        "top_k": st.sampled_from((-1, 0, 1, 3, VOCAB, 2**31)),
        "min_p": st.just(0.0) | positive,
        "repetition_penalty": positive | st.floats(1, 100),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=4),
        "logprobs": st.none() | st.integers(0, MAX_LOGPROBS),
        "seed": st.sampled_from((-(2**63), -1, 0, 1, 2**64 - 1)),
        "stop_token_ids": st.lists(ids, max_size=3) | st.just(list(range(VOCAB))),
        "min_tokens": st.sampled_from((0, 9)),
    },
)
extreme_logits = st.sampled_from((0.0, 1.0, -1.0, 30.0, 3e38, -3e38, 1e-45, math.inf, -math.inf, math.nan))
logits = st.lists(st.floats(-30, 30, width=32) | extreme_logits, min_size=VOCAB, max_size=VOCAB)
masks = st.none() | st.sets(ids, min_size=1)


class Mask:
    """A guide at one position."""

    done = spent = False

    def __init__(self, allowed: set[int]) -> None:
        self._allowed = np.isin(np.arange(VOCAB), sorted(allowed))

    def mask(self) -> np.ndarray:
        return self._allowed

    def accept(self, token_id: int) -> None:
        raise AssertionError("a sampler accepts nothing")


def samplers() -> dict[str, Sampler]:
    plain = Sampler(VOCAB)
    plain._fast = False
    return {"fast": Sampler(VOCAB), "plain": plain, "device": DeviceSampler(VOCAB, "cpu")}


@pytest.mark.parametrize("kind", ["fast", "plain", "device"])
@settings(max_examples=80, derandomize=True)
@given(options, logits, masks)
@example({"top_p": 1e-46}, [0.0] * VOCAB, None)
@example({"temperature": 1e-38}, [5.0] * VOCAB, {7})
@example({"temperature": 1e-5}, [-3e38] * VOCAB, {7})
@example({"temperature": 0.5, "min_p": 1e-46}, [math.inf] * VOCAB, {7})
def test_a_choice_exists_and_is_allowed(kind, options, logits, allowed):
    sampler, params = samplers()[kind], SamplingParams(**options)
    request = Request(id="r", prompt_ids=(1, 2, 3), params=params, seed=params.seed or 0, end_ids=frozenset({0}))
    seq = Seq(request, 0, 0, 100, [1, 2, 3, 4, 4], guide=None if allowed is None else Mask(allowed))
    rows = torch.tensor([logits, logits], dtype=torch.float32)
    sampled = sampler.sample(rows.clone(), [seq, seq])
    assert sampled[0] == sampled[1]
    guesses = [*sampler.guess(rows[:1].clone(), [seq]), *sampler.guess(rows[:1, :9].clone(), [seq])]
    for token in (sampled[0].token_id, *guesses):
        assert 0 <= token < VOCAB
        assert allowed is None or token in allowed
    said = sampled[0].logprobs
    assert (said is None) == (params.logprobs is None)
    if said is not None:
        assert math.isfinite(said.chosen) and all(math.isfinite(value) for _, value in said.top)


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 9e-6])
def test_a_temperature_that_no_float_can_divide_by_is_greedy(temperature):
    assert SamplingParams(temperature=temperature) == SamplingParams(temperature=0)
    assert SamplingParams(temperature=1e-5).temperature == 1e-5
