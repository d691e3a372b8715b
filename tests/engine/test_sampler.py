"""The sampler against plain arithmetic on probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.core import Request, SamplingParams
from tripool.engine.sampler import Sampler, adjust, keep
from tripool.sequence import Seq

VOCAB = 50


def seq(prompt=(1, 2, 3), generated=(), choice=0, seed=0, end_ids=(), **params) -> Seq:
    request = Request(
        id="r", prompt_ids=tuple(prompt), params=SamplingParams(**params), seed=seed, end_ids=frozenset(end_ids)
    )
    return Seq(request, choice, 0, 100, [*prompt, *generated])


def kept_by_definition(row: torch.Tensor, params: SamplingParams) -> set[int]:
    """top_k, then top_p over what is left, then min_p, straight from their definitions in float64."""
    probs = row.double().softmax(-1)
    order = sorted(range(len(row)), key=lambda i: -probs[i])
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += probs[i]
    return {i for i in kept if probs[i] >= params.min_p * probs[kept[0]]}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 2, 7, 50, 400]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([3, 300, 700]),
)
def test_filters_keep_what_their_definitions_say(data_seed, top_k, top_p, min_p, vocab):
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(data_seed)) * 2
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = keep(row, params)
    ours = set(range(vocab)) if kept is None else set(kept.tolist())
    expected = kept_by_definition(row, params)
    # A token exactly on a threshold may fall either way in float32.
    assert len(ours ^ expected) <= 1
    assert int(row.argmax()) in ours


def test_greedy_takes_the_largest_and_ties_go_to_the_lower():
    logits = torch.zeros(2, VOCAB)
    logits[1, 7] = 1.0
    assert [s.token_id for s in Sampler(VOCAB).sample(logits, [seq(temperature=0), seq(temperature=0)])] == [0, 7]


def test_penalties_and_bias():
    row = torch.ones(VOCAB)
    row[2] = -1.0
    params = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {9: 3.0}}
    adjust(row, seq(prompt=(1, 2), generated=(4, 4, 5), **params))
    assert row[1] == 0.5  # in the prompt: halved
    assert row[2] == -2.0  # negative: doubled
    assert row[4] == 0.5 - 2 * 0.5 - 0.25
    assert row[5] == 0.5 - 0.5 - 0.25
    assert row[9] == 4.0
    assert row[3] == 1.0


def test_min_tokens_bans_end_and_stop_tokens_until_then():
    logits = torch.zeros(3, VOCAB)
    logits[:, 6], logits[:, 8] = 9.0, 8.0
    early = seq(generated=(1,), end_ids=[6], stop_token_ids=[8], min_tokens=2, temperature=0)
    late = seq(generated=(1, 2), end_ids=[6], stop_token_ids=[8], min_tokens=2, temperature=0)
    ignoring = seq(generated=(1,), end_ids=[6], min_tokens=2, temperature=0, ignore_eos=True)
    assert [s.token_id for s in Sampler(VOCAB).sample(logits, [early, late, ignoring])] == [0, 6, 6]


def test_logprobs_are_those_of_the_untouched_logits():
    torch.manual_seed(0)
    row = torch.randn(VOCAB)
    expected = row.double().log_softmax(-1)
    params = {"logprobs": 3, "temperature": 0, "logit_bias": {5: 100.0}, "top_k": 1}
    (sampled,) = Sampler(VOCAB).sample(row[None].clone(), [seq(**params)])
    assert sampled.token_id == 5
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen == pytest.approx(expected[5].item(), rel=1e-5)
    best = expected.topk(3)
    assert [t for t, _ in sampled.logprobs.top] == best.indices.tolist()
    assert [p for _, p in sampled.logprobs.top] == pytest.approx(best.values.tolist(), rel=1e-5)


def test_zero_top_logprobs_still_reports_the_chosen_one():
    (sampled,) = Sampler(VOCAB).sample(torch.zeros(1, VOCAB), [seq(logprobs=0, temperature=0)])
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen == pytest.approx(-math.log(VOCAB))
    assert sampled.logprobs.top == ()


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(1)
    logits = torch.randn(32, VOCAB)
    seqs = [seq(seed=i // 4, choice=i % 4, temperature=0.8, top_p=0.9, generated=[3] * i) for i in range(32)]
    together = Sampler(VOCAB).sample(logits.clone(), seqs)
    alone = [Sampler(VOCAB).sample(logits[i : i + 1].clone(), [seqs[i]])[0] for i in range(32)]
    assert together == alone
    assert len({s.token_id for s in together}) > 5


@pytest.mark.parametrize("known", [VOCAB, VOCAB // 4], ids=["all", "first"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "min_tokens": 9, "end_ids": [4]},
        {"temperature": 0.8, "top_k": 5, "min_p": 0.1, "logit_bias": {3: 4.0, VOCAB - 1: 9.0}},
    ],
)
def test_a_guess_is_what_would_be_sampled_from_the_same_logits(params, known):
    """Of which a guess may have those of the first ids only: the others are then out of the question."""
    torch.manual_seed(2)
    logits = torch.randn(12, VOCAB) * 2
    logits[:, known:] = float("-inf")
    seqs = [seq(seed=i, generated=[i, i, 4], **params) for i in range(12)]
    sampler = Sampler(VOCAB)
    sampled = [s.token_id for s in sampler.sample(logits.clone(), seqs)]
    assert sampler.guess(logits[:, :known].clone(), seqs) == sampled


def test_temperature_flattens_and_top_p_cuts():
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler = Sampler(4)

    def shares(**params) -> list[float]:
        seqs = [seq(seed=i, **params) for i in range(4000)]
        tokens = [sampler.sample(row[None].clone(), [s])[0].token_id for s in seqs]
        return [tokens.count(i) / len(tokens) for i in range(4)]

    assert shares(temperature=2.0) == pytest.approx((row / 2).softmax(-1).tolist(), abs=0.03)
    assert shares(temperature=1.0, top_p=0.7) == pytest.approx([*row[:2].softmax(-1).tolist(), 0, 0], abs=0.03)
