"""Relations between plans: more never carries less, whatever the hardware and the workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from tests.planner.test_search import ask_of, check
from tripool.planner import Hardware, PlanGoal, hardware_names, named_hardware, named_model
from tripool.planner.errors import DoesNotFit, NotReachable
from tripool.planner.hardware import Exchange
from tripool.planner.search import best_deployment

SAME = 1e-3
"""Of rates that a search by steps finds."""
MODELS = ("deepseek-r1", "qwen3-235b-a22b", "qwen3-30b-a3b", "llama-3-8b", "deepseek-v2-lite")


def best_rate(ask: PlanGoal) -> float:
    """0 if the goal cannot be reached."""
    try:
        found = best_deployment(ask)
    except (DoesNotFit, NotReachable):
        return 0.0
    check(ask, found)
    return found.requests_per_s


def drawn(rng: Random, hardware: str) -> PlanGoal:
    """A workload of any kind; small models on few chips, so that single nodes and parts of nodes are among them."""
    model = rng.choice(MODELS)
    most = 64 if model == "deepseek-r1" else 24
    return ask_of(
        model=named_model(model), hardware=named_hardware(hardware), chips=rng.randint(1, most),
        input_tokens=round(10 ** rng.uniform(1.5, 4.2)), output_tokens=round(10 ** rng.uniform(0.5, 3.5)),
        cached_share=rng.choice((0.0, 0.3, 0.9, 0.98)), ttft_s=10 ** rng.uniform(-0.3, 1.2),
        tpot_s=10 ** rng.uniform(-1.8, -0.7),
    )  # fmt: skip


def faster(hardware: Hardware, factor: float) -> Hardware:
    """Better in every number."""
    planes = tuple(
        replace(plane, gb_s=plane.gb_s * factor, latency_us=plane.latency_us / factor) for plane in hardware.planes
    )
    exchange: Exchange = hardware.exchange
    for name in ("fixed_us", "per_peer_us", "token_us"):
        exchange = replace(exchange, **{name: getattr(exchange, name) / factor})
    return replace(
        hardware, planes=planes, exchange=exchange, hbm_bytes=hardware.hbm_bytes * factor,
        hbm_bytes_per_s=hardware.hbm_bytes_per_s * factor, layer_s=hardware.layer_s / factor,
        step_s=hardware.step_s / factor, flops={name: rate * factor for name, rate in hardware.flops.items()},
        cache_bytes_per_s={name: rate * factor for name, rate in hardware.cache_bytes_per_s.items()},
    )  # fmt: skip


def _plane(ask: PlanGoal, kind: str) -> PlanGoal:
    planes = tuple(replace(p, gb_s=p.gb_s * 1.4) if p.kind == kind else p for p in ask.hardware.planes)
    return replace(ask, hardware=replace(ask.hardware, planes=planes))


def _hardware(ask: PlanGoal, **times: float) -> PlanGoal:
    changed = {name: getattr(ask.hardware, name) * factor for name, factor in times.items()}
    return replace(ask, hardware=replace(ask.hardware, **changed))


BETTER: dict[str, Callable[[PlanGoal], PlanGoal]] = {
    "one chip more": lambda ask: replace(ask, chips=ask.chips + 1),
    "half as many chips more": lambda ask: replace(ask, chips=ask.chips + (ask.chips + 1) // 2),
    "more memory": lambda ask: _hardware(ask, hbm_bytes=1.3),
    "more memory bandwidth": lambda ask: _hardware(ask, hbm_bytes_per_s=1.3),
    "a faster memory plane": lambda ask: _plane(ask, "memory"),
    "a faster transfer plane": lambda ask: _plane(ask, "transfer"),
    "more hits": lambda ask: replace(ask, cached_share=ask.cached_share + (1 - ask.cached_share) * 0.4),
    "a looser TTFT": lambda ask: replace(ask, ttft_s=ask.ttft_s * 1.3),
    "a looser TPOT": lambda ask: replace(ask, tpot_s=ask.tpot_s * 1.3),
    "better in every number": lambda ask: replace(ask, hardware=faster(ask.hardware, 1.2)),
}


def check_relations(ask: PlanGoal, rng: Random, names: list[str]) -> None:
    rate = best_rate(ask)
    for name in names:
        better = BETTER[name](ask)
        assert best_rate(better) >= rate * (1 - SAME), f"{name}: {ask}"
    some = rng.randint(1, max(1, ask.chips - 1))
    if some < ask.chips:
        parts = best_rate(replace(ask, chips=some)) + best_rate(replace(ask, chips=ask.chips - some))
        assert parts <= rate * (1 + SAME), f"{some} chips and the rest beat the whole: {ask}"


@pytest.mark.parametrize("hardware", ["ascend-910c", "h200", "h20", "b200"])
def test_more_never_carries_less(hardware: str) -> None:
    rng = Random(hardware)
    check_relations(drawn(rng, hardware), rng, rng.sample(sorted(BETTER), 3))


@pytest.mark.prove
@pytest.mark.parametrize("hardware", hardware_names())
@pytest.mark.parametrize("seed", range(40))
def test_more_never_carries_less_over_many_draws(hardware: str, seed: int) -> None:
    rng = Random(f"{hardware} {seed}")
    check_relations(drawn(rng, hardware), rng, sorted(BETTER))


@pytest.mark.parametrize(
    ("hardware", "few", "many"),
    [("ascend-910c", 12, 16), ("h200", 12, 16), ("h800", 24, 28), ("gb200-nvl72", 8, 12), ("ascend-910c", 96, 192)],
)
def test_more_chips_carry_more_where_they_once_did_not(hardware: str, few: int, many: int) -> None:
    rates = [best_rate(ask_of(hardware=named_hardware(hardware), chips=chips)) for chips in (few, many)]
    assert rates[1] >= rates[0]


def test_more_hits_carry_more_where_they_once_did_not() -> None:
    rates = [best_rate(ask_of(cached_share=share)) for share in (0.98, 0.99, 0.999)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("hardware", "seed", "relation"),
    [("mi300x", 1, "more hits"), ("gb200-nvl72", 7, "a looser TTFT"), ("h20", 3, "more hits")],
)
def test_draws_that_once_carried_less(hardware: str, seed: int, relation: str) -> None:
    """The best prefill batch, or the best share of hits to read, lay between those that were tried."""
    ask = drawn(Random(f"{hardware} {seed}"), hardware)
    assert best_rate(BETTER[relation](ask)) >= best_rate(ask) * (1 - SAME)


def test_hits_that_are_read_more_slowly_than_computed_are_not_read() -> None:
    chip = named_hardware("ascend-910c")
    slow = replace(chip, cache_bytes_per_s=dict.fromkeys(chip.cache_bytes_per_s, 1e7))
    rates = [best_rate(ask_of(hardware=slow, chips=64, cached_share=share)) for share in (0.0, 0.5, 0.9)]
    assert rates[1] >= rates[0] * (1 - SAME) and rates[2] >= rates[1] * (1 - SAME)


@pytest.mark.parametrize("chips", [3, 6, 12])
def test_tensor_parallelism_divides_the_heads(chips: int) -> None:
    """Once TP3 of 64 heads."""
    best_rate(ask_of(model=named_model("llama-3-70b"), hardware=named_hardware("h200"), chips=chips, ttft_s=5.0))


@pytest.mark.parametrize("hardware", ["h200", "h800", "ascend-910c"])
def test_instances_stand_on_whole_nodes(hardware: str) -> None:
    """Once EP12 on nodes of 8."""
    found = best_deployment(ask_of(hardware=named_hardware(hardware), chips=30))
    sizes = {pool.chips for cell in found.cells for pool in (cell.prefill, cell.decode)}
    assert all(size % 8 == 0 for size in sizes) and found.spare_chips >= 6


def test_a_million_chips_are_planned_in_parts() -> None:
    few, many = (best_rate(ask_of(chips=chips)) for chips in (1024, 10**6))
    assert many == pytest.approx(few * 10**6 / 1024, rel=0.01)
