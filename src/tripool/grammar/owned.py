"""A cache whose entries belong to a tenant: only their owner finds and evicts them.

A hit shows in the response time, so a shared entry would tell one tenant what another sent. A tenant's salts share its
entries: else a new salt per request would compile the same grammar each time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from tripool.core import Structure, owner

T = TypeVar("T")


class OwnedCache(Generic[T]):
    """The last `per_tenant` entries of each tenant, of the last `max_tenants` tenants."""

    def __init__(self, *, per_tenant: int, max_tenants: int) -> None:
        self._per_tenant, self._max_tenants = per_tenant, max_tenants
        self._tenants: OrderedDict[str, OrderedDict[Structure, T]] = OrderedDict()

    def get(self, namespace: str, structure: Structure) -> T | None:
        own = self._tenants.get(owner(namespace))
        if own is None or structure not in own:
            return None
        own.move_to_end(structure)
        return own[structure]

    def put(self, namespace: str, structure: Structure, value: T) -> None:
        own = self._tenants.setdefault(owner(namespace), OrderedDict())
        self._tenants.move_to_end(owner(namespace))
        own[structure] = value
        own.move_to_end(structure)
        if len(own) > self._per_tenant:
            own.popitem(last=False)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)
