"""A cache whose entries belong to a namespace: found by nobody else, and displaced by nobody but their own tenant.

Whether something was found shows in how long an answer takes. A shared entry would tell one tenant what another sent.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from tripool.core import SALT_MARK, Structure

T = TypeVar("T")


class OwnedCache(Generic[T]):
    """The last `per_tenant` entries of each tenant, its salts together, of the last `max_tenants` tenants."""

    def __init__(self, *, per_tenant: int, max_tenants: int) -> None:
        self._per_tenant, self._max_tenants = per_tenant, max_tenants
        self._tenants: OrderedDict[str, OrderedDict[tuple[str, Structure], T]] = OrderedDict()

    def get(self, namespace: str, structure: Structure) -> T | None:
        own = self._tenants.get(_tenant(namespace))
        if own is None or (namespace, structure) not in own:
            return None
        own.move_to_end((namespace, structure))
        return own[namespace, structure]

    def put(self, namespace: str, structure: Structure, value: T) -> None:
        own = self._tenants.setdefault(_tenant(namespace), OrderedDict())
        self._tenants.move_to_end(_tenant(namespace))
        own[namespace, structure] = value
        own.move_to_end((namespace, structure))
        if len(own) > self._per_tenant:
            own.popitem(last=False)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)


def _tenant(namespace: str) -> str:
    return namespace.partition(SALT_MARK)[0]
