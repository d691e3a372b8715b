"""Fair shares of a batch: between tenants by weight, within a tenant between requests. Pure.

The use of a group is the larger of two shares: of the batch slots, and of the KV blocks. A waiting group that uses less
may preempt the youngest sequence of the group that uses most, as long as that one still uses no less afterwards. Each
such exchange makes uses more equal, so exchanges end, and no two undo each other. A group's only sequence is never
preempted for another. Nothing is reserved: a group alone may use everything.

All choices and prompts of one client's request are one group (`Slo.job`). Requests that name none are one group too.
Within a group age alone decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain

from tripool.cache import BlockPool
from tripool.config import SchedulerConfig
from tripool.core import Slo
from tripool.engine.background import first_victims
from tripool.sequence import Seq

Group = tuple[str, str]
"""Tenant, and one of its requests."""


@dataclass(slots=True)
class _Use:
    rows: int = 0
    blocks: int = 0
    weight: float = 1.0

    def share(self, size: tuple[int, int], rows: int = 0, blocks: int = 0) -> float:
        """Share of the batch per weight, with so many rows and blocks more or less."""
        return max((self.rows + rows) / size[0], (self.blocks + blocks) / size[1]) / self.weight


@dataclass(slots=True)
class Claim:
    """A claim to a slot in the batch or, with no row, to more blocks for a running sequence."""

    slo: Slo
    blocks: int
    rows: int = 1
    order: float = float("inf")


@dataclass(slots=True)
class _Tenant:
    use: _Use
    jobs: dict[str, _Use] = field(default_factory=dict)


class Shares:
    """A snapshot, made for one decision from the running sequences. `size`: most rows, most blocks."""

    def __init__(self, running: Iterable[Seq], size: tuple[int, int]) -> None:
        self._size = size
        self._tenants: dict[str, _Tenant] = {}
        for seq in running:
            self._count(seq.request.slo, 1, len(seq.table))

    def _count(self, slo: Slo, rows: int, blocks: int) -> None:
        tenant = self._tenants.get(slo.tenant)
        if tenant is None:
            tenant = self._tenants[slo.tenant] = _Tenant(_Use(weight=slo.weight))
        for use in (tenant.use, tenant.jobs.setdefault(slo.job, _Use())):
            use.rows += rows
            use.blocks += blocks

    def order(self, claims: Sequence[Claim]) -> Iterator[int]:
        """Positions of `claims` in the order in which they should get slots: least use first, then the oldest.

        Each counts as granted before the next is chosen.
        """
        queues: dict[Group, list[int]] = {}
        for i in sorted(range(len(claims)), key=lambda i: claims[i].order, reverse=True):
            queues.setdefault(claims[i].slo.group, []).append(i)
        jobs: dict[str, list[tuple[float, float, str]]] = {}
        for (tenant, job), waiting in queues.items():
            rank = self._use(tenant, job).share(self._size), claims[waiting[-1]].order, job
            heappush(jobs.setdefault(tenant, []), rank)
        # Only the use of the chosen one changes, and it is sorted in again: the heads are always right.
        tenants = [(self._tenant_share(name), min(entry[1] for entry in own), name) for name, own in jobs.items()]
        heapify(tenants)
        while tenants:
            _, _, tenant = heappop(tenants)
            _, _, job = heappop(jobs[tenant])
            chosen = queues[tenant, job].pop()
            yield chosen
            self._count(claims[chosen].slo, claims[chosen].rows, claims[chosen].blocks)
            if queues[tenant, job]:
                rank = self._use(tenant, job).share(self._size), claims[queues[tenant, job][-1]].order, job
                heappush(jobs[tenant], rank)
            if jobs[tenant]:
                heappush(tenants, (self._tenant_share(tenant), jobs[tenant][0][1], tenant))

    def _tenant_share(self, name: str) -> float:
        tenant = self._tenants.get(name)
        return 0.0 if tenant is None else tenant.use.share(self._size)

    def _use(self, tenant: str, job: str) -> _Use:
        found = self._tenants.get(tenant)
        return _Use() if found is None else found.jobs.get(job, _Use())

    def victims(self, claim: Claim, holders: Iterable[Seq]) -> Iterator[Seq]:
        """Sequences that may be preempted for the claim, each as if those before it were gone."""
        left = sorted(holders, key=lambda seq: seq.order)
        while (found := self._victim(claim, left)) is not None:
            left.remove(found)
            self._count(found.request.slo, -1, -len(found.table))
            yield found

    def _victim(self, claim: Claim, holders: list[Seq]) -> Seq | None:
        """The one that uses most of all tenants, or else of this tenant's requests."""
        owner, size = claim.slo, self._size
        here = dict.fromkeys(seq.request.slo.tenant for seq in holders)  # by age: of equals, always the same one
        most = max(here, key=lambda name: self._tenants[name].use.share(size), default=owner.tenant)
        if most != owner.tenant:
            found = self._youngest(holders, most)
            rest = self._tenants[most].use.share(size, -1, -len(found.table))
            own = self._tenants.get(owner.tenant)
            use = own.use if own is not None else _Use(weight=owner.weight)
            if rest >= use.share(size, claim.rows, claim.blocks):
                return found
        jobs = dict.fromkeys(seq.request.slo.job for seq in holders if seq.request.slo.tenant == owner.tenant)
        if not jobs:
            return None
        largest = max(jobs, key=lambda name: self._use(owner.tenant, name).share(size))
        if largest == owner.job:
            return None
        found = _last(holders, (owner.tenant, largest))
        rest = self._use(owner.tenant, largest).share(size, -1, -len(found.table))
        fair = rest >= self._use(owner.tenant, owner.job).share(size, claim.rows, claim.blocks)
        return found if fair else None

    def _youngest(self, holders: list[Seq], tenant: str) -> Seq:
        """The youngest of the tenant's largest request; where each request has one sequence, of the tenant."""
        own = [seq for seq in holders if seq.request.slo.tenant == tenant]
        jobs = dict.fromkeys(seq.request.slo.job for seq in own)
        largest = max(jobs, key=lambda name: self._use(tenant, name).share(self._size))
        of_largest = [seq for seq in own if seq.request.slo.job == largest]
        return of_largest[-1] if len(of_largest) > 1 else own[-1]


