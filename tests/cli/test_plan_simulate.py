"""A plan's rate beside the rate at which the simulator saturates."""

from __future__ import annotations

import pytest

from tests.planner.test_search import ask_of
from tripool.bench.trace import TraceRequest, measure_trace
from tripool.cli.plan_run import lengths_of
from tripool.cli.plan_simulate import Saturated, saturate
from tripool.planner import PlanGoal, make_plan, named_hardware, named_model
from tripool.simulate.traces import Synthetic

WITHIN = 0.1


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
