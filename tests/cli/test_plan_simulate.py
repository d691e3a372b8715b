"""A plan's rate beside the rate at which the simulator saturates."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.planner.test_search import ask_of
from tripool.bench.trace import TraceRequest, measure_trace
from tripool.cli.plan_run import lengths_of
from tripool.cli.plan_simulate import Saturated, saturate
from tripool.cli.trace_files import read_trace
from tripool.planner import PlanGoal, make_plan, named_hardware, named_model
from tripool.simulate.traces import Synthetic

WITHIN = 0.1
CONVERSATIONS = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"


def saturated(ask: PlanGoal, asks: list[TraceRequest]) -> Saturated:
    found = make_plan(ask).best_split
    assert found is not None
    return saturate(ask, found, found.main, asks)


def of_trace(asks: list[TraceRequest], **changes: object) -> PlanGoal:
    work = measure_trace(asks)
    return ask_of(
        input_tokens=work.input_tokens, output_tokens=work.output_tokens, lengths=lengths_of(work),
        cached_share=work.cached_share, **changes,
    )  # fmt: skip


def test_a_plan_saturates_where_it_says() -> None:
    ask = ask_of(
        model=named_model("llama-3-8b"), hardware=named_hardware("h100"), chips=8, input_tokens=2000,
        output_tokens=50, tpot_s=0.008, ttft_s=1.0,
    )  # fmt: skip
    found = saturated(ask, [])
    assert abs(found.error) <= WITHIN, found.words()


def conversations(count: int, turns: int, *, active: int = 800) -> list[TraceRequest]:
    """Each prompt is a prefix of the next of its conversation, and of no other: hits are in the pool, not in an
    instance's own memory, and half of all prompts is read. So many conversations go on at any time.
    """
    rng, asks = Random(7), []
    sessions: list[tuple[int, tuple[int, ...]]] = [(rng.randrange(turns), ()) for _ in range(active)]
    for serial in range(count):
        place = rng.randrange(active)
        turn, before = sessions[place]
        blocks = max(1, round(2500 / 512 * rng.lognormvariate(-0.245, 0.7)))
        ids = (*before, *range(serial << 12, (serial << 12) + blocks))
        sessions[place] = (turn + 1, ids) if turn + 1 < turns else (0, ())
        answer = max(1, round(200 * rng.lognormvariate(-0.245, 0.7)))
        asks.append(TraceRequest(float(serial), len(ids) * 512, answer, ids))
    return asks


@pytest.mark.prove
@pytest.mark.parametrize("chips", [64, 128])
def test_hits_that_fill_the_link_to_the_pool(chips: int) -> None:
    """Once planned 26 % above: a worker that finds its link busy computes what it could have read."""
    asks = conversations(4000, 3)
    found = saturated(of_trace(asks, chips=chips), asks)
    assert abs(found.error) <= WITHIN, found.words()


@pytest.mark.prove
def test_the_conversation_trace() -> None:
    asks = list(read_trace(CONVERSATIONS).requests())[:4000] if CONVERSATIONS.exists() else []
    if not asks:
        pytest.skip("the production traces are not beside this clone")
    found = saturated(of_trace(asks, chips=96), asks)
    assert abs(found.error) <= WITHIN, found.words()


@pytest.mark.prove
@pytest.mark.parametrize("workload", ["bound by prefill", "bound by decode", "unequal lengths", "shared prefixes"])
def test_a_plan_and_the_simulator_agree(workload: str) -> None:
    h800 = named_hardware("h800")
    unequal, shared = (
        list(Synthetic(requests=3000, rate_per_s=1.0, input_tokens=3000, output_tokens=150, prefix_share=share).draw())
        for share in (0.0, 0.4)
    )
    asked = {
        "bound by prefill": (ask_of(chips=64, output_tokens=256), []),
        "bound by decode": (ask_of(chips=48, hardware=h800, input_tokens=2000, output_tokens=200), []),
        "unequal lengths": (of_trace(unequal, chips=48), unequal),
        "shared prefixes": (of_trace(shared, chips=48), shared),
    }
    found = saturated(*asked[workload])
    assert abs(found.error) <= WITHIN, found.words()
