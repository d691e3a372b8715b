"""Stored and open responses of all gateways: what is not found here is asked for at the others, and kept here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from tripool.errors import InvalidRequest
from tripool.gateway.peers import Peers
from tripool.gateway.responses.store import ItemUnknown, PreviousUnknown, ResponseStore, Stored

T = TypeVar("T")
MAX_LOOKS = 8
"""For one request: each brings a response with those before it, as far as one gateway has them."""
_MAX_CHAIN = 1000


class SharedResponses:
    def __init__(self, store: ResponseStore, peers: Peers) -> None:
        self.store, self._peers = store, peers
        peers.answer("stored response", self._stored)
        peers.answer("stored item", self._item)
        peers.answer("delete response", self._delete)
        peers.answer("open response", self._open)
        peers.answer("cancel response", self._cancel)

    async def find(self, tenant: str, response_id: str) -> Stored | None:
        found = self.store.find(tenant, response_id)
        if found is None and self.store.is_on:
            self._keep(tenant, await self._peers.find("stored response", [tenant, response_id]))
            found = self.store.find(tenant, response_id)
        return found

    async def reading(self, tenant: str, read: Callable[[], Awaitable[T]]) -> T:
        """`read` a request, again once what it refers to and is not here was found elsewhere."""
        for _ in range(MAX_LOOKS):
            try:
                return await read()
            except (PreviousUnknown, ItemUnknown) as missing:
                if not await self._fetched(tenant, missing):
                    raise
        return await read()

    async def _fetched(self, tenant: str, missing: InvalidRequest) -> bool:
        if isinstance(missing, PreviousUnknown):
            return self._keep(tenant, await self._peers.find("stored response", [tenant, missing.response_id]))
        if isinstance(missing, ItemUnknown):
            found = await self._peers.find("stored item", [tenant, missing.item_id])
            if isinstance(found, str) and self.store.recent is not None:
                self.store.recent.keep(tenant, [(missing.item_id, found.encode())])
                return True
            return self._keep(tenant, found)
        return False

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Wherever it is."""
        here = self.store.delete(tenant, response_id)
        elsewhere = await self._peers.ask("delete response", [tenant, response_id]) if self.store.is_on else []
        return here or any(elsewhere)

    async def open_response(self, tenant: str, response_id: str, *, cancel: bool = False) -> bytes | None:
        """A response that is being generated, as far as it is; cancelled if asked to."""
        here = self.store.open_response(tenant, response_id)
        if here is not None:
            if cancel:
                here.cancel()
            return here.snapshot("cancelled" if cancel else "in_progress")
        what = "cancel response" if cancel else "open response"
        found: str | None = await self._peers.find(what, [tenant, response_id])
        return None if found is None else found.encode()

    # ---- for the others ---------------------------------------------------------------------------------------------

    async def _stored(self, about: list[str]) -> dict[str, Any] | None:
        """With those before it."""
        tenant, wanted = about
        found: dict[str, Any] = {}
        name: str | None = wanted
        while name is not None and len(found) < _MAX_CHAIN:
            stored = self.store.find(tenant, name)
            if stored is None:
                break
            found[name] = stored
            name = stored.previous
        return found or None

    async def _item(self, about: list[str]) -> dict[str, Any] | str | None:
        tenant, item_id = about
        response_id = self.store.response_of(tenant, item_id)
        if response_id is not None:
            return await self._stored([tenant, response_id])
        item = self.store.item(tenant, item_id)
        return None if item is None else msgspec.json.encode(item).decode()

    async def _delete(self, about: list[str]) -> bool:
        return self.store.delete(*about)

    async def _open(self, about: list[str]) -> str | None:
        found = self.store.open_response(*about)
        return None if found is None else found.snapshot("in_progress").decode()

    async def _cancel(self, about: list[str]) -> str | None:
        found = self.store.open_response(*about)
        if found is None:
            return None
        found.cancel()
        return found.snapshot("cancelled").decode()

    def _keep(self, tenant: str, found: Any) -> bool:
        """The oldest first, so that it is not the first to go."""
        if not isinstance(found, dict):
            return False
        for name, stored in reversed(found.items()):
            self.store.keep(tenant, name, msgspec.convert(stored, Stored))
        return True
