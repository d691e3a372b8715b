"""Authentication: finds the caller of a request by its API key, before anything else of the request is read.

| path | access |
|---|---|
| `/health`, `/ping`, `/health/ready`, `/version` | public |
| generation, token counts, the list of models; one's own requests, responses, files and batches | every key |
| all else: metrics, load, drain, pools, cache, loading models | keys made with `--admin` |

A path that is not listed is the operator's: a new route is closed until it is added here. A server started without keys
is open until its key store has one; until then every caller is its operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from tripool.core import Usage
from tripool.errors import TripoolError
from tripool.gateway.grpc import GENERATE, REFLECT
from tripool.gateway.parse import header_id
from tripool.gateway.record import Record
from tripool.gateway.request_log import CALLER as _CALLER
from tripool.gateway.request_log import refuse
from tripool.router.kept_types import Count
from tripool.tenants import ANONYMOUS, OPEN_CALLER, Caller, KeyTable, Tenant

OPEN_PATHS = frozenset({"/health", "/ping", "/health/ready", "/version"})
_FOR_TENANTS = frozenset({"/tokenize", "/detokenize", "/tokenizer_info", "/api/chat", "/api/generate", "/api/show"}) | {
    f"/v1/{path}" for path in ("chat/completions", "completions", "messages", "messages/count_tokens", "responses")
}
_FOR_TENANTS |= {GENERATE, REFLECT}
_ASK = "ask the operator for another"
_PUBLIC = Caller(tenant=ANONYMOUS)
"""The caller of public paths."""


class KeyRefused(TripoolError, status=401, code="invalid_api_key"):
    """The key is missing or not valid."""


class NotOperator(TripoolError, status=403, code="admin_key_needed"):
    """The key is valid but not an operator's."""


class Keys(Protocol):
    """A `KeyWatcher` is one, and so are the keys of another host's store."""

    is_open: bool

    def key_table(self) -> KeyTable: ...

    def close(self) -> None: ...


class Log(Protocol):
    """A `UsageLog` is one."""

    def add(self, caller: Caller, model: str, usages: Sequence[Usage]) -> None: ...

    def count(self, count: Count, done: Callable[[], object]) -> None: ...

    def close(self) -> None: ...


class Access:
    """Access control of one server: its current keys and its usage log. Used from the event loop."""

    def __init__(self, key_watcher: Keys, usage_log: Log, *, clock: Callable[[], float] = time.time) -> None:
        self._key_watcher, self._usage_log, self._clock = key_watcher, usage_log, clock

    @property
    def key_table(self) -> KeyTable:
        return self._key_watcher.key_table()

    @property
    def is_open(self) -> bool:
        """Whether no key is required. Raises KeyStoreError as `caller` does."""
        self._key_watcher.key_table()
        return self._key_watcher.is_open

    @property
    def keys(self) -> str:
        """For the log."""
        return "none" if self.is_open else "needed"

    def tenant_named(self, name: str) -> Tenant:
        """An authenticated tenant with its current limits. Raises KeyRefused if it was removed since."""
        if name == ANONYMOUS.name:
            return ANONYMOUS
        tenant = self.key_table.tenants.get(name)
        if tenant is None:
            raise KeyRefused("this API key's tenant no longer exists", hint=_ASK)
        return tenant

    def caller(self, scope: Scope) -> Caller:
        """Raises KeyRefused, or KeyStoreError when the key store has been unreadable for too long."""
        key_table = self._key_watcher.key_table()
        if self._key_watcher.is_open:
            return OPEN_CALLER
        presented = _presented(scope)
        if presented is None:
            hint = "send 'Authorization: Bearer tp-...' or 'x-api-key: tp-...'; `tripool keys add NAME` makes a key"
            raise KeyRefused("this server requires an API key", hint=hint)
        caller = key_table.find(presented, self._clock())
        if caller is None:
            raise KeyRefused("this API key is unknown, revoked or expired", hint=_ASK)
        return caller

    def ended(self, record: Record, caller: Caller, model: str) -> None:
        """Log the usage of an ended request. One that failed before its first token is free.

        One that was cancelled before its first token is charged its prompt: how much was computed is unknown here.
        """
        if caller.key and (record.has_tokens or record.state == "cancelled") and not record.keyed:
            usages: list[Usage] = list(record.usages)
            self._usage_log.add(caller, model, usages)

    def counted(self, count: Count, done: Callable[[], object]) -> None:
        """Log the usage of an answer that is kept; `done` is called, from any thread, when it is on disk."""
        if count.caller:
            self._usage_log.count(count, done)
        else:
            done()

    def close(self) -> None:
        self._key_watcher.close()
        self._usage_log.close()


class Guard:
    """Middleware in front of every route. Refuses in the caller's dialect; `on_refused` is called with the code."""

    def __init__(self, app: ASGIApp, access: Access, on_refused: Callable[[str], object]) -> None:
        self._app, self._access, self._on_refused = app, access, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            scope[_CALLER] = _PUBLIC
        elif scope["type"] == "http":
            try:
                scope[_CALLER] = caller = self._access.caller(scope)
                if not caller.admin and not _for_tenants(scope["method"], scope["path"]):
                    hint = "if it exists at all: make one with `tripool keys add NAME --admin`"
                    raise NotOperator(f"{scope['method']} {scope['path'][:200]} needs an admin key", hint=hint)
            except TripoolError as error:
                headers, unauthenticated = _refusal_headers(scope, error), _CALLER not in scope
                await refuse(
                    scope, receive, send, error, self._on_refused, headers=headers, unauthenticated=unauthenticated
                )
                return
        await self._app(scope, receive, send)


def caller_of(http: HttpRequest) -> Caller:
    """The authenticated caller; the operator where the application has no guard."""
    caller: Caller = http.scope.get(_CALLER, OPEN_CALLER)
    return caller


def needed_no_key(scope: Scope, *, guarded: bool) -> bool:
    """Whether the caller is the operator without a key. Public paths do not count."""
    caller: Caller | None = scope.get(_CALLER, None if guarded else OPEN_CALLER)
    return caller == OPEN_CALLER


def _presented(scope: Scope) -> str | None:
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of duplicates wins
    kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    key = bearer.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
    return key.decode("latin-1") or None


def _for_tenants(method: str, path: str) -> bool:
    if path in _FOR_TENANTS:
        return True
    if path.startswith(("/v1/responses/", "/v1/files", "/v1/batches")):  # those of other tenants are unknown there
        return True
    looks = method in ("GET", "HEAD")
    about_models = path in ("/v1/models", "/api/tags", "/api/ps", "/api/version") or path.startswith("/v1/models/")
    return looks and (about_models or (path.startswith("/v1/requests/") and path.endswith("/explain")))


def _refusal_headers(scope: Scope, error: TripoolError) -> dict[str, str]:
    asked = header_id(HttpRequest(scope).headers.get("x-request-id"))
    named = {} if asked is None else {"x-request-id": asked}
    return named | ({"www-authenticate": "Bearer"} if error.status == 401 else {})
