"""Requests with an `Idempotency-Key`: the key in the header, and who keeps their answers.

| server | kept by |
|---|---|
| of several processes | the coordinator (`RemoteKeeper`): gateways come and go |
| of one process | `LocalKeeper`, in `gateway/kept_streams.py` |
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

import msgspec

from tripool.core import Request, TokenEvent
from tripool.errors import InvalidRequest
from tripool.gateway.backend import Backend, Facts
from tripool.gateway.coordinator_link import CoordinatorLink
from tripool.gateway.remote_backend import RemoteBackend
from tripool.router.kept_types import Claim, Keyed
from tripool.tenants import Tenant
from tripool.token_stream import Watcher

HEADER, LAST_EVENT = "idempotency-key", "last-event-id"
MAX_CHARS = 255


def read_key(headers: Mapping[str, str]) -> str | None:
    """Raises InvalidRequest."""
    key = headers.get(HEADER)
    if key is not None and not (0 < len(key) <= MAX_CHARS and key.isascii() and key.isprintable()):
        hint = f"1 to {MAX_CHARS} printable ASCII characters"
        raise InvalidRequest("the idempotency key is of the wrong shape", hint=hint, param="Idempotency-Key")
    return key


class KeptBackend(Backend, Protocol):
    """The backend of one job."""

    def finished(self, request_id: str, lengths: Sequence[int]) -> None:
        """A stop string was found: its choices have so many tokens."""
        ...


class Keeper(Protocol):
    async def repeats(self, tenant: Tenant, name: str) -> bool:
        """Whether a request with this key comes again, and counts for no limit."""
        ...

    async def claim(self, keyed: Keyed, tenant: Tenant) -> Claim:
        """Raises KeyReused or AnswerNotKept."""
        ...

    def backend(self, backend: Backend, model: str, keyed: Keyed, tenant: Tenant) -> KeptBackend:
        """For one job of a model's `backend`."""
        ...


class RemoteKeeper:
    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link

    async def repeats(self, tenant: Tenant, name: str) -> bool:
        return msgspec.json.decode(await self._link.ask("repeats", tenant=tenant, name=name), type=bool)

    async def claim(self, keyed: Keyed, tenant: Tenant) -> Claim:
        return msgspec.json.decode(await self._link.ask("claim", tenant=tenant, keyed=keyed), type=Claim)

    def backend(self, backend: Backend, model: str, keyed: Keyed, tenant: Tenant) -> KeptBackend:
        assert isinstance(backend, RemoteBackend)
        return _RemoteJob(backend, keyed)


class _RemoteJob:
    def __init__(self, backend: RemoteBackend, keyed: Keyed) -> None:
        self._backend, self._keyed = backend, keyed
        self.alive, self.context_tokens, self.stats = backend.alive, backend.context_tokens, backend.stats

    def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        return self._backend.stream(*requests, watcher=watcher, keyed=self._keyed)

    def cancel(self, request_id: str) -> None:
        self._backend.cancel(request_id)

    def finished(self, request_id: str, lengths: Sequence[int]) -> None:
        self._backend.stopped(request_id, tuple(lengths))

    def explain(self, request_id: str) -> Facts:
        return self._backend.explain(request_id)
