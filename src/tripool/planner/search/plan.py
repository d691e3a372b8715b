"""Makes a plan: matches and ranks pools, computes the decode Pareto front and levers, and explains failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tripool.planner.errors import DoesNotFit, NotReachable
from tripool.planner.hardware import Hardware
from tripool.planner.search import pools
from tripool.planner.search.goal import PlanGoal
from tripool.planner.search.match import best_mix, mixed, uniform
from tripool.planner.search.results import Cell, DecodePool, Deployment, Lever, Plan, Point, PrefillPool
from tripool.planner.search.setups import all_setups, instance_chips, setups

_KEEP = 10
_FRONT_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LEVER = 1.25
_EVER = 1e6
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class _Options:
    prefills: list[PrefillPool]
    decodes: list[DecodePool]
    shared: list[Cell]

    @classmethod
    def of(cls, goal: PlanGoal, *, split: bool = True, shared: bool = True) -> _Options:
        return cls(
            list(pools.prefill_pools(goal)) if split else [],
            list(pools.decode_pools(goal.of_decode)) if split else [],
            list(pools.shared_cells(goal)) if shared and goal.decode_hardware is None else [],
        )

    def best(self, goal: PlanGoal) -> Deployment | None:
        if goal.decode_hardware is not None:
            return max(self.alone(goal), key=lambda found: found.requests_per_s, default=None)
        return best_mix(goal, self.prefills, self.decodes, self.shared)

    def alone(self, goal: PlanGoal) -> Iterator[Deployment]:
        """Deployments of one cell, one of each kind."""
        if goal.decode_hardware is not None:
            return mixed(goal, self.prefills, self.decodes)
        return uniform(goal, self.prefills, self.decodes, self.shared)


def best_deployment(goal: PlanGoal) -> Deployment:
    """The first of a plan, alone."""
    return _best(goal)[0]


def make_plan(goal: PlanGoal) -> Plan:
    best, options = _best(goal)
    plain = sorted(options.alone(goal), key=lambda found: -found.requests_per_s)
    if plain and plain[0].requests_per_s >= best.requests_per_s * (1.0 - _SAME):
        best = plain.pop(0)
    others = _kept(plain)
    best = replace(best, levers=_levers(goal, best))
    considered = len(options.decodes) + len(options.prefills) + len(options.shared)
    considered += len(options.prefills) * len(options.decodes)
    return Plan(
        deployments=(best, *others),
        front=tuple(front(goal.of_decode)),
        num_considered=considered,
        is_mixed=len(goal.kinds) > 1,
    )


def _best(goal: PlanGoal) -> tuple[Deployment, _Options]:
    for side in (goal, goal.of_decode):
        _check_fit(side)
    options = _Options.of(goal)
    best = options.best(goal)
    if best is None:
        raise _unreachable(goal, options)
    return best, options


def _kept(ranked: Sequence[Deployment]) -> list[Deployment]:
    """The best few, among them the best of each kind, so that they can be compared: a shared pool, separate pools, and
    experts on ranks of their own.
    """
    kinds = (
        lambda found: found.main.shared,
        lambda found: not found.main.shared and not found.is_parted,
        lambda found: found.is_parted,
    )
    firsts = [first for kind in kinds if (first := next(filter(kind, ranked), None)) is not None]
    others = [found for found in ranked if not any(found is first for first in firsts)]
    return sorted([*firsts, *others[: _KEEP - 1 - len(firsts)]], key=lambda found: -found.requests_per_s)


def front(goal: PlanGoal) -> list[Point]:
    """Pareto front of speed per user and throughput per chip, over every parallelism and batch, for any TPOT; the
    fastest per user first.
    """
    points: list[Point] = []
    for model, most in pools.decode_models(goal):
        for batch in (size for size in _FRONT_BATCHES if size <= most):
            tpot_s = model.tpot_s(batch, goal.mean_context)
            per_rank = batch / tpot_s * model.setup.attention_ranks / model.setup.ep
            per_chip, chips = per_rank * goal.hardware.ranks, instance_chips(goal, model.setup.ep)
            points.append(Point(1.0 / tpot_s, per_chip, model.setup, batch, chips))
    best, chosen = 0.0, []
    for point in sorted(points, key=lambda point: (-point.tokens_per_s_per_user, -point.tokens_per_s_per_chip)):
        if point.tokens_per_s_per_chip > best:
            best = point.tokens_per_s_per_chip
            chosen.append(point)
    return chosen


def _levers(goal: PlanGoal, chosen: Deployment) -> tuple[Lever, ...]:
    """Repeat the search with one parameter a quarter better, at the chosen precision."""
    base = replace(goal, precision=chosen.main.decode.setup.precision)
    changes: dict[str, Callable[[Hardware], Hardware]] = {
        "a quarter more compute": lambda chip: replace(
            chip, flops={name: rate * _LEVER for name, rate in chip.flops.items()}
        ),
        "a quarter more memory bandwidth": lambda chip: replace(chip, hbm_bytes_per_s=chip.hbm_bytes_per_s * _LEVER),
        "a quarter more memory": lambda chip: replace(chip, hbm_bytes=chip.hbm_bytes * _LEVER),
        "a quarter more bandwidth on every plane": lambda chip: replace(
            chip, planes=tuple(replace(plane, gb_s=plane.gb_s * _LEVER) for plane in chip.planes)
        ),
    }
    other = goal.decode_hardware
    tries = {
        name: replace(base, hardware=change(goal.hardware), decode_hardware=None if other is None else change(other))
        for name, change in changes.items()
    }
    tries["a TPOT a quarter longer"] = replace(base, tpot_s=goal.tpot_s * _LEVER)
    tries["a TTFT a quarter longer"] = replace(base, ttft_s=goal.ttft_s * _LEVER)
    kinds = {cell.shared for cell in chosen.cells}  # a quarter more seldom makes the other kind the better one
    found = []
    for name, tried in tries.items():
        best = _Options.of(tried, split=False in kinds, shared=True in kinds).best(tried) or chosen
        found.append(Lever(name=name, gain=max(0.0, best.requests_per_s / chosen.requests_per_s - 1.0)))
    return tuple(sorted(found, key=lambda lever: -lever.gain))


def _check_fit(goal: PlanGoal) -> None:
    rooms = list(all_setups(goal, goal.ranks, drafts=(0,)))
    if not rooms:
        problem = f"no degree of parallelism divides the heads and experts of {goal.model.name} on {goal.chips} chips"
        raise NotReachable(problem, hint=f"whole nodes of {goal.hardware.node_chips} chips, or another model")
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
    """Each rank repeats attention, so more chips help only as far as experts or heads are split."""
    most = replace(goal, chips=10**6)
    fitting = (setup.ep for setup, _ in setups(most, most.ranks, drafts=(0,)))
    least = min(fitting, default=None)
    return None if least is None else instance_chips(goal, least)


def _unreachable(goal: PlanGoal, options: _Options) -> NotReachable:
    """Why no cell was found."""
    if not options.decodes:
        return _too_slow(goal.of_decode)
    if not options.prefills:
        return _too_late(goal)
    need = min(pool.chips for pool in options.prefills) + min(pool.chips for pool in options.decodes)
    node = goal.hardware.node_chips
    need = max(need, -(-need // node) * node if need > node else need)
    problem = (
        f"{goal.chips} chips hold no prefill instance beside a decode instance, and one pool for both breaks the SLO"
    )
    return NotReachable(problem, hint=f"at least {need} chips, {max(1, need - goal.chips)} more")


def _too_slow(goal: PlanGoal) -> NotReachable:
    found = pools.fastest_decode(goal)
    if found is None:
        tokens = int(goal.longest[1])
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


def _too_late(goal: PlanGoal) -> NotReachable:
    if not list(pools.prefill_pools(replace(goal, ttft_s=_EVER))):
        problem = f"the KV of one prompt of {int(goal.longest[0]):,} tokens fits in no prefill instance"
        return NotReachable(problem, hint="more chips, a shorter prompt or a smaller precision")
    low, high = goal.ttft_s, _EVER
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        reached = any(True for _ in pools.prefill_pools(replace(goal, ttft_s=middle)))
        low, high = (low, middle) if reached else (middle, high)
    problem = f"no deployment reaches a TTFT of {goal.ttft_s:.3f} s"
    return NotReachable(problem, hint=f"the soonest is {high:.3f} s: {high - goal.ttft_s:.3f} s are missing")
