"""Check of a plan in the simulator: the rate at which the planned deployment saturates."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tripool.bench.summary import percentile
from tripool.bench.trace import TraceRequest
from tripool.planner.deployment import read_deployment, write_deployment
from tripool.planner.search import Cell, Deployment, PlanGoal
from tripool.simulate.request_table import RequestTable
from tripool.simulate.supernode import lay_out
from tripool.simulate.supernode.measures import tpot_s, ttft_s
from tripool.simulate.supernode.run import TraceRun

AUTOMATIC_S = 30.0
_REQUEST_S = 0.002
"""About what the simulation of one request takes."""
_OVERLOAD = 1.2
"""Offered over planned rate: a deployment that carries more than planned shows it."""
_LEAST, _STAYS = 200, 3.0
"""Requests, and mean stays of a request until the last one comes."""
_COUNTED = 0.95
_BLOCK_TOKENS = 64
"""Of KV where no trace says what was hashed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturated:
    planned_per_s: float
    simulated_per_s: float
    ttft_p50_s: float
    tpot_p50_s: float
    num_requests: int

    @property
    def error(self) -> float:
        """Of the plan."""
        return self.planned_per_s / self.simulated_per_s - 1.0 if self.simulated_per_s else float("inf")

    def data(self) -> dict[str, Any]:
        return {
            "requests": self.num_requests,
            "planned_requests_per_s": self.planned_per_s,
            "simulated_requests_per_s": self.simulated_per_s,
            "ttft_p50_ms": self.ttft_p50_s * 1e3,
            "tpot_p50_ms": self.tpot_p50_s * 1e3,
        }

    def words(self) -> str:
        return (
            f"simulated: {self.simulated_per_s:,.3g} requests/s when saturated, the plan is {self.error:+.1%} off; "
            f"TTFT p50 {self.ttft_p50_s * 1e3:,.0f} ms, TPOT p50 {self.tpot_p50_s * 1e3:.1f} ms "
            f"({self.num_requests:,} requests)"
        )


def num_requests(goal: PlanGoal, cell: Cell, asks: Sequence[TraceRequest]) -> int:
    """Enough for a steady state, and the whole trace: its beginning finds an empty cache."""
    return max(_LEAST, len(asks), int(_STAYS * _stay_s(goal, cell) * cell.requests_per_s * _OVERLOAD))


def takes_s(goal: PlanGoal, cell: Cell, asks: Sequence[TraceRequest]) -> float:
    return num_requests(goal, cell, asks) * _REQUEST_S


def saturate(goal: PlanGoal, found: Deployment, cell: Cell, asks: Sequence[TraceRequest]) -> Saturated:
    """`asks`: lengths and reuse, repeated as often as needed. None: all requests are alike."""
    assert not cell.shared
    file = read_deployment(write_deployment(goal, found, cell), "plan")
    asks = asks or [_mean_request(goal)]
    layout = lay_out(file, goal.hardware, goal.model, block_tokens=asks[0].block_tokens)
    # The planned batch is the ceiling: that requests wait for their place under overload is no reason for a lower one.
    layout = replace(layout, promised=False)
    count, per_s = num_requests(goal, cell, asks), cell.requests_per_s * _OVERLOAD
    run = TraceRun(layout, _at_rate(asks, count, per_s))
    gc.disable()  # a run makes few reference cycles
    try:
        run.run()
    finally:
        gc.enable()
    return _measured(cell, run.table)


def _stay_s(goal: PlanGoal, cell: Cell) -> float:
    return cell.ttft_s + goal.output_tokens * cell.tpot_s


def _measured(cell: Cell, table: RequestTable) -> Saturated:
    """More comes than can be served, so the rate is that at which requests are begun: it has no ramp. The last few are
    left out, which may be long ones.
    """
    done = table.done
    begun_s = sorted(max(table.first_s[n], table.last_s[n] - table.output_tokens[n] * cell.tpot_s) for n in done)
    counted = int(len(begun_s) * _COUNTED)
    simulated_per_s = counted / begun_s[counted - 1] if counted else 0.0
    ttfts_s = sorted(ttft_s(table, number) for number in done)
    tpots_s = sorted(tpot_s(table, number) for number in done if table.output_tokens[number] > 1)
    return Saturated(
        planned_per_s=cell.requests_per_s, simulated_per_s=simulated_per_s, num_requests=len(table),
        ttft_p50_s=percentile(ttfts_s, 50) if ttfts_s else 0.0, tpot_p50_s=percentile(tpots_s, 50) if tpots_s else 0.0,
    )  # fmt: skip


def _mean_request(goal: PlanGoal) -> TraceRequest:
    prompt, answer = round(goal.input_tokens), round(goal.output_tokens)
    return TraceRequest(0.0, max(1, prompt), max(1, answer), block_tokens=_BLOCK_TOKENS)


def _at_rate(asks: Sequence[TraceRequest], count: int, per_s: float) -> Iterator[TraceRequest]:
    """At equal distances. When they repeat, their blocks are others: no more is reused than in the trace."""
    for serial in range(count):
        times, index = divmod(serial, len(asks))
        ask = asks[index]
        ids = tuple(block_id + (times << 64) for block_id in ask.block_ids) if times else ask.block_ids
        yield replace(ask, arrival_s=serial / per_s, block_ids=ids)
