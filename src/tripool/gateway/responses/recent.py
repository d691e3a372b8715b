"""The model's own output items of the last hour, in memory and bounded: what `item_reference` reads on a server that
stores no responses.

Some clients (Vercel's AI SDK) refer to earlier answers by id unless their options forbid it. Nothing that a client sent
is kept, nothing of a request with `store: false`, and an item is found by its tenant alone. Items go oldest first: when
they are an hour old, and when there are too many bytes, from the tenant with most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tripool.gateway.responses.items import Item

MAX_BYTES = 16 * 2**20
MAX_AGE_S = 3600.0
_SWEEPS = 60
"""How often old ones are freed within that age."""
_EACH_BYTES = 512
"""What an item takes beside its text."""


class RecentItems:
    """For one event loop, but read from other threads: each read is one look into a dictionary. Items that are too old
    are not found, and are freed when a later one comes."""

    def __init__(self, clock: Callable[[], float], *, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S) -> None:
        self._clock, self._max_bytes, self._max_age_s = clock, max_bytes, max_age_s
        self._items: dict[str, OrderedDict[str, tuple[float, bytes]]] = {}
        """By tenant and id: when it was kept, and the item as JSON; the oldest first."""
        self._num_bytes: Counter[str] = Counter()
        self._swept_s = clock()

    def check_invariants(self) -> None:
        kept = {tenant: sum(map(_size, own.values())) for tenant, own in self._items.items()}
        assert all(kept.values()) and +self._num_bytes == Counter(kept), "bytes are not those of the items"
        assert self._num_bytes.total() <= self._max_bytes

    def keep(self, tenant: str, items: Iterable[tuple[str, bytes]]) -> None:
        now_s = self._clock()
        if now_s - self._swept_s > self._max_age_s / _SWEEPS:
            self._sweep(now_s)
        for item_id, item in items:
            found = (now_s, item)
            if _size(found) > self._max_bytes:
                continue
            self._items.setdefault(tenant, OrderedDict())[item_id] = found
            self._num_bytes[tenant] += _size(found)
            while self._num_bytes.total() > self._max_bytes:
                self._drop_oldest(max(self._num_bytes, key=lambda name: self._num_bytes[name]))

    def find(self, tenant: str, item_id: str) -> Item | None:
        found = self._items.get(tenant, _NOTHING).get(item_id)
        if found is None or self._is_old(found, self._clock()):
            return None
        item: dict[str, Any] = msgspec.json.decode(found[1])
        return item

    def _sweep(self, now_s: float) -> None:
        self._swept_s = now_s
        for name in list(self._items):
            while name in self._items and self._is_old(next(iter(self._items[name].values())), now_s):
                self._drop_oldest(name)

    def _is_old(self, found: tuple[float, bytes], now_s: float) -> bool:
        return now_s - found[0] > self._max_age_s

    def _drop_oldest(self, tenant: str) -> None:
        own = self._items[tenant]
        self._num_bytes[tenant] -= _size(own.popitem(last=False)[1])
        if not own:
            del self._items[tenant], self._num_bytes[tenant]


_NOTHING: dict[str, tuple[float, bytes]] = {}


def _size(found: tuple[float, bytes]) -> int:
    return len(found[1]) + _EACH_BYTES
