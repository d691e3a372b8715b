"""Leaping over quiet steps is taking them: the same report, byte for byte, and the same scheduler."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulate.supernode.small import small_layout
from tripool.bench.trace import TraceRequest
from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, Slo
from tripool.engine.fast_forward import fast_forward, quiet_steps
from tripool.engine.scheduler import Scheduler
from tripool.sequence import Sampled, Seq
from tripool.simulate.supernode import Fault, simulate_trace
from tripool.simulate.supernode.run import TraceRun

requests = st.lists(
    st.tuples(
        st.floats(0.0, 3.0), st.integers(1, 120), st.integers(1, 90), st.integers(0, 3), st.sampled_from(["", "b"])
    ),
    min_size=1,
    max_size=25,
)
faults = st.lists(
    st.one_of(
        st.builds(Fault, st.just("chip"), st.just("decode-0"), st.integers(0, 2), st.floats(0.1, 3), st.floats(0.1, 2)),
        st.builds(Fault, st.just("node"), st.just("decode-0"), st.integers(0, 1), st.floats(0.1, 3), st.floats(0.1, 4)),
        st.builds(Fault, st.just("chip"), st.just("prefill-1"), st.none(), st.floats(0.1, 3), st.floats(0.1, 2)),
        st.builds(Fault, st.just("link"), st.just("decode-0"), st.integers(0, 2), st.floats(0.1, 3), st.floats(0.1, 2)),
        st.builds(Fault, st.just("cache"), st.just("cache-1"), st.none(), st.floats(0.1, 3), st.floats(0.1, 2)),
        st.builds(Fault, st.just("slow"), st.just("decode-0"), st.none(), st.floats(0.1, 3), st.floats(0.1, 2)),
        st.builds(Fault, st.just("hot"), st.just("decode-0"), st.none(), st.floats(0.1, 3), st.floats(0.1, 2)),
    ),
    max_size=4,
)


def asks_of(drawn: list[tuple[float, int, int, int, str]]) -> list[TraceRequest]:
    """Prompts with one of four beginnings."""
    asks = []
    for number, (at_s, prompt, answer, beginning, tenant) in enumerate(sorted(drawn)):
        count = -(-prompt // 16)
        shared = range(beginning * 100, beginning * 100 + count // 2)
        own = range(1000 + number * 100, 1000 + number * 100 + count - count // 2)
        asks.append(TraceRequest(at_s, prompt, answer, (*shared, *own), tenant, 16))
    return asks


def both(asks: list[TraceRequest], struck: list[Fault], **sizes: Any) -> tuple[str, str]:
    runs = []
    for fast_forwards in (True, False):
        data = simulate_trace(
            replace(small_layout(**sizes), fast_forwards=fast_forwards), asks, trace="t", faults=struck, slice_s=1.0
        )
        runs.append(json.dumps(data))
    return runs[0], runs[1]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests, faults, st.sampled_from([8, 12, 40]), st.sampled_from([0.005, 0.0065, 0.05]))
def test_the_same_report_whether_leaping_or_stepping(
    drawn: list[tuple[float, int, int, int, str]], struck: list[Fault], blocks: int, tpot_s: float
) -> None:
    """Little memory and strict promises: preemptions happen, and the SLO controller keeps answers waiting."""
    leapt, stepped = both(asks_of(drawn), struck, blocks=blocks, tpot_s=tpot_s)
    assert leapt == stepped


def test_a_leap_saves_events() -> None:
    asks = [TraceRequest(0.1 * number, 64, 200, (), "", 16) for number in range(8)]
    counts = []
    for fast_forwards in (True, False):
        run = TraceRun(replace(small_layout(blocks=80), fast_forwards=fast_forwards), asks)
        run.run()
        counts.append(run.timeline.num_events)
    assert 2 * counts[0] < counts[1]


def test_the_same_run_twice_gives_the_same_bytes() -> None:
    asks = asks_of([(0.05 * n, 20 + 3 * n, 10 + n, n % 3, "") for n in range(20)])
    struck = [Fault("chip", "decode-0", 1, 0.5, 0.7), Fault("chip", "prefill-1", None, 0.3, 1.0)]
    assert both(asks, struck)[0] == both(asks, struck)[0]


# ---- the scheduler alone -------------------------------------------------------------------------------------------


def batch(config: SchedulerConfig, sizes: list[tuple[int, int]]) -> Scheduler:
    """Sequences that came computed from elsewhere and run."""
    scheduler = Scheduler(config, model="m", context_tokens=10_000)
    for number, (prompt, answer) in enumerate(sizes):
        request = Request(
            id=str(number), prompt_ids=(7,) * prompt, seed=number % 2, slo=Slo(),
            params=SamplingParams(max_tokens=answer, ignore_eos=True),
        )  # fmt: skip
        seq = scheduler.attach(request, 0, (1,), prompt)
        if seq is not None:
            scheduler.start(seq)
    return scheduler


def state(scheduler: Scheduler) -> object:
    pool = scheduler.pool
    return (
        [(s.request.id, s.tokens, s.num_computed, s.table, s.keys, s.num_published) for s in scheduler.decode.running],
        [pool._refs, pool._is_blank, list(pool._idle), pool._block_of],
    )


def token_of(seq: Seq) -> int:
    return seq.request.seed


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(3, 60)), min_size=1, max_size=5),
    st.integers(4, 40), st.booleans(), st.integers(1, 50),
)  # fmt: skip
def test_a_leap_leaves_the_scheduler_as_single_steps_do(
    sizes: list[tuple[int, int]], blocks: int, reuse: bool, most: int
) -> None:
    config = SchedulerConfig(num_blocks=blocks, block_tokens=4, max_running=6, step_tokens=16, prefix_reuse=reuse)
    one, other = batch(config, sizes), batch(config, sizes)
    count = min(most, quiet_steps(one, config))
    fast_forward(one, config, count, token_of, model="m")
    one.check()
    for _ in range(count):
        tasks = other.schedule()
        assert len(tasks) == len(other.decode.running)
        events = other.settle(tasks, [Sampled(token_of(task.seq)) for task in tasks])
        assert all(event.finish_reason is None for event in events)
    assert state(one) == state(other)


@pytest.mark.parametrize("sizes", [[(4, 2)], [(4, 20), (4, 2)]])
def test_a_step_that_ends_an_answer_is_not_quiet(sizes: list[tuple[int, int]]) -> None:
    config = SchedulerConfig(num_blocks=40, block_tokens=4, max_running=6, step_tokens=16)
    assert quiet_steps(batch(config, sizes), config) == 0
