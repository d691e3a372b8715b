"""Plans: promises kept, chips and memory not exceeded, pools matched, plain answers where nothing works."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.errors import InvalidRequest
from tripool.planner import Deployment, Plan, PlanGoal, make_plan, named_hardware, named_model
from tripool.planner.cost import footprint
from tripool.planner.errors import DoesNotFit, NotReachable
from tripool.planner.search import Cell, best_deployment


def ask_of(**changes: object) -> PlanGoal:
    asked = {
        "model": named_model("deepseek-r1"), "hardware": named_hardware("ascend-910c"), "chips": 384,
        "input_tokens": 4096, "output_tokens": 1024, "ttft_s": 2.0, "tpot_s": 0.05,
    }  # fmt: skip
    return PlanGoal(**(asked | changes))


@lru_cache(maxsize=1)
def plan_384() -> Plan:
    return make_plan(ask_of())


def check(ask: PlanGoal, found: Deployment) -> None:
    assert found.chips + found.spare_chips == ask.chips and found.spare_chips >= 0
    assert found.tpot_s <= ask.tpot_s and found.ttft_s <= ask.ttft_s
    for cell in found.cells:
        check_cell(ask, cell)
    hourly = found.requests_per_s * ask.output_tokens * 3600
    decode_chips = sum(cell.decode_instances * cell.decode.chips for cell in found.cells)
    chips = (found.chips - decode_chips, decode_chips) if ask.decode_hardware else (found.chips,)
    sides = list(zip((ask, ask.of_decode), chips, strict=False))
    cost, watts = (
        None
        if any(value is None for value in each)
        else sum(value * n for value, (_, n) in zip(each, sides, strict=True))
        for each in ([side.price for side, _ in sides], [side.hardware.watts for side, _ in sides])
    )
    assert found.cost_per_million == (cost and pytest.approx(cost / hourly * 1e6))
    assert found.kwh_per_million == (watts and pytest.approx(watts / 1e3 / hourly * 1e6))


def check_cell(ask: PlanGoal, cell: Cell) -> None:
    """Fits in memory, divides, and stands on whole nodes or an even part of one."""
    heads, moe = ask.model.attention.heads, ask.model.moe
    decode_chip = ask.of_decode.hardware
    for pool, hardware in ((cell.prefill, ask.hardware), (cell.decode, decode_chip)):
        setup, node = pool.setup, hardware.node_chips
        assert setup.ep == pool.chips * hardware.ranks
        assert pool.chips % node == 0 or node % pool.chips == 0
        assert heads % setup.tp == 0 and setup.ep % setup.tp == 0
        if moe is not None:
            replicas = ceil(moe.experts / 8)
            assert any((moe.experts + copies * replicas) % setup.holding_ranks == 0 for copies in range(3))
        assert footprint(hardware, ask.model, setup).kv > 0
    room = footprint(decode_chip, ask.model, cell.decode.setup)
    kv_bytes = cell.decode.batch * (ask.input_tokens + ask.output_tokens) * room.kv_per_token
    new_share = 1.0 - ask.cached_tokens / ask.input_tokens * cell.prefill.read_share
    batch_bytes = (cell.prefill.tokens - 1) / new_share * room.kv_per_token
    assert kv_bytes + (batch_bytes if cell.shared else 0.0) <= room.kv
    assert cell.prefill.setup.precision == cell.decode.setup.precision
    if not cell.shared:
        chips_p, chips_d = cell.prefill_instances * cell.prefill.chips, cell.decode_instances * cell.decode.chips
        carried_p = chips_p * cell.prefill.tokens_per_s_per_chip / ask.input_tokens
        carried_d = chips_d * cell.decode.tokens_per_s_per_chip / ask.output_tokens
        assert cell.requests_per_s <= min(carried_p, carried_d) * (1 + 1e-9)
        assert cell.transfer_share <= 1.0 + 1e-9


def test_a_supernode() -> None:
    ask, plan = ask_of(), plan_384()
    for found in plan.deployments:
        check(ask, found)
    rates = [found.requests_per_s for found in plan.deployments]
    assert rates == sorted(rates, reverse=True) and len(rates) >= 5
    assert any(found.main.decode.setup.ep == 320 for found in plan.deployments), "the published parallelism is there"
    assert plan.best_split is not None and plan.best_shared is not None, "both are compared"
    assert plan.deployments[0].levers and plan.deployments[0].levers[0].gain > 0


def test_the_front_has_no_point_that_another_beats() -> None:
    front = plan_384().front
    for left, right in pairwise(front):
        assert left.tokens_per_s_per_user > right.tokens_per_s_per_user
        assert left.tokens_per_s_per_chip < right.tokens_per_s_per_chip
    best = plan_384().deployments[0].main.decode
    assert max(point.tokens_per_s_per_chip for point in front) >= 0.9 * best.tokens_per_s_per_chip


@settings(max_examples=12, deadline=None)
@given(
    hardware=st.sampled_from(("ascend-910c", "h100", "h20", "gb200-nvl72")),
    model=st.sampled_from(("qwen3-30b-a3b", "llama-3-8b", "deepseek-v2-lite")),
    chips=st.integers(1, 24), input_tokens=st.integers(16, 8000), output_tokens=st.integers(1, 2000),
    cached=st.sampled_from((0.0, 0.5, 0.9)),
)  # fmt: skip
def test_any_plan_keeps_its_promises(hardware, model, chips, input_tokens, output_tokens, cached) -> None:
    ask = ask_of(
        model=named_model(model), hardware=named_hardware(hardware), chips=chips, input_tokens=input_tokens,
        output_tokens=output_tokens, cached_share=cached, ttft_s=5.0, tpot_s=0.1,
    )  # fmt: skip
    check(ask, best_deployment(ask))


def test_cached_prefixes_move_chips_to_decode() -> None:
    plain, cached = (best_deployment(ask_of(chips=128, cached_share=share)) for share in (0.0, 0.5))
    assert cached.requests_per_s > 1.1 * plain.requests_per_s
    decoding = [sum(c.decode_instances * c.decode.chips for c in found.cells) for found in (plain, cached)]
    assert decoding[1] >= decoding[0]


def test_one_chip_does_both_in_turn() -> None:
    ask = ask_of(model=named_model("llama-3-8b"), hardware=named_hardware("h100"), chips=1, input_tokens=1000)
    found = make_plan(ask).deployments[0]
    assert found.main.shared and found.tpot_s > found.main.decode.tpot_s
    check(ask, found)


def test_a_slow_transfer_plane_binds() -> None:
    chip = named_hardware("ascend-910c")
    planes = tuple(replace(plane, gb_s=0.2) if plane.kind == "transfer" else plane for plane in chip.planes)
    ask = ask_of(hardware=replace(chip, planes=planes), chips=128, ttft_s=8.0)
    best = make_plan(ask).best_split
    assert best is not None and best.main.bound == "transfer" and best.main.transfer_share == pytest.approx(1.0)


def test_a_model_that_does_not_fit_is_told_by_how_much() -> None:
    with pytest.raises(DoesNotFit, match=r"takes? 7\d\d GB of 236 GB .*529 GB are missing; 8 chips hold it"):
        make_plan(ask_of(chips=2))
    best_deployment(ask_of(chips=8, tpot_s=1.0, ttft_s=60.0))


def test_a_tpot_out_of_reach_is_told_by_how_much() -> None:
    with pytest.raises(NotReachable, match=r"TPOT of 1\.0 ms .*fastest is (\d+\.\d) ms .* ms are missing") as told:
        make_plan(ask_of(tpot_s=0.001))
    fastest_ms = float(str(told.value).partition("fastest is ")[2].partition(" ms")[0])
    assert best_deployment(ask_of(tpot_s=(fastest_ms + 0.1) / 1e3)).cells


def test_a_ttft_out_of_reach_is_told_by_how_much() -> None:
    with pytest.raises(NotReachable, match=r"TTFT of 0\.010 s .*soonest is \d\.\d+ s") as told:
        make_plan(ask_of(ttft_s=0.01))
    soonest_s = float(str(told.value).partition("soonest is ")[2].partition(" s")[0])
    assert best_deployment(ask_of(ttft_s=soonest_s * 1.3, tpot_s=0.1)).cells


def test_a_context_too_long_for_any_rank() -> None:
    with pytest.raises(NotReachable, match="no parallelism of"):
        make_plan(ask_of(input_tokens=5_000_000))


@pytest.mark.parametrize(
    "changes",
    [{"chips": 0}, {"tpot_s": 0.0}, {"input_tokens": 0}, {"cached_share": 1.0}, {"precision": "fp8"},
     {"input_tokens": inf}, {"output_tokens": nan}, {"price_per_hour": inf}, {"accept": nan}, {"ttft_s": -1.0},
     {"chips": 10**7}, {"price_per_hour": -1.0}, {"accept": 1.5}],
)  # fmt: skip
def test_odd_wishes_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        ask_of(**changes)


def test_experts_on_ranks_of_their_own_are_considered() -> None:
    """Listed beside the others, whether they win or not; what a chip carries counts the ranks without requests."""
    found = plan_384().best_parted
    assert found is not None
    pool = next(cell.decode for cell in found.cells if cell.decode.setup.expert_ranks)
    setup, ask = pool.setup, ask_of()
    assert setup.attention_ranks + setup.expert_ranks == setup.ep and setup.microbatches == 2
    per_instance = pool.batch * setup.attention_ranks / (pool.step.seconds / setup.tokens_per_step)
    assert pool.tokens_per_s_per_chip * pool.chips == pytest.approx(per_instance)
    experts = footprint(ask.hardware, ask.model, replace(setup, expert_ranks=setup.ep - setup.expert_ranks))
    assert footprint(ask.hardware, ask.model, setup).kv > 0 and experts.available > 0


def test_prefill_and_decode_on_two_kinds_of_hardware() -> None:
    pr, dt = named_hardware("ascend-950pr"), named_hardware("ascend-950dt")
    work = {"input_tokens": 1024, "output_tokens": 2048, "chips": 128, "price_per_hour": 2.0}
    ask = ask_of(hardware=pr, decode_hardware=dt, **work)
    plan = make_plan(ask)
    for found in plan.deployments:
        check(ask, found)
        cell = found.main
        sizes = (cell.prefill_instances * cell.prefill.chips, cell.decode_instances * cell.decode.chips)
        assert (
            sum(ceil(size / pr.node_chips) * pr.node_chips for size in sizes) <= 128 and pr.node_chips == dt.node_chips
        )
        assert not cell.shared
    best = plan.deployments[0].requests_per_s
    assert best_deployment(replace(ask, chips=160)).requests_per_s >= best
    alike = best_deployment(replace(ask, decode_hardware=pr)).requests_per_s
    assert best > alike, "a chip with faster memory decodes faster"
    assert best > 0.7 * best_deployment(ask_of(hardware=dt, **work)).requests_per_s, "and prefill needs little of it"


def test_two_kinds_of_hardware_that_do_not_go_together() -> None:
    pr, h200 = named_hardware("ascend-950pr"), named_hardware("h200")
    with pytest.raises(InvalidRequest, match="currencies"):
        ask_of(hardware=pr, decode_hardware=h200)
    with pytest.raises(InvalidRequest, match="no fp4"):
        ask_of(hardware=pr, decode_hardware=h200, precision="fp4", price_per_hour=1.0)
