"""An overloaded expert in the simulated deployment: the serving balancer says what it costs, EP8 to EP320."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulate.supernode.small import small_layout
from tripool.bench.trace import TraceRequest
from tripool.simulate.supernode import parse_fault, simulate_trace
from tripool.simulate.supernode.expert_ranks import ExpertRanks, Heat


@pytest.mark.parametrize(("ranks", "slots"), [(8, 36), (32, 9), (72, 4), (288, 1)])
def test_moves_relieve_the_busiest_rank(ranks: int, slots: int) -> None:
    placed = ExpertRanks(256, ranks, slots, 0.4)
    heat = placed.heat(5.0)
    assert heat.at_once > 1.05 and heat.balanced < heat.at_once
    assert heat.move_steps > 0
    assert placed.heat(1.0).at_once == placed.heat(1.0).balanced == pytest.approx(1.0)
    assert placed.heat(1.0).move_steps == 0


@pytest.mark.parametrize("factor", [1.5, 3.0, 9.0, 30.0])
@pytest.mark.parametrize(("ranks", "slots"), [(8, 36), (32, 9), (288, 1)])
def test_after_the_moves_it_is_as_level_as_slots_allow(ranks: int, slots: int, factor: float) -> None:
    heat = ExpertRanks(256, ranks, slots, 0.7).heat(factor)
    assert heat.best <= heat.balanced <= 1.03 * heat.best


def test_more_slots_average_more() -> None:
    at_once = [ExpertRanks(256, ranks, slots, 0.4).heat(5.0).at_once for ranks, slots in ((8, 36), (32, 9), (256, 1))]
    assert at_once == sorted(at_once)
    assert 4.5 < at_once[-1] < 5.0  # alone on its rank: five times its rows, of about as many in all


class NeverMoved(ExpertRanks):
    """Its moves never end within a fault."""

    def heat(self, factor: float) -> Heat:
        return replace(super().heat(factor), move_steps=10**6)


def test_a_hot_expert_costs_most_until_replicas_have_moved() -> None:
    asks = [TraceRequest(number * 0.02, 64, 60, (), "", 16) for number in range(20)]

    def median_ms(experts: ExpertRanks | None, *faults: str) -> float:
        layout = replace(small_layout(running=8), experts=experts)
        struck = [parse_fault(fault, layout) for fault in faults]
        found = simulate_trace(layout, asks, trace="t", faults=struck, slice_s=0.5)["tpot_ms"]["p50"]
        assert isinstance(found, float)
        return found

    hot = "hot:decode-0@0.1s+60sx9"
    calm, moved = median_ms(None), median_ms(ExpertRanks(16, 16, 2, 0.4), hot)
    assert calm < moved < median_ms(NeverMoved(16, 16, 2, 0.4), hot) < median_ms(None, hot)
