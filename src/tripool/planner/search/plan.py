"""Makes a plan: matches and ranks pools, computes the decode Pareto front and levers, and explains failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tripool.planner.errors import DoesNotFit, NotReachable
from tripool.planner.search import pools
from tripool.planner.search.goal import PlanGoal
from tripool.planner.search.match import best_matches
from tripool.planner.search.results import DecodePool, Deployment, Lever, Plan, Point, PrefillPool

_KEEP = 10
_DECODE_OPTIONS = 48
_PREFILL_OPTIONS = 12
_FRONT_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LEVER = 1.25
_EVER = 1e9


def make_plan(goal: PlanGoal) -> Plan:
    _check_fit(goal)
    decodes = sorted(pools.decode_pools(goal), key=lambda pool: -pool.tokens_per_s_per_chip)
    if not decodes:
        raise _too_slow(goal)
    prefills = _prefills(goal, decodes)
    if not prefills:
        raise _too_late(goal, decodes)
    options = _spread(decodes)
    deployments = list(best_matches(goal, prefills, options, _KEEP))
    if not deployments:
        raise _no_room(goal, prefills, decodes)
    deployments[0] = replace(deployments[0], levers=_levers(goal, deployments[0]))
    considered = len(decodes) + len(prefills) + len(options) * len(prefills)
    return Plan(deployments=tuple(deployments), front=tuple(front(goal)), num_considered=considered)


def _prefills(goal: PlanGoal, decodes: Sequence[DecodePool]) -> list[PrefillPool]:
    first_s = min(pool.step.seconds for pool in decodes)
    found = sorted(pools.prefill_pools(goal, first_s), key=lambda pool: -pool.tokens_per_s_per_chip)
    smallest = sorted(found, key=lambda pool: pool.chips)[:2]
    return [*found[:_PREFILL_OPTIONS], *(pool for pool in smallest if pool not in found[:_PREFILL_OPTIONS])]


def _spread(decodes: Sequence[DecodePool]) -> list[DecodePool]:
    """The best overall, and the best of each size: a smaller instance may leave fewer chips unused."""
    chosen = list(decodes[:_DECODE_OPTIONS])
    for chips in {pool.chips for pool in decodes}:
        best = next(pool for pool in decodes if pool.chips == chips)
        if best not in chosen:
            chosen.append(best)
    return chosen


def front(goal: PlanGoal) -> list[Point]:
    """Pareto front of speed per user and throughput per chip, over every parallelism and batch, for any TPOT; the
    fastest per user first.
    """
    points: list[Point] = []
    for model, most in pools.decode_models(goal):
        for batch in (size for size in _FRONT_BATCHES if size <= most):
            tpot_s = model.tpot_s(batch, goal.mean_context)
            per_chip, chips = batch * goal.hardware.ranks / tpot_s, pools.instance_chips(goal, model.setup.ep)
            points.append(Point(1.0 / tpot_s, per_chip, model.setup, batch, chips))
    best, chosen = 0.0, []
    for point in sorted(points, key=lambda point: (-point.tokens_per_s_per_user, -point.tokens_per_s_per_chip)):
        if point.tokens_per_s_per_chip > best:
            best = point.tokens_per_s_per_chip
            chosen.append(point)
    return chosen


def _levers(goal: PlanGoal, chosen: Deployment) -> tuple[Lever, ...]:
    """Repeat the search with one parameter a quarter better, at the chosen precision."""
    hardware = goal.hardware
    base = replace(goal, precision=chosen.decode.setup.precision)
    faster = {name: rate * _LEVER for name, rate in hardware.flops.items()}
    planes = tuple(replace(plane, gb_s=plane.gb_s * _LEVER) for plane in hardware.planes)
    tries = {
        "a quarter more compute": replace(base, hardware=replace(hardware, flops=faster)),
        "a quarter more memory bandwidth": replace(
            base, hardware=replace(hardware, hbm_bytes_per_s=hardware.hbm_bytes_per_s * _LEVER)
        ),
        "a quarter more memory": replace(base, hardware=replace(hardware, hbm_bytes=hardware.hbm_bytes * _LEVER)),
        "a quarter more bandwidth on every plane": replace(base, hardware=replace(hardware, planes=planes)),
        "a TPOT a quarter longer": replace(base, tpot_s=goal.tpot_s * _LEVER),
        "a TTFT a quarter longer": replace(base, ttft_s=goal.ttft_s * _LEVER),
    }
    found = []
    for name, tried in tries.items():
        decodes = sorted(pools.decode_pools(tried), key=lambda pool: -pool.tokens_per_s_per_chip)
        best = next(best_matches(tried, _prefills(tried, decodes), _spread(decodes), 1), chosen)
        found.append(Lever(name=name, gain=max(0.0, best.requests_per_s / chosen.requests_per_s - 1.0)))
    return tuple(sorted(found, key=lambda lever: -lever.gain))


def _check_fit(goal: PlanGoal) -> None:
    rooms = list(pools.all_setups(goal, goal.ranks, drafts=(0,)))
    setup, room = max(rooms, key=lambda pair: pair[1].kv)
    if room.kv > 0:
        return
    held_gb = room.available * setup.ep / 1e9
    needed_gb = (room.weights + room.buffers) * setup.ep / 1e9
    problem = (
        f"{goal.model.name} does not fit on {goal.chips} x {goal.hardware.title}: "
        f"in {setup.precision} over {setup.ep} ranks weights and buffers take {needed_gb:,.0f} GB of {held_gb:,.0f} GB"
    )
    enough = _least_chips(goal)
    more = f"; {enough} chips hold it" if enough else "; no number of chips holds it: a rank is too small"
    raise DoesNotFit(problem, hint=f"{needed_gb - held_gb:,.0f} GB are missing{more}")


def _least_chips(goal: PlanGoal) -> int | None:
    """Found by doubling: each rank repeats attention, so more chips help only as far as experts or heads are split."""
    for power in range(1, 14):
        chips = goal.chips * 2**power
        larger = replace(goal, chips=chips)
        fitting = [setup.ep for setup, _ in pools.setups(larger, larger.ranks, drafts=(0,))]
        if fitting:
            return pools.instance_chips(goal, min(fitting))
    return None


def _too_slow(goal: PlanGoal) -> NotReachable:
    found = pools.fastest_decode(goal)
    if found is None:
        tokens = int(goal.input_tokens + goal.output_tokens)
        problem = (
            f"no parallelism of {goal.chips} chips fits the KV of one request of {tokens:,} tokens beside the weights"
        )
        return NotReachable(problem, hint="more chips, a shorter context or a smaller precision")
    tpot_s, setup = found
    problem = f"no deployment reaches a TPOT of {goal.tpot_s * 1e3:.1f} ms"
    hint = (
        f"the fastest is {tpot_s * 1e3:.1f} ms (EP{setup.ep}, TP{setup.tp}, one request per rank): "
        f"{(tpot_s - goal.tpot_s) * 1e3:.1f} ms are missing"
    )
    return NotReachable(problem, hint=hint)


def _too_late(goal: PlanGoal, decodes: Sequence[DecodePool]) -> NotReachable:
    relaxed = _prefills(replace(goal, ttft_s=_EVER), decodes)
    if not relaxed:
        problem = f"the KV of one prompt of {int(goal.input_tokens):,} tokens fits in no prefill instance"
        return NotReachable(problem, hint="more chips, a shorter prompt or a smaller precision")
    least = min(_fastest_ttft(goal, decodes), *(pool.ttft_s for pool in relaxed))
    problem = f"no deployment reaches a TTFT of {goal.ttft_s:.3f} s"
    return NotReachable(problem, hint=f"the soonest is {least:.3f} s: {least - goal.ttft_s:.3f} s are missing")


def _fastest_ttft(goal: PlanGoal, decodes: Sequence[DecodePool]) -> float:
    """Smallest reachable TTFT, found by halving and doubling."""
    low, high = goal.ttft_s, _EVER
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _prefills(replace(goal, ttft_s=middle), decodes) else (middle, high)
    return high


def _no_room(goal: PlanGoal, prefills: Sequence[PrefillPool], decodes: Sequence[DecodePool]) -> NotReachable:
    need = min(pool.chips for pool in prefills) + min(pool.chips for pool in decodes)
    problem = (
        f"{goal.chips} chips hold no prefill instance beside a decode instance, and one pool for both breaks the TPOT"
    )
    return NotReachable(problem, hint=f"at least {need} chips, {need - goal.chips} more")
