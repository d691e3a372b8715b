"""The router's view of the fleet: workers, their loads, and which is next. Pure and incremental.

Placing a request looks at a handful of workers, however many there are: each pool is a list sorted by load. Cache
location is no reason to choose a worker: any peer can read any block.

A prefill worker's load is what it reported plus what was placed on it since; a decode worker's is the reserved share of
its KV memory, or of the batch that it can run.

A decode worker's batch runs at the pace of its strictest TPOT objective. So requests are grouped by TPOT class, each
class twice as fast as the next: a strict request does not shrink a large batch while there is a small one, and a
relaxed one leaves the small batches to strict ones, until the difference in load outweighs that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import frexp, inf

from tripool.messages import Heartbeat, Hello, Role, WorkerId

_CANDIDATES = 4
"""How many of the least loaded workers are compared more closely."""
_IN_WAIT = 2
"""Choices placed on a decode worker beyond its TPOT ceiling: they wait there and start without a round trip."""
_SCARCE = 0.5
"""Cost, in load, of placing a request without a TPOT objective beside the strictest one."""
_ALIKE = 0.1
"""Two workers whose loads differ by less are equally good."""


@dataclass(slots=True, eq=False)
class Member:
    hello: Hello
    heard_s: float
    progress_s: float
    """When it last finished a step, or was idle."""
    placed_s: float
    """When it was last given work."""
    num_steps: int = 0
    idle_s: float | None = None
    """Since when its heartbeats report nothing held."""
    draining: bool = False
    num_placed: int = 0
    placed_tokens: int = 0
    """Tokens of all its placements in the ledger."""
    reported_tokens: int = 0
    recent_tokens: int = 0
    """Placed since the last heartbeat."""
    crossing_tokens: int = 0
    """Placed between the last two heartbeats: the last one may not include it."""
    blocks_held: int = 0
    running: int = 0
    ceiling: int | None = None
    """Sequences that it can run at once within the TPOT objectives, from its last heartbeat."""
    classes: Counter[float] = field(default_factory=Counter)
    """TPOT objectives in milliseconds of what is placed there."""
    strictest_ms: float = inf
    turn: int = 0
    """Order of the last placement: of equally loaded workers, the one placed on longest ago is next."""
    entry: tuple[float, int, int, Member] | None = None
    """Where it is sorted in; None: it takes no new work."""
    sorted_in: list[list[tuple[float, int, int, Member]]] = field(default_factory=list)
    cost: float = 0.0
    """Load by which it is sorted in."""
    worker_id: WorkerId = field(init=False)
    bearable: int = field(init=False)
    """Most choices that may be placed on it; those running there already count even above its ceiling."""

    def __post_init__(self) -> None:
        self.worker_id, self.bearable = self.hello.worker_id, self.hello.max_running

    @property
    def ready(self) -> bool:
        """Takes new work."""
        return not self.draining

    @property
    def load_tokens(self) -> int:
        """Tokens to compute before it is idle; at most what the ledger has placed there."""
        known = self.reported_tokens + self.crossing_tokens + self.recent_tokens
        return known if known < self.placed_tokens else self.placed_tokens

    def weigh(self) -> float:
        hello = self.hello
        if hello.role == "prefill":
            return self.load_tokens
        memory, batch = self.placed_tokens / hello.kv_tokens, self.num_placed / self.bearable
        return memory if memory > batch else batch


_Entry = tuple[float, int, int, Member]
"""Cost, turn, number, member. No two entries have the same number, so members are never compared."""


class FleetView:
    def __init__(self) -> None:
        self._members: dict[WorkerId, Member] = {}
        self._ready: Counter[str] = Counter()
        """Members that accept work, by role."""
        self._by_load: dict[str, list[_Entry]] = {"prefill": [], "decode": []}
        """Members that accept work, least loaded first."""
        self._by_class: dict[int, list[_Entry]] = {}
        """Decode workers with placements, by their strictest TPOT class; the same entries as above."""
        self._num_with_tpot = 0
        """Placements with a TPOT objective at decode workers."""
        self._transfers: Counter[tuple[WorkerId, WorkerId]] = Counter()
        """Transfers under way from a prefill to a decode worker; no entry where there are none."""
        self._turns = 0
        self.reserved: dict[WorkerId, str] = {}
        """Workers that are one tenant's only."""
        self.num_changes = 0
        """Counts changes of loads and members; a worker without room has none until this changes."""
        self.considered: list[Member] = []
        """Members that the last pick compared."""

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, worker_id: WorkerId) -> Member | None:
        return self._members.get(worker_id)

    def num_ready(self, role: Role) -> int:
        return self._ready[role]

    # ---- facts ------------------------------------------------------------------------------------------------------

    def add(self, hello: Hello, now_s: float) -> None:
        assert hello.worker_id not in self._members, "a worker joined twice"
        member = Member(hello, heard_s=now_s, progress_s=now_s, placed_s=now_s)
        self._members[hello.worker_id] = member
        self._ready[hello.role] += 1
        if hello.reserved_for:
            self.reserved[hello.worker_id] = hello.reserved_for
        self._sort_in(member)

    def remove(self, worker_id: WorkerId) -> None:
        """After its placements are removed."""
        member = self._members.pop(worker_id)
        assert member.num_placed == 0 and member.placed_tokens == 0, "a member left with work placed on it"
        self._ready[member.hello.role] -= member.ready
        self.reserved.pop(worker_id, None)
        self._take_out(member)

    def closed_to(self, tenant: str) -> set[WorkerId]:
        """Workers that other tenants have reserved."""
        return {worker_id for worker_id, owner in self.reserved.items() if owner != tenant}

    def drain(self, worker_id: WorkerId) -> None:
        member = self._members[worker_id]
        self._ready[member.hello.role] -= member.ready
        member.draining = True
        self._take_out(member)

    def heard(self, heartbeat: Heartbeat, now_s: float) -> Member:
        member = self._members[heartbeat.worker_id]
        before, borne = member.load_tokens, member.bearable
        idle = heartbeat.waiting_tokens == 0 and heartbeat.running == 0
        if idle or heartbeat.num_steps != member.num_steps:
            member.progress_s = now_s
        nothing = idle and heartbeat.blocks_held == 0
        member.idle_s = (now_s if member.idle_s is None else member.idle_s) if nothing else None
        member.heard_s, member.num_steps = now_s, heartbeat.num_steps
        member.reported_tokens, member.running, member.blocks_held = (
            heartbeat.waiting_tokens,
            heartbeat.running,
            heartbeat.blocks_held,
        )
        member.ceiling, limit = heartbeat.ceiling, member.hello.max_running
        member.bearable = (
            limit if heartbeat.ceiling is None else min(limit, max(heartbeat.ceiling, heartbeat.running) + _IN_WAIT)
        )
        member.crossing_tokens, member.recent_tokens = member.recent_tokens, 0
        if before != member.load_tokens or borne != member.bearable:  # most heartbeats change nothing
            self._sort_in(member)
        return member

    def place(
        self,
        worker_id: WorkerId,
        tokens: int,
        now_s: float,
        source: WorkerId | None = None,
        tpot_ms: float | None = None,
    ) -> None:
        """`source`: the prefill worker whose KV it will copy, if any."""
        member = self._members[worker_id]
        self._count_class(member, tpot_ms, 1)
        self._turns += 1
        member.turn = self._turns
        member.placed_s = now_s
        member.num_placed += 1
        member.placed_tokens += tokens
        member.recent_tokens += tokens
        if source is not None:
            self._transfers[source, worker_id] = self._transfers.get((source, worker_id), 0) + 1
        self._sort_in(member)

    def take_off(self, worker_id: WorkerId, tokens: int, tpot_ms: float | None = None) -> None:
        member = self._members[worker_id]
        self._count_class(member, tpot_ms, -1)
        member.num_placed -= 1
        member.placed_tokens -= tokens
        assert member.num_placed >= 0 and member.placed_tokens >= 0, "more taken off than was placed"
        self._sort_in(member)

    def _count_class(self, member: Member, tpot_ms: float | None, change: int) -> None:
        """Only decode workers count: a prefill worker does not affect TPOT."""
        if tpot_ms is not None and member.hello.role == "decode":
            self._num_with_tpot += change
            count = member.classes.get(tpot_ms, 0) + change
            if count:
                member.classes[tpot_ms] = count
            else:
                member.classes.pop(tpot_ms)
            if len(member.classes) != 1:
                member.strictest_ms = min(member.classes, default=inf)
            elif change > 0:
                member.strictest_ms = tpot_ms
            else:
                (member.strictest_ms,) = member.classes

    def transferred(self, source: WorkerId, worker_id: WorkerId) -> None:
        """A transfer is no longer under way: copied, refused or void."""
        left = self._transfers.pop((source, worker_id)) - 1
        if left > 0:
            self._transfers[source, worker_id] = left

    # ---- decisions --------------------------------------------------------------------------------------------------

    def pick_prefill(
        self, tokens: int, ahead_tokens: int, avoid: WorkerId | None = None, closed: Collection[WorkerId] = ()
    ) -> Member | None:
        """The least loaded with room for so many tokens; an empty one always has. None of `closed`."""
        self.considered = _lightest(self._by_load["prefill"], avoid, closed)
        for member in self.considered:
            if member.num_placed == 0 or member.load_tokens + tokens <= ahead_tokens:
                return member
        return None

    def pick_decode(
        self,
        tokens: int,
        source: WorkerId,
        avoid: WorkerId | None = None,
        tpot_ms: float | None = None,
        closed: Collection[WorkerId] = (),
    ) -> Member | None:
        """Of the few least loaded with room, the one with the fewest transfers under way from `source`. None of
        `closed`.

        With TPOT objectives: of those, and of the least loaded of its own class, the best match comes first.
        """
        with_tpot = self._num_with_tpot > 0 or tpot_ms is not None
        own_ms = inf if tpot_ms is None else tpot_ms
        lightest = _lightest(self._by_load["decode"], avoid, closed)
        if with_tpot:
            alike = _lightest(self._by_class.get(_class_of(own_ms), []), avoid, closed)
            lightest += [m for m in alike if m not in lightest]
        self.considered = lightest
        fitting = [m for m in lightest if m.num_placed == 0 or _has_room(m, tokens)]
        if with_tpot and fitting:
            costs = [m.cost if m.strictest_ms == own_ms else m.cost + _mismatch(m, own_ms) for m in fitting]
            best = min(costs)
            fitting = [m for m, cost in zip(fitting, costs, strict=True) if cost < best + _ALIKE]
        if len(fitting) < 2 or not self._transfers:
            return fitting[0] if fitting else None
        return min(fitting, key=lambda m: self._transfers.get((source, m.worker_id), 0))

    def _sort_in(self, member: Member) -> None:
        if member.draining:
            return
        if member.entry is not None:
            self._take_out(member)
        self.num_changes += 1
        role, cost = member.hello.role, member.weigh()
        member.entry = entry = (cost, member.turn, self.num_changes, member)
        entries = self._by_load[role]
        insort(entries, entry)
        member.cost, member.sorted_in = cost, [entries]
        if role == "decode" and member.num_placed:
            entries = self._by_class.setdefault(_class_of(member.strictest_ms), [])
            insort(entries, entry)
            member.sorted_in.append(entries)

    def _take_out(self, member: Member) -> None:
        entry, member.entry = member.entry, None
        if entry is not None:
            for entries in member.sorted_in:
                del entries[bisect_left(entries, entry)]

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self, placed: dict[WorkerId, tuple[int, int]], transfers: Iterable[tuple[WorkerId, WorkerId]]) -> None:
        """`placed`: number and tokens of the ledger's placements by worker; `transfers`: its transfers under way."""
        for worker_id, member in self._members.items():
            expected = placed.get(worker_id, (0, 0))
            assert (member.num_placed, member.placed_tokens) == expected, f"{worker_id}: load is not what was placed"
            assert 0 <= member.load_tokens <= member.placed_tokens
        assert not placed.keys() - self._members.keys(), "work is placed on a worker that is not there"
        reserved = {m.worker_id: m.hello.reserved_for for m in self if m.hello.reserved_for}
        assert reserved == self.reserved, "reservations are miscounted"
        assert Counter(transfers) == self._transfers, "transfers are miscounted"
        for role, entries in self._by_load.items():
            ready = [m for m in self._members.values() if m.hello.role == role and m.ready]
            assert self._ready[role] == len(ready), "ready workers are miscounted"
            assert Counter(entry[3].worker_id for entry in entries) == Counter(m.worker_id for m in ready), (
                "a worker cannot be picked"
            )
            assert all(entry is entry[3].entry for entry in entries), "an old entry"
            assert entries == sorted(entries) and all(entry[0] == entry[3].weigh() for entry in entries), "an old load"
        assert self._num_with_tpot == sum(m.classes.total() for m in self), "TPOT objectives are miscounted"
        busy = [m for m in self if m.hello.role == "decode" and m.num_placed and m.ready]
        for member in self._members.values():
            assert member.strictest_ms == min(member.classes, default=inf), "not its strictest"
            assert member.classes.total() <= member.num_placed, "TPOT objectives without a placement"
        for number, entries in self._by_class.items():
            alike = [m.worker_id for m in busy if _class_of(m.strictest_ms) == number]
            assert Counter(entry[3].worker_id for entry in entries) == Counter(alike), "a worker is in the wrong class"


