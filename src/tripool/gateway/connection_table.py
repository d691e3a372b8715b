"""Which connections are open, and which of them has to go when there are too many. Pure: knows no socket and no clock.

Only a connection whose client we wait for can be ended in favour of another: one that has never sent a complete head
first, then one that is idle or in the middle of a request; of either kind the one that we have waited for longest. Who
sends a request at once is therefore served while thousands hold half-open connections, also from the same address: all
users of a reverse proxy, or of this machine, share one, so a bound per address would shut out the wrong ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class ConnectionTable(Generic[C]):
    def __init__(self, max_open: int) -> None:
        assert max_open > 0
        self._max_open = max_open
        self._open: set[C] = set()
        # Insertion order is the order of time; a set has none.
        self._unknown: dict[C, None] = {}
        self._known: dict[C, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def waits(self, connection: C, *, known: bool) -> None:
        """From now on we wait for its client. `known`: it has sent a complete head before."""
        self._leave(connection)
        self._open.add(connection)
        (self._known if known else self._unknown)[connection] = None

    def works(self, connection: C) -> None:
        """Its client waits for us."""
        self._leave(connection)
        self._open.add(connection)

    def closed(self, connection: C) -> None:
        self._leave(connection)
        self._open.discard(connection)

    def superfluous(self) -> C | None:
        """Which one to end. None: there is room, or nobody may be ended."""
        if len(self._open) <= self._max_open:
            return None
        return next(iter(self._unknown or self._known), None)

    def _leave(self, connection: C) -> None:
        self._unknown.pop(connection, None)
        self._known.pop(connection, None)