def _last(holders: list[Seq], group: Group) -> Seq:
    return next(seq for seq in reversed(holders) if seq.request.slo.group == group)


def younger_in_scope(seq: Seq, holders: Iterable[Seq]) -> list[Seq]:
    """Those that must make room for `seq` by their age, youngest first.

    Of its own request; of its tenant, if it is the only one of its request; of all, if it is the only one of its
    tenant. So the oldest of all always gets its blocks.
    """
    others = sorted((s for s in holders if s is not seq), key=lambda s: s.order, reverse=True)
    slo = seq.request.slo
    tenant = [s for s in others if s.request.slo.tenant == slo.tenant]
    job = [s for s in tenant if s.request.slo.job == slo.job]
    return [s for s in job or tenant or others if s.order > seq.order]


class Sharing:
    """Sharing of one batch: the order in which waiting sequences start, and which are preempted for which.

    `running` hold a slot or soon will; of them, `holders` can be preempted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        running: Callable[[], list[Seq]],
        holders: Callable[[], Iterator[Seq]],
    ) -> None:
        self._config, self._pool, self._running, self._holders = config, pool, running, holders
        self._groups: Counter[Group] = Counter()
        """Open sequences."""

    def joined(self, seq: Seq) -> None:
        group = seq.request.slo.group
        self._groups[group] = self._groups.get(group, 0) + 1

    def left(self, seq: Seq) -> None:
        group = seq.request.slo.group
        count = self._groups.pop(group) - 1
        if count:
            self._groups[group] = count

    @property
    def active(self) -> bool:
        """Whether several groups have sequences."""
        return len(self._groups) > 1

    def claim(self, seq: Seq) -> Claim:
        return Claim(seq.request.slo, len(seq.tokens) // self._config.block_tokens + 1, order=seq.order)

    def order(self, waiting: Sequence[Seq]) -> Iterator[Seq]:
        return (waiting[i] for i in self._shares().order([self.claim(seq) for seq in waiting]))

    def room_for(self, slo: Slo, num_tokens: int, num_shared: int, waiting: Sequence[Seq]) -> list[Seq] | None:
        """Preemptions for a sequence that arrives computed; None: it has to wait. Of equals, waiting ones go first."""
        claim = Claim(slo, num_tokens // self._config.block_tokens + 1 - num_shared)
        others = [seq for seq in waiting if not seq.is_background]
        if others and slo.background:
            return None
        waiting = others or (waiting if slo.background else ())
        if waiting and not self._goes_first(claim, waiting):
            return None
        return self.victims(claim, claim.blocks)

    def _goes_first(self, claim: Claim, waiting: Sequence[Seq]) -> bool:
        if not self.active and claim.slo.group in self._groups:
            return False
        claims = [*map(self.claim, waiting), claim]
        return next(self._shares().order(claims)) == len(waiting)

    def victims(self, claim: Claim, need: int) -> list[Seq] | None:
        """Preemptions for a slot and so many blocks; None: no room, and too few can be preempted."""
        victims: list[Seq] = []
        excess = len(self._running()) + 1 - self._config.max_running
        if excess <= 0 and self._pool.can_allocate(need):
            return victims
        first, holders = first_victims(claim.slo.background, self._holders())
        fair = self.active or claim.slo.group not in self._groups
        for victim in chain(first, self._shares().victims(claim, holders) if fair else ()):
            victims.append(victim)
            if len(victims) >= excess and self._is_enough(victims, need):
                return victims
        return None

    def takeable(self, seq: Seq, need: int) -> list[Seq]:
        """Sequences that may be preempted for a running one that needs so many more blocks, in that order."""
        holders = (holder for holder in self._holders() if holder is not seq)
        fair, others = first_victims(seq.is_background, holders)
        if not self.active:
            return fair + younger_in_scope(seq, others)
        if fair and self._is_enough(fair, need):
            return fair
        for victim in self._shares().victims(Claim(seq.request.slo, need, rows=0), others):
            fair.append(victim)
            if self._is_enough(fair, need):
                return fair
        return fair + [s for s in younger_in_scope(seq, others) if s not in fair]

    def _is_enough(self, victims: list[Seq], need: int) -> bool:
        return need <= self._pool.num_free + self._pool.num_freed_by([seq.table for seq in victims])

    def _shares(self) -> Shares:
        return Shares(self._running(), (self._config.max_running, self._config.num_blocks))

    def check(self, open_seqs: Iterable[Seq]) -> None:
        assert self._groups == Counter(seq.request.slo.group for seq in open_seqs), "groups are miscounted"