def _lightest(entries: list[_Entry], avoid: WorkerId | None, closed: Collection[WorkerId]) -> list[Member]:
    """A few of the least loaded, least loaded first. `avoid` is excluded if there is another."""
    if not closed:
        found = [entry[3] for entry in entries[:_CANDIDATES]]
    else:
        found = list(islice((entry[3] for entry in entries if entry[3].worker_id not in closed), _CANDIDATES))
    return found if avoid is None else [m for m in found if m.worker_id != avoid] or found


def _has_room(member: Member, tokens: int) -> bool:
    """Room in KV memory and batch; an empty worker takes anything."""
    if member.num_placed == 0:
        return True
    fits = member.placed_tokens + tokens <= member.hello.kv_tokens
    return fits and member.num_placed < member.bearable


@lru_cache(maxsize=1024)
def _class_of(tpot_ms: float) -> int:
    """Objectives within a factor of two share a class; extreme ones are clamped, and no objective is a class."""
    return 17 if tpot_ms == inf else max(-8, min(16, frexp(tpot_ms)[1]))


def _mismatch(member: Member, own_ms: float) -> float:
    """Cost to the others, in load: a stricter request shrinks the batch, a more relaxed one takes a scarce slot."""
    there_ms = member.strictest_ms
    if own_ms == there_ms or member.num_placed == 0:
        return 0.0
    if own_ms < there_ms:
        return member.num_placed / member.hello.max_running * (1 - own_ms / there_ms)
    return _SCARCE * (1 - there_ms / own_ms)
