"""Placement trace: why a request went where it went and what held it up, kept with its ledger entry. Pure and bounded.

It is never an input of a decision: without traces the router places every request the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tripool.core import TokenEvent
from tripool.messages import Role
from tripool.router.view import Member

_MAX_STEPS = 16
"""Beyond it, steps in the middle are left out: the first and the last ones explain most."""

Row = dict[str, str | float]


class Candidate(NamedTuple):
    """A worker that was considered, with its load at that time. (A tuple: every placement makes several.)"""

    worker: str
    num_placed: int
    load_tokens: int
    """Tokens to compute (prefill), or KV memory reserved (decode)."""


class Step(NamedTuple):
    at_s: float
    """Since the request's arrival."""
    what: str
    worker: str
    waited_s: float = 0.0
    held_by: str = ""
    candidates: tuple[Candidate, ...] = ()
    choices: tuple[int, ...] = ()


class PlacementTrace:
    def __init__(self, came_s: float) -> None:
        self._came_s = came_s
        self._steps: list[Step] = []
        self._num_left_out = 0
        self._num_placed = 0
        self.num_lost = 0
        """Times that it lost a worker."""
        self._failed = ""
        self._waited_s: dict[str, float] = {}
        """Waiting time by the limit that caused it."""
        self._fetched_tokens = self._disk_tokens = 0
        self._cached_tokens: int | None = None

    # ---- recording --------------------------------------------------------------------------------------------------

    def placed(
        self,
        role: Role,
        member: Member,
        considered: Iterable[Member],
        choices: Sequence[int],
        *,
        waited_s: float,
        held_by: str,
        now_s: float,
    ) -> None:
        """Call before the view counts the placement, so that the loads are those of the decision."""
        candidates = tuple([Candidate(m.worker_id.name, m.num_placed, _load(m)) for m in considered])
        self._num_placed += 1
        if held_by:
            self._waited_s[held_by] = self._waited_s.get(held_by, 0.0) + waited_s
        self._add(
            Step(now_s - self._came_s, role, member.worker_id.name, waited_s, held_by, candidates, tuple(choices))
        )

    def left(self, worker: str, how: str, choice: int, now_s: float) -> None:
        self._add(Step(now_s - self._came_s, how, worker, choices=(choice,)))

    def failed(self, why: str) -> None:
        self._failed = why

    def begun(self, event: TokenEvent) -> None:
        """Its first token arrived, with the number of cached tokens."""
        self._cached_tokens = event.num_cached_tokens
        if event.stages is not None:
            self._fetched_tokens, self._disk_tokens = event.stages.fetched_tokens, event.stages.disk_tokens

    def _add(self, step: Step) -> None:
        if len(self._steps) == _MAX_STEPS:
            del self._steps[_MAX_STEPS // 2]
            self._num_left_out += 1
        self._steps.append(step)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str | int | list[Row]]:
        facts: dict[str, str | int | list[Row]] = {"placements": self._num_placed, "workers lost": self.num_lost}
        if self._cached_tokens is not None:
            fetched = min(self._fetched_tokens, self._cached_tokens)
            facts["cached at the prefill worker"] = f"{self._cached_tokens - fetched} tokens"
            disk = min(self._disk_tokens, fetched)
            tiers = f" ({fetched - disk} from memory, {disk} from disk)" if fetched else ""
            facts["fetched from the cache pool"] = f"{fetched} tokens{tiers}"
        for held_by, waited_s in self._waited_s.items():
            facts[f"held back: {held_by}"] = f"{1e3 * waited_s:.1f} ms"
        facts["steps"] = [_row(step) for step in self._steps]
        if self._failed:
            facts["failed"] = self._failed
        if self._num_left_out:
            facts["steps left out"] = self._num_left_out
        return facts


def why_full(role: Role, considered: Sequence[Member], tokens: int) -> str:
    """Which limits keep so many tokens off all the workers considered."""
    if not considered:
        return f"there is no {role} worker"
    if role == "prefill":
        return "all prefill workers have full queues"
    limits = set()
    for member in considered:
        if member.placed_tokens + tokens > member.hello.kv_tokens:
            limits.add("KV memory")
        elif member.num_placed >= member.hello.max_running:
            limits.add("batch slots")
        else:
            limits.add("TPOT objectives")
    return f"all decode workers are full: {', '.join(sorted(limits))}"


def _load(member: Member) -> int:
    return member.load_tokens if member.hello.role == "prefill" else member.placed_tokens


def _row(step: Step) -> Row:
    row: Row = {"at ms": round(1e3 * step.at_s, 1), "what": step.what, "worker": step.worker}
    row["choices"] = ", ".join(map(str, step.choices))
    row["waited ms"] = round(1e3 * step.waited_s, 1)
    row["held by"] = step.held_by
    looked_at = {one.worker: one for one in step.candidates}
    loads = (f"{one.worker}: {one.num_placed} requests, {one.load_tokens} tokens" for one in looked_at.values())
    row["candidates"] = "; ".join(loads)
    return row
