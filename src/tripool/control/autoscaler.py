"""The autoscaler: how many workers each pool should have, and what to do about it. Pure: no clock, no threads.

`observe` takes what happened since the last call, `decide` says what to change. Time is an argument of both.

| question | answer |
|---|---|
| how many are needed | demand (`demand.py`), forecast to when a start would come (`forecast.py`), and its variation |
| who does it | first a worker of a pool that has too many changes its role; only then one is started |
| who goes | the least loaded, once fewer have sufficed for a while |

Three things are learned: how long starts take; caution, which grows with the share of requests that missed their
objectives lately, and says how much variation is borne; and for how long a pool keeps surplus, which grows where
workers were wanted back soon after they were stopped.

A change of a pool's size is not reversed within the cool-down unless its demand changed by more than the dead band.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp

from tripool.config import AutoscaleConfig
from tripool.control.demand import Demand
from tripool.control.forecast import Forecast
from tripool.control.scaling import (
    POOLS,
    Action,
    Alternative,
    Convert,
    Decision,
    GiveUp,
    Load,
    Pool,
    Start,
    Stop,
    Worker,
)

_WORKING: tuple[Pool, ...] = ("prefill", "decode")
_OTHER: dict[Pool, Pool] = {"prefill": "decode", "decode": "prefill"}
_CONVERT_S = 15.0
"""How far ahead a pool must last: it can get a worker of the other one at once."""
_LATE_S = 6 * 3600.0
"""Over which missed objectives are counted."""
_USUAL_REQUESTS = 2000.0
"""That missed exactly as often as they may, before anything is known."""
_CAUTION = (0.25, 3.0)
"""Least and most, in usual variations of a demand; 1 where as many requests are late as may be."""
_FIRST_HOLD, _LONGEST_HOLD = 5.0, 10.0
"""How long surplus is held, in `hold_s`: at first, when nothing is known, and at most."""
_REGRETS = 4.0
"""A worker that is wanted back within so many starts was stopped too soon."""
_EPS = 0.02
"""Workers that may be missing: more is not known of a demand."""
_FIRST_REPORTS = 3
"""Before the first decision."""


@dataclass(slots=True)
class _Pool:
    """What is known of one pool beside its demand."""

    hold_s: float
    """For how long surplus is held."""
    changed_s: float | None = None
    """When its size changed last, in which direction, and at what demand."""
    grew: bool = False
    at_demand: float = 0.0
    fell_s: float | None = None
    """When it was made smaller, unless that was judged already; and how large it was."""
    fell_from: int = 0


@dataclass(slots=True)
class _Plan:
    """One decision in the making."""

    need: dict[Pool, int]
    why: dict[Pool, str]
    reasons: list[str] = field(default_factory=list)
    considered: list[Alternative] = field(default_factory=list)

    def pass_over(self, what: str, why_not: str) -> None:
        self.considered.append(Alternative(what, why_not))


class Autoscaler:
    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self.demand = Demand(config.ttft_s, config.first_samples_s)
        self.start_s = config.start_s
        """How long starts take, as learned."""
        self._forecasts: dict[Pool, Forecast] = {pool: Forecast() for pool in _WORKING}
        self._allowed = (1.0 - config.kept_share) / len(_WORKING)
        """Share of requests that may be late because of one pool."""
        self._late = dict.fromkeys(_WORKING, (self._allowed * _USUAL_REQUESTS, _USUAL_REQUESTS))
        """Requests that missed their objective lately, and all."""
        self._pools: dict[Pool, _Pool] = {pool: _Pool(_FIRST_HOLD * config.hold_s) for pool in POOLS}
        self.wanted: dict[Pool, int] = {}
        """Workers of each pool; empty before the first decision."""
        self._needs: deque[tuple[float, dict[Pool, int]]] = deque()
        """(time, workers needed), as far back as surplus is held."""
        self._starting: dict[str, float] = {}
        """Since when."""
        self._last_s: float | None = None
        self._num_reports = 0

    # ---- facts ------------------------------------------------------------------------------------------------------

    def observe(self, load: Load, workers: Sequence[Worker]) -> None:
        passed_s = load.now_s - self._last_s if self._last_s is not None else 0.0
        self._last_s = load.now_s
        self._num_reports += 1
        self._learn_starts(workers)
        self.demand.observe(load, workers)
        judged = {"prefill": (load.late_first_tokens, load.first_tokens), "decode": (load.late_answers, load.answers)}
        keep = exp(-passed_s / _LATE_S)
        for pool in _WORKING:
            late, count = self._late[pool]
            self._late[pool] = late * keep + judged[pool][0], count * keep + judged[pool][1]
            self._forecasts[pool].observe(self.demand.workers[pool], load.now_s, self.start_s)

    def _learn_starts(self, workers: Sequence[Worker]) -> None:
        ready = {worker.name: worker.since_s for worker in workers if worker.stage == "ready"}
        for name, since_s in self._starting.items():
            if name in ready:
                self.start_s += 0.3 * (max(1.0, ready[name] - since_s) - self.start_s)
        self._starting = {w.name: w.since_s for w in workers if w.stage == "starting" and not w.converting}

    def caution(self, pool: Pool) -> float:
        """1: as many requests miss the objective as may; more: too many do."""
        late, count = self._late[pool]
        low, high = _CAUTION
        return min(high, max(low, late / count / self._allowed))

    # ---- decisions --------------------------------------------------------------------------------------------------

    def decide(self, now_s: float, workers: Sequence[Worker]) -> Decision | None:
        """None: nothing changes. Workers must be as of now: what was decided before shows in them."""
        late = [worker for worker in workers if self._overdue(worker, now_s)]
        there = [worker for worker in workers if worker.stage != "leaving" and worker not in late]
        if not self.wanted:
            self.wanted = {pool: self._within(pool, sum(w.pool == pool for w in there)) for pool in POOLS}
        before = dict(self.wanted)
        plan = self._needed()
        plan.reasons += [f"{w.name} has been starting for {now_s - w.since_s:.0f} s" for w in late]
        if self._num_reports >= _FIRST_REPORTS:
            self._resize(plan, there, now_s)
        actions: list[Action] = [GiveUp(worker.name) for worker in late]
        leaving = sum(w.stage == "leaving" and w.pool != "cache" for w in workers)
        actions += self._act(there, leaving, plan)
        if not actions and before == self.wanted:
            return None
        return Decision(
            at_s=now_s,
            bound="; ".join(plan.reasons) or "there are not as many workers as are wanted",
            actions=tuple(actions),
            before=before,
            after=dict(self.wanted),
            demand={pool: self._level(pool) for pool in POOLS},
            considered=tuple(plan.considered),
        )

    def _overdue(self, worker: Worker, now_s: float) -> bool:
        starting = worker.stage == "starting" and not worker.converting
        return starting and now_s - worker.since_s > self._config.start_deadline_s

    def _needed(self) -> _Plan:
        plan = _Plan({}, {})
        for pool in _WORKING:
            forecast = self._forecasts[pool]
            varies = forecast.noise + (self.demand.burst if pool == "prefill" else 0.0)
            spare = self.caution(pool) * varies
            now, soon = (forecast.at(ahead_s) + spare for ahead_s in (_CONVERT_S, self.start_s))
            plan.need[pool] = self._within(pool, ceil(max(now, soon) - _EPS))
            when = f"within {self.start_s:.0f} s" if soon > now else "now"
            plan.why[pool] = (
                f"{pool} needs {max(now, soon):.2f} workers {when}, {spare:.2f} of them for what it varies by "
                f"({self.demand.bound[pool]})"
            )
        # A member is worth it where the prefill workers that it would save cost more than it does.
        prefill_cost, _, member_cost = self._config.costs
        members = self.demand.workers["cache"] + self.demand.wasted * prefill_cost / member_cost
        plan.need["cache"] = self._within("cache", min(ceil(members - _EPS), self.wanted["cache"] + 1))
        plan.why["cache"] = f"cache needs {members:.2f} members ({self.demand.bound['cache']})"
        over = plan.need["prefill"] + plan.need["decode"] - self._config.most_workers
        if over > 0:
            self._share(plan, over)
        return plan

    def _share(self, plan: _Plan, over: int) -> None:
        """There are not enough workers: both pools are short by about the same share."""
        for _ in range(over):
            able = [pool for pool in _WORKING if plan.need[pool] > self._bounds(pool)[0]]
            pool = max(able, key=lambda name: (plan.need[name] - 1) / max(0.01, self._level(name)))
            plan.need[pool] -= 1
        for pool in _WORKING:
            plan.why[pool] += f"; {self._config.most_workers} workers are all there are"

    # ---- sizes ------------------------------------------------------------------------------------------------------

    def _resize(self, plan: _Plan, there: Sequence[Worker], now_s: float) -> None:
        """First what becomes smaller: the others may have to wait for its workers."""
        need = plan.need
        self._needs.append((now_s, need))
        begin_s = now_s - _LONGEST_HOLD * self._config.hold_s
        while len(self._needs) > 1 and self._needs[1][0] <= begin_s:
            self._needs.popleft()
        for pool in POOLS:
            self._judge_stop(pool, need[pool], now_s)
            if need[pool] < self.wanted[pool]:
                held = self._held(pool, now_s)
                other = _OTHER.get(pool)
                if other is not None and held > need[pool] and any(w.converts for w in there if w.pool == pool):
                    # What the other pool is short of it may have at once: that is soon undone, if need be.
                    held = max(need[pool], min(held, self.wanted[pool] - max(0, need[other] - self.wanted[other])))
                self._change(plan, pool, min(held, self.wanted[pool]), now_s)
        for pool in POOLS:
            target = need[pool]
            if pool in _OTHER:
                target = min(target, self._config.most_workers - self.wanted[_OTHER[pool]])
            self._change(plan, pool, max(target, self.wanted[pool]), now_s)

    def _held(self, pool: Pool, now_s: float) -> int:
        """The most workers that were needed while surplus is held."""
        begin_s = now_s - self._pools[pool].hold_s
        if self._needs[0][0] > begin_s:
            return self.wanted[pool]  # not known for long enough
        return max(each[pool] for at_s, each in self._needs if at_s >= begin_s)

    def _change(self, plan: _Plan, pool: Pool, target: int, now_s: float) -> None:
        if target == self.wanted[pool]:
            return
        known, grows = self._pools[pool], target > self.wanted[pool]
        blocked = self._reverses(pool, grows, now_s)
        if blocked:
            plan.pass_over(f"{target} instead of {self.wanted[pool]} for {pool}", blocked)
            return
        known.changed_s, known.grew, known.at_demand = now_s, grows, self._level(pool)
        if not grows:
            known.fell_s, known.fell_from = now_s, self.wanted[pool]
        plan.reasons.append(plan.why[pool])
        self.wanted[pool] = target

    def _reverses(self, pool: Pool, grows: bool, now_s: float) -> str:
        """Why this change would be a reversal too soon; empty: it would not."""
        known, demand = self._pools[pool], self._level(pool)
        if known.changed_s is None or known.grew == grows or now_s - known.changed_s >= self._config.cooldown_s:
            return ""
        moved = demand - known.at_demand
        if (moved if grows else -moved) > self._config.dead_band * max(known.at_demand, demand):
            return ""
        return f"its size changed {now_s - known.changed_s:.0f} s ago, and its demand by {moved:+.2f} since"

    def _judge_stop(self, pool: Pool, need: int, now_s: float) -> None:
        """A stop was too soon if the worker is wanted back within a few starts' time: then surplus is held longer."""
        known, least_s = self._pools[pool], self._config.hold_s
        if known.fell_s is None:
            return
        if need >= known.fell_from:
            gone_s = now_s - known.fell_s
            known.hold_s = min(_LONGEST_HOLD * least_s, max(1.5 * known.hold_s, known.hold_s + 1.2 * gone_s))
            known.fell_s = None
        elif now_s - known.fell_s > _REGRETS * self.start_s:
            known.hold_s = max(least_s, 0.7 * known.hold_s)
            known.fell_s = None

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _act(self, there: Sequence[Worker], leaving: int, plan: _Plan) -> list[Action]:
        """From what there is to what is wanted: conversions before starts, starting workers stopped before others."""
        actions: list[Action] = []
        used: set[str] = set()
        extra = {pool: sum(w.pool == pool for w in there) - self.wanted[pool] for pool in POOLS}
        for pool, other in _OTHER.items():
            while extra[pool] < 0 < extra[other]:
                worker = _least_loaded(there, other, used, converting=True)
                if worker is None:
                    plan.pass_over(f"a worker of {other} for {pool}", "none that is ready can change its role")
                    break
                plan.pass_over(f"a start for {pool}", f"takes {self.start_s:.0f} s; {worker.name} is there")
                actions.append(Convert(worker.name, pool))
                used.add(worker.name)
                extra[pool] += 1
                extra[other] -= 1
        room = self._config.most_workers - leaving - sum(w.pool != "cache" for w in there)
        for pool in POOLS:
            for _ in range(-extra[pool]):
                if pool in _OTHER:
                    if room <= 0:
                        plan.pass_over(f"a start for {pool}", f"{leaving} workers are still leaving")
                        break
                    room -= 1
                    plan.pass_over(f"a worker of {_OTHER[pool]} for {pool}", f"{_OTHER[pool]} has none to spare")
                actions.append(Start(pool))
            for _ in range(extra[pool]):
                worker = _least_loaded(there, pool, used)
                assert worker is not None, "more surplus than workers"
                actions.append(Stop(worker.name))
                used.add(worker.name)
        return actions

    def _level(self, pool: Pool) -> float:
        """Present demand, smoothed."""
        forecast = self._forecasts.get(pool)
        return self.demand.workers[pool] if forecast is None else forecast.level

    def _bounds(self, pool: Pool) -> tuple[int, int]:
        number = POOLS.index(pool)
        return self._config.least[number], self._config.most[number]

    def _within(self, pool: Pool, count: int) -> int:
        low, high = self._bounds(pool)
        return min(high, max(low, count))

    def check(self) -> None:
        """The invariants."""
        self.demand.check()
        for forecast in self._forecasts.values():
            forecast.check()
        for pool, count in self.wanted.items():
            assert self._within(pool, count) == count, f"{count} {pool} are out of bounds"
        if self.wanted:
            working = sum(self.wanted[pool] for pool in _WORKING)
            assert working <= self._config.most_workers, f"{working} workers are wanted"
        longest_s = _LONGEST_HOLD * self._config.hold_s
        assert all(self._config.hold_s <= known.hold_s <= longest_s for known in self._pools.values())


def _least_loaded(there: Sequence[Worker], pool: Pool, used: set[str], *, converting: bool = False) -> Worker | None:
    """`converting`: of those that can change their role now. Else one that is still starting goes first."""
    able = [w for w in there if not converting or (w.converts and w.stage == "ready")]
    found = [w for w in able if w.pool == pool and w.name not in used]
    return min(found, key=lambda w: (w.stage == "ready", w.contexts, w.memory, -w.since_s, w.name), default=None)
