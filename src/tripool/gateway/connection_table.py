"""Which connections are open, whose they are, and which has to go when there are too many. Pure: no socket, no clock.

**Claimed** is a connection while a tenant is answerable for the request on it. Such a one is never ended for another's
sake, so there are only so many:

| claimed | at most |
|---|---|
| by all | seven eighths of all: the rest is for those of whom nothing is known yet, and for health checks |
| by one tenant | a third of what is left, so a quarter when it is alone; one in any case |
| on a server without keys, where everybody is one tenant | no other bound |

So after ten tenants have taken all they can, of 4,096 the next one still finds fifty. Addresses are not counted: all
users of a reverse proxy, or of this machine, share one, and a bound on it would shut out the wrong ones.

**All others** can be ended in favour of a newcomer: one that has never sent a complete head first, then one that is
idle or whose request nobody answers for yet, then one whose claimed request is still being sent; of each kind the one
that has been so for longest, and the newcomer itself only if there is no other. Who sends a request at once is
therefore heard while thousands hold connections open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

_SPARE_PART = 8
_TENANTS_PART = 3
"""Of what is left."""


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
        # Insertion order is the order of time; a set has none.
        self._unknown: dict[C, None] = {}
        self._known: dict[C, None] = {}
        self._claimed: dict[C, str] = {}
        """With the tenant's name."""
        self._num_claimed: Counter[str] = Counter()
        self._sending: dict[C, None] = {}
        """Of the claimed ones, those whose requests are not complete."""

    def __len__(self) -> int:
        return len(self._open)

    def waits(self, connection: C, *, known: bool) -> None:
        """From now on we wait for its client, or for somebody who answers for its request. `known`: it has sent a
        complete head before."""
        self._leave(connection)
        self._open.add(connection)
        (self._known if known else self._unknown)[connection] = None

    def works(self, connection: C) -> None:
        """Its request is complete."""
        self._sending.pop(connection, None)
        if connection not in self._claimed:
            self.waits(connection, known=True)

    def claim(self, connection: C, tenant: str, *, shared: bool = True, sending: bool = False) -> Claim:
        """Until it waits again, or is closed. `shared`: the tenant is one of several; `sending`: its request is not
        complete yet."""
        if connection not in self._open:  # ended before anybody could answer for it
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
        """Which one to end for a request that is complete, when all that may be claimed are."""
        return next(iter(self._sending), None)

    def closed(self, connection: C) -> None:
        self._leave(connection)
        self._open.discard(connection)

    def superfluous(self, newcomer: C) -> C | None:
        """Which one to end, now that `newcomer` is there. None: there is room."""
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
