"""Decode slots held per tenant and request at each decode worker, and who may join a full one. Pure.

A decode worker shares its batch by tenant and request (`engine/batch_shares.py`): a group with fewer slots takes one
from the group with most. So a request of a group with fewer is placed there even when no slot is free.
"""

from __future__ import annotations

from collections import Counter

from tripool.core import Slo
from tripool.messages import WorkerId


class DecodeSlots:
    def __init__(self) -> None:
        self._held: dict[WorkerId, Counter[tuple[str, str]]] = {}
        self._background: Counter[WorkerId] = Counter()
        """Slots held by background requests: a worker gives them up for any other."""
        self._weights: dict[str, float] = {}

    def place(self, worker_id: WorkerId, slo: Slo) -> None:
        held, group = self._held.get(worker_id), slo.group
        if held is None:
            held = self._held[worker_id] = Counter()
        held[group] = held.get(group, 0) + 1
        self._background[worker_id] += slo.background
        self._weights[slo.tenant] = slo.weight

    def take_off(self, worker_id: WorkerId, slo: Slo) -> None:
        self._background[worker_id] -= slo.background
        if not self._background[worker_id]:
            del self._background[worker_id]
        held, group = self._held[worker_id], slo.group
        count = held.pop(group) - 1
        if count:
            held[group] = count
        elif not held:
            del self._held[worker_id]
        if len(self._weights) > 1024 + 2 * sum(map(len, self._held.values())):
            here = {tenant for groups in self._held.values() for tenant, _ in groups}
            self._weights = {tenant: self._weights[tenant] for tenant in here}

    def owes(self, worker_id: WorkerId, slo: Slo, over: int = 0) -> bool:
        """Whether another tenant, or another request of the same one, would keep at least as many slots after giving
        one up. `over`: choices placed beyond the worker's slots, for which it has to preempt others already.
        """
        if slo.background:
            return False
        if self._background[worker_id] > max(0, over):
            return True
        given = 1 + max(0, over)
        held = self._held.get(worker_id, Counter())
        tenants: Counter[str] = Counter()
        for (tenant, _), count in held.items():
            tenants[tenant] += count
        own = (tenants[slo.tenant] + 1) / slo.weight
        if any((n - given) / self._weights[name] >= own for name, n in tenants.items() if name != slo.tenant):
            return True
        mine = {job: count for (tenant, job), count in held.items() if tenant == slo.tenant}
        return any(count - given >= mine.get(slo.job, 0) + 1 for job, count in mine.items() if job != slo.job)

    def check(self, placed: Counter[tuple[WorkerId, tuple[str, str]]]) -> None:
        held = Counter(
            {(worker_id, group): n for worker_id, groups in self._held.items() for group, n in groups.items()}
        )
        assert held == placed, "decode slots are miscounted"
