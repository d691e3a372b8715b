"""Open connections, the tenants that claim them, and which one to close when there are too many. Pure.

A connection is **claimed** while a tenant is known for the request on it. A claimed connection is never closed in
favour of another one, so their number is bounded:

| claimed | at most |
|---|---|
| in total | seven eighths of all: the rest is for unauthenticated connections and health checks |
| by one tenant | a third of what is left, so a quarter when it is alone; at least one |
| on a server without keys, where all are one tenant | no other bound |

So after ten tenants have taken all they can, of 4,096 the next one still gets fifty. Addresses are not counted: all
users of a reverse proxy, or of this machine, share one.

**Other connections** are closed in favour of a new one: first one that never sent a complete head, then one that is
idle or whose request is not claimed yet, then one whose claimed request is still being sent; of each group the oldest,
and the new one itself only if there is no other. So a request that is sent at once is served while thousands of
connections are held open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

_SPARE_PART = 8
_TENANTS_PART = 3
"""One tenant's divisor of what is left."""


class Claim(Enum):
    GRANTED = auto()
    TENANT_FULL = auto()
    ALL_FULL = auto()


class ConnectionTable(Generic[C]):
    def __init__(self, max_open: int) -> None:
        assert max_open > 0
        self._max_open = max_open
        self._max_claimed = max(1, max_open - max(1, max_open // _SPARE_PART))
        self._open: set[C] = set()
        # Dicts keep insertion order, the order of time; a set has none.
        self._unknown: dict[C, None] = {}
        self._known: dict[C, None] = {}
        self._claimed: dict[C, str] = {}
        """With the tenant's name."""
        self._num_claimed: Counter[str] = Counter()
        self._sending: dict[C, None] = {}
        """Claimed connections whose requests are not complete."""

    def __len__(self) -> int:
        return len(self._open)

    def waits(self, connection: C, *, known: bool) -> None:
        """It waits for its client, or for its request to be claimed. `known`: it has sent a complete head before."""
        self._leave(connection)
        self._open.add(connection)
        (self._known if known else self._unknown)[connection] = None

    def works(self, connection: C) -> None:
        """Its request is complete."""
        self._sending.pop(connection, None)
        if connection not in self._claimed:
            self.waits(connection, known=True)

    def claim(self, connection: C, tenant: str, *, shared: bool = True, sending: bool = False) -> Claim:
        """Until it waits again, or is closed. `shared`: the server has several tenants; `sending`: its request is not
        complete yet."""
        if connection not in self._open:  # closed before it could be claimed
            return Claim.ALL_FULL
        self.waits(connection, known=True)
        left = self._max_claimed - len(self._claimed)
        if left <= 0:
            return Claim.ALL_FULL
        if shared and self._num_claimed[tenant] >= max(1, left // _TENANTS_PART):
            return Claim.TENANT_FULL
        del self._known[connection]
        self._claimed[connection] = tenant
        self._num_claimed[tenant] += 1
        if sending:
            self._sending[connection] = None
        return Claim.GRANTED

    def sending_longest(self) -> C | None:
        """The connection to close for a complete request when no more may be claimed."""
        return next(iter(self._sending), None)

    def closed(self, connection: C) -> None:
        self._leave(connection)
        self._open.discard(connection)

    def superfluous(self, newcomer: C) -> C | None:
        """The connection to close now that `newcomer` is open. None: there is room."""
        if len(self._open) <= self._max_open:
            return None
        others = (one for some in (self._unknown, self._known, self._sending) for one in some if one != newcomer)
        return next(others, newcomer)

    def _leave(self, connection: C) -> None:
        self._unknown.pop(connection, None)
        self._known.pop(connection, None)
        self._sending.pop(connection, None)
        tenant = self._claimed.pop(connection, None)
        if tenant is not None:
            self._num_claimed[tenant] -= 1
            if not self._num_claimed[tenant]:
                del self._num_claimed[tenant]
