"""Sampler and scheduler under a grammar: the mask has the last word, and the guide is told every final token once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams
from tripool.engine.sampler import Sampler, adjust
from tripool.engine.scheduler import Scheduler
from tripool.sequence import Sampled, Seq

VOCAB, END = 32, 0


@dataclass
class Script:
    """A guide that allows given tokens at each position, then the end, if there is one."""

    steps: list[set[int]]
    end: int | None = END
    breaks: bool = False
    mask_s: float = 0.0
    seen: list[int] = field(default_factory=list)

    def allowed(self) -> set[int]:
        if len(self.seen) < len(self.steps):
            return self.steps[len(self.seen)]
        ended = self.end is None or self.end in self.seen
        return set() if ended or self.breaks else {self.end}

    def mask(self) -> np.ndarray:
        mask = np.zeros(VOCAB, dtype=np.bool_)
        mask[sorted(self.allowed())] = True
        return mask

    def accept(self, token_id: int) -> None:
        assert token_id in self.allowed()
        self.seen.append(token_id)

    @property
    def done(self) -> bool:
        return len(self.seen) >= len(self.steps) and not self.breaks

    @property
    def spent(self) -> bool:
        return not self.allowed()


def make_request(*, end_ids: frozenset[int] = frozenset({END}), **params: object) -> Request:
    options = SamplingParams.from_options(params)
    return Request(id="r", prompt_ids=(1, 2, 3), params=options, seed=5, end_ids=end_ids)


def make_seq(guide: Script, generated: tuple[int, ...] = (), **params: object) -> Seq:
    request = make_request(**params)
    return Seq(request, 0, 0, 100, [*request.prompt_ids, *generated], guide=guide)


SETTINGS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.9},
    {"temperature": 0, "logit_bias": {7: -100, 8: -100, 20: 100}},
    {"temperature": 1.0, "repetition_penalty": 50.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    {"temperature": 1.0, "min_tokens": 50, "stop_token_ids": [7, 8]},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_only_what_the_grammar_allows_is_sampled(params):
    """Whatever else the request asks for; and a batch mixes guided rows with free ones."""
    sampler, rng = Sampler(VOCAB), torch.Generator().manual_seed(1)
    for _ in range(20):
        logits = torch.randn(3, VOCAB, generator=rng) * 8
        free = Seq(make_request(temperature=0), 0, 0, 100, [1, 2, 3])
        want = int(logits[0].argmax())
        seqs = [free, make_seq(Script([{7, 8}]), **params), make_seq(Script([{9}]), **params)]
        first, second, third = (sampled.token_id for sampled in sampler.sample(logits, seqs))
        assert (first, third) == (want, 9)
        assert second in (7, 8)


def test_greedy_takes_the_largest_that_is_allowed():
    logits = torch.arange(VOCAB, dtype=torch.float32)[None].clone()
    assert Sampler(VOCAB).sample(logits.clone(), [make_seq(Script([{3, 11, 5}]), temperature=0)])[0].token_id == 11
    assert Sampler(VOCAB).guess(logits.clone(), [make_seq(Script([{3, 11, 5}]), temperature=0)]) == [11]


def test_a_ban_falls_where_the_grammar_leaves_nothing_else():
    """Done before `min_tokens`: the end must come."""
    seq = make_seq(Script([{9}], seen=[9]), generated=(9,), min_tokens=10, temperature=1.0)
    assert Sampler(VOCAB).sample(torch.randn(1, VOCAB), [seq])[0].token_id == END
    row = torch.zeros(VOCAB)
    adjust(row, make_seq(Script([{9, END}]), min_tokens=10))
    assert row.isfinite().nonzero().flatten().tolist() == [9]


def test_infinite_noise_does_not_exist():
    """With a banned row of 8192 tokens, 1 draw in 2000 used to be NaN, and then any token at all."""
    sampler, guide = Sampler(8192), Script([{9}])
    request = Request(id="r", prompt_ids=(1,), params=SamplingParams(), seed=1)
    for num_generated in (576, 1072):
        seq = Seq(request, 0, 0, 10**6, [1] * (1 + num_generated))
        seq.guide = guide
        guide.mask = lambda: np.arange(8192) == 9
        assert sampler.sample(torch.zeros(1, 8192), [seq])[0].token_id == 9


def make_scheduler() -> Scheduler:
    config = SchedulerConfig(num_blocks=8, block_tokens=4, max_running=4, step_tokens=16)
    return Scheduler(config, model="m", context_tokens=32)


def run(scheduler: Scheduler, tokens: list[int]) -> list[tuple[int, str | None]]:
    seen = []
    for token in tokens:
        tasks = scheduler.schedule()
        events = scheduler.settle(tasks, [Sampled(token) if task.samples else None for task in tasks])
        scheduler.check()
        seen += [(event.token_id, event.finish_reason) for event in events]
        if not scheduler.busy:
            break
    return seen


def test_the_guide_is_told_every_token_and_the_end_ends():
    scheduler, guide = make_scheduler(), Script([{4}, {5}])
    scheduler.add(make_request(), [guide])
    assert run(scheduler, [4, 5, END, 9]) == [(4, None), (5, None), (END, "stop")]
    assert guide.seen == [4, 5, END]
    assert scheduler.pool.num_held == 0


def test_done_without_an_end_token_is_a_stop():
    scheduler, guide = make_scheduler(), Script([{4}, {5}], end=None)
    scheduler.add(make_request(end_ids=frozenset()), [guide])
    assert run(scheduler, [4, 5, 6]) == [(4, None), (5, "stop")]


def test_a_grammar_that_broke_down_is_no_success():
    scheduler, guide = make_scheduler(), Script([{4}, {5}], breaks=True)
    scheduler.add(make_request(), [guide])
    assert run(scheduler, [4, 5, 6]) == [(4, None), (5, "length")]


def test_max_tokens_cuts():
    scheduler, guide = make_scheduler(), Script([{4}] * 5)
    scheduler.add(make_request(max_tokens=2), [guide])
    assert run(scheduler, [4, 4, 4]) == [(4, None), (4, "length")]


def test_each_choice_has_its_own():
    scheduler, guides = make_scheduler(), [Script([{4}, {4}, {4}]), Script([{4}])]
    scheduler.add(make_request(n=2, end_ids=frozenset()), guides)
    assert all(guide.end == END for guide in guides)
    guides[0].end = guides[1].end = None
    assert [reason for _, reason in run(scheduler, [4] * 6)].count("stop") == 2
    assert [len(guide.seen) for guide in guides] == [3, 1]


def test_a_preempted_sequence_keeps_its_guide():
    """The state of the guide belongs to the tokens, and a preemption loses none of them."""
    config = SchedulerConfig(num_blocks=4, block_tokens=4, max_running=4, step_tokens=16, prefix_reuse=False)
    scheduler = Scheduler(config, model="m", context_tokens=16)
    guides = {}
    for name in ("old", "young"):
        guides[name] = Script([{4}] * 8)
        params = SamplingParams(max_tokens=8)
        request = Request(id=name, prompt_ids=(1, 2, 3, 4), params=params, seed=0, end_ids=frozenset({END}))
        scheduler.add(request, [guides[name]])
    run(scheduler, [4] * 60)
    assert scheduler.num_preemptions > 0
    assert [len(guide.seen) for guide in guides.values()] == [8, 8]
