"""API keys and usage of a gateway on another host than the key store: it gets the one from a gateway that has the
store, and sends it the other.

Keys come as the store has them, hashed, once a second; when none has come for a while, every request is refused, as
with a store that cannot be read. Usage waits here until a gateway has it on disk, and is counted once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from tripool.core import Usage
from tripool.gateway.auth import Access
from tripool.gateway.peers import Peers
from tripool.router.kept_types import Count
from tripool.router.questions import ANSWER_S
from tripool.tenants import Caller, KeyTable, Tenant
from tripool.tenants.key_store import KeyStoreError
from tripool.tenants.key_table import Key
from tripool.tenants.key_watcher import STALE_S

_LOG = logging.getLogger("tripool.tenants")
_ROUND_S = 1.0
_AT_ONCE, _MAX_WAITING = 256, 100_000


@dataclass(frozen=True, slots=True)
class _Keys:
    is_open: bool
    pepper: bytes
    tenants: tuple[Tenant, ...]
    keys: tuple[Key, ...]


def offer_keys(peers: Peers, access: Access, may_log: Callable[[], bool]) -> None:
    """For gateways of other hosts. `may_log`: one gateway logs what they have used."""

    async def keys(_: object) -> _Keys:
        table = access.key_table
        return _Keys(access.is_open, table.pepper, tuple(table.tenants.values()), table.keys)

    async def log(counts: list[Any]) -> bool | None:
        if not may_log():
            return None
        loop, written = asyncio.get_running_loop(), asyncio.Event()
        left = len(counts)

        def done() -> None:
            nonlocal left
            left -= 1
            if not left:
                loop.call_soon_threadsafe(written.set)

        for one in counts:
            access.counted(msgspec.convert(one, Count), done)
        async with asyncio.timeout(ANSWER_S):
            await written.wait()
        return True

    peers.answer("keys", keys)
    peers.answer("usage", log)


class RemoteKeys:
    """As `KeyWatcher`. Run `keep` on the event loop."""

    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        self._peers, self._clock = peers, clock
        self.is_open = False
        self._table: KeyTable | None = None
        self._said: object = None
        self._heard_s = float("-inf")

    def key_table(self) -> KeyTable:
        """Raises KeyStoreError."""
        if self._table is None or self._clock() - self._heard_s >= STALE_S:
            raise KeyStoreError("the server's key store is out of reach", hint="is the server there? see the log")
        return self._table

    async def keep(self) -> None:
        while True:
            found = await self._peers.find("keys", None)
            if found is not None:
                self._heard_s = self._clock()
                if found != self._said:
                    self._said = found
                    self._take(msgspec.convert(found, _Keys))
            await asyncio.sleep(_ROUND_S)

    def _take(self, keys: _Keys) -> None:
        if self._table is None or self.is_open != keys.is_open:
            _LOG.info("keys found", extra={"keys": "none" if keys.is_open else "needed"})
        self.is_open = keys.is_open
        self._table = KeyTable(keys.tenants, keys.keys, pepper=keys.pepper)

    def close(self) -> None:
        """Nothing is held."""


class RemoteUsage:
    """As `UsageLog`. Run `keep` on the event loop."""

    def __init__(self, peers: Peers, gateway: str) -> None:
        """`gateway`: a name that no other gateway ever has."""
        self._peers, self._gateway, self._numbers = peers, gateway, count()
        self._waiting: deque[tuple[Count, Callable[[], object]]] = deque(maxlen=_MAX_WAITING)

    def add(self, caller: Caller, model: str, usages: Sequence[Usage]) -> None:
        count_id = f"{self._gateway}.{next(self._numbers)}"
        used = Count(count_id, caller.tenant.name, caller.key, model, tuple(usages), begins=True)
        self._waiting.append((used, lambda: None))

    def count(self, count: Count, done: Callable[[], object]) -> None:
        self._waiting.append((count, done))

    async def keep(self) -> None:
        while True:
            some = [self._waiting[i] for i in range(min(_AT_ONCE, len(self._waiting)))]
            if some and any(await self._peers.ask("usage", [used for used, _ in some])):
                for _, done in some:
                    self._waiting.popleft()
                    done()
            else:
                await asyncio.sleep(_ROUND_S / 2)

    def close(self) -> None:
        if self._waiting:
            _LOG.warning("usage was not logged", extra={"requests": len(self._waiting)})
