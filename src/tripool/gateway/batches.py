"""`/v1/files` and `/v1/batches` as OpenAI's clients use them: uploads, and requests in files, run in idle capacity."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response

from tripool.batch import BatchRunner, BatchStore
from tripool.batch.runner import Reply
from tripool.batch.types import ENDPOINTS, Batch, NoSuchEndpoint, StorageFull, StoredFile, StoreFailed
from tripool.config import GatewayConfig
from tripool.errors import InvalidRequest, TripoolError
from tripool.gateway import json_types as of
from tripool.gateway.admission import AdmissionBackend
from tripool.gateway.auth import Access, caller_of
from tripool.gateway.bodies import Bodies
from tripool.gateway.body import body_docs, decode_json
from tripool.gateway.job import Api
from tripool.gateway.options import Fields
from tripool.gateway.refusals import dialect_of, error_shape
from tripool.gateway.remote_backend import RemoteBackend
from tripool.gateway.request_log import CALLER
from tripool.gateway.upload import receive_file
from tripool.tenants import ANONYMOUS, Caller

if TYPE_CHECKING:
    from tripool.gateway.admin import InFlight
    from tripool.gateway.models import Models

_LOG = logging.getLogger("tripool.batch")
T = TypeVar("T", StoredFile, Batch)
_APIS: dict[str, Api] = dict(zip(ENDPOINTS, ("chat", "completion", "responses", "messages"), strict=True))
_WINDOWS_S = {"24h": 86_400}
_MAX_METADATA, _MAX_NAME_CHARS, _MAX_VALUE_CHARS = 16, 64, 512
_SLOTS = 32
"""Lines under way where the backend does not say how much it computes at once."""
_AHEAD = 3.0
"""Lines under way, per slot: some are read or written while others are computed."""
_NO_ROOM = {
    "code": StorageFull.code,
    "message": "the batch waits for room for its answers: delete files that are no longer needed",
    "line": None,
    "param": None,
}
CREATE = Fields(
    {"input_file_id": of.TEXT, "endpoint": of.TEXT, "completion_window": of.TEXT, "metadata": of.OBJECT},
    required=("input_file_id", "endpoint"),
)

AnswerLine = Callable[[HttpRequest, Api, bytes, str], Coroutine[Any, Any, Response]]


class BatchesOff(TripoolError, status=404, code="batches_off"):
    """This server has no folder for files and batches."""


class SharedBatches(NamedTuple):
    """Where several gateways have one folder."""

    locked: int
    """The folder's lock, which their supervisor holds, as a file descriptor."""
    may_run: Callable[[], bool]
    """Whether it is this one that runs batches."""


class BatchService:
    """The files and batches of one server; nothing without a folder. Started and stopped with the server's loop.

    With several gateways each takes files and batches, and one of them runs them."""

    def __init__(
        self, config: GatewayConfig, answer: AnswerLine, models: Models, in_flight: InFlight, access: Access | None,
        shared: SharedBatches | None = None,
    ) -> None:  # fmt: skip
        self._answer, self._models, self._in_flight, self._access = answer, models, in_flight, access
        locked, self._may_run = shared or (None, lambda: True)
        self._store = BatchStore(Path(config.batch_dir), locked=locked) if config.batch_dir else None
        self._runner: BatchRunner | None = None

    @property
    def runner(self) -> BatchRunner:
        if self._runner is None:
            hint = "start it with --batch-dir FOLDER"
            raise BatchesOff("this server stores no files and batches", hint=hint)
        return self._runner

    def start(self) -> None:
        if self._store is not None:
            self._runner = BatchRunner(
                self._store, self._run, self._slots, may_start=self._may_start, may_run=self._may_run
            )
            self._runner.start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.stop()

    def _slots(self) -> int:
        admissions = [one.backend for one in self._models if isinstance(one.backend, (AdmissionBackend, RemoteBackend))]
        return int(_AHEAD * max((backend.slots or _SLOTS for backend in admissions), default=_SLOTS))

    def _may_start(self) -> bool:
        return not self._in_flight.draining and self._models.alive

    async def _run(self, batch: Batch, request_id: str, body: bytes) -> Reply:
        """One line, through the code that answers a request over HTTP."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()  # a batch has no client that could hang up
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": batch.endpoint, "headers": []}
        try:
            tenant = ANONYMOUS if self._access is None else self._access.tenant_named(batch.tenant)
            scope[CALLER] = Caller(tenant=tenant, key=batch.key)
            response = await self._answer(HttpRequest(scope), _APIS[batch.endpoint], body, request_id)
            await response(scope, receive, send)  # type: ignore[arg-type]
        except TripoolError as error:
            return _refused(batch, request_id, error)
        except Exception:  # noqa: BLE001 (logged; as over HTTP, a fault ends this request alone)
            _LOG.exception("line %s failed", request_id)
            return _refused(batch, request_id, TripoolError("internal server error; see the server's log"))
        raw = b"".join(message.get("body", b"") for message in sent)
        return Reply(int(sent[0]["status"]), request_id, raw)


def _refused(batch: Batch, request_id: str, error: TripoolError) -> Reply:
    shown = msgspec.json.encode(error_shape(error, dialect_of(batch.endpoint)))
    return Reply(error.status, request_id, shown, error.code)


def batch_routes(service: BatchService, bodies: Bodies) -> APIRouter:
    routes = APIRouter()
    _add_files(routes, service)
    _add_batches(routes, service, bodies)
    return routes


def _add_files(routes: APIRouter, service: BatchService) -> None:
    @routes.post("/v1/files")
    async def upload(http: HttpRequest) -> dict[str, Any]:
        """A file, as multipart/form-data with the fields `file` and `purpose`."""
        runner, tenant = service.runner, caller_of(http).tenant.name
        room = await runner.call(runner.store.room, tenant)
        path = runner.store.upload_path()
        try:
            fields, filename = await receive_file(http, path, max_bytes=room)
            purpose = fields.get("purpose")
            if purpose != "batch":
                hint = "this server takes files for batches only: 'batch'"
                raise InvalidRequest(f"the purpose is {str(purpose)[:50]!r}", hint=hint, param="purpose")
            expires_s = _expiry(fields, runner.now_s)
            add = runner.store.add_file
            file = await runner.call(add, tenant, purpose, filename, path, runner.now_s, expires_s)
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return file.shown()

    @routes.get("/v1/files")
    async def files(
        http: HttpRequest,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
    ) -> dict[str, Any]:
        runner, tenant = service.runner, caller_of(http).tenant.name
        found = await runner.call(runner.store.files, tenant, purpose=purpose, ascending=order == "asc")
        return _page(found, after, limit)

    @routes.get("/v1/files/{file_id}")
    async def file(file_id: str, http: HttpRequest) -> dict[str, Any]:
        runner = service.runner
        return (await runner.call(runner.store.file, caller_of(http).tenant.name, file_id)).shown()

    @routes.get("/v1/files/{file_id}/content")
    async def content(file_id: str, http: HttpRequest) -> Response:
        runner = service.runner
        found = await runner.call(runner.store.file, caller_of(http).tenant.name, file_id)
        path = runner.store.path(found.id)
        if not path.exists():
            raise StoreFailed(f"'{file_id}' was removed from the server's folder", hint="upload it again")
        return FileResponse(path, media_type="application/octet-stream")

    @routes.delete("/v1/files/{file_id}")
    async def delete(file_id: str, http: HttpRequest) -> dict[str, Any]:
        runner = service.runner
        await runner.call(runner.store.delete_file, caller_of(http).tenant.name, file_id)
        return {"id": file_id, "object": "file", "deleted": True}


def _add_batches(routes: APIRouter, service: BatchService, bodies: Bodies) -> None:
    @routes.post("/v1/batches", openapi_extra=body_docs(CREATE.schema()))
    async def create(http: HttpRequest) -> dict[str, Any]:
        """Run the requests of a file in the background, within a day."""
        runner, caller = service.runner, caller_of(http)
        fields = CREATE.checked(decode_json(await bodies.read(http)))
        endpoint, window = fields["endpoint"], fields.get("completion_window", "24h")
        if endpoint not in ENDPOINTS:
            hint = f"one of {', '.join(ENDPOINTS)}"
            raise NoSuchEndpoint(f"'{endpoint[:100]}' has no batches", hint=hint, param="endpoint")
        if window not in _WINDOWS_S:
            raise InvalidRequest(f"'{window[:50]}' is no window", hint="24h", param="completion_window")
        batch = await runner.call(
            runner.store.add_batch, caller.tenant.name, caller.key, endpoint, fields["input_file_id"],
            window=window, window_s=_WINDOWS_S[window], metadata=_metadata(fields), now_s=runner.now_s,
        )  # fmt: skip
        runner.wake()
        return batch.shown()

    @routes.get("/v1/batches")
    async def batches(
        http: HttpRequest, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> dict[str, Any]:
        runner = service.runner
        return _page(await runner.call(runner.store.batches, caller_of(http).tenant.name), after, limit)

    @routes.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str, http: HttpRequest) -> dict[str, Any]:
        runner, tenant = service.runner, caller_of(http).tenant.name
        found = await runner.call(runner.store.batch, tenant, batch_id)
        waits = found.status == "in_progress" and await runner.call(runner.store.room, tenant) <= 0
        return (replace(found, errors=[_NO_ROOM]) if waits else found).shown()

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, http: HttpRequest) -> Response:
        """Answers that it has by then are in its output file."""
        runner = service.runner
        found = await runner.call(runner.store.cancel, caller_of(http).tenant.name, batch_id, runner.now_s)
        runner.wake()
        return JSONResponse(found.shown())


def _metadata(fields: dict[str, Any]) -> dict[str, str] | None:
    given: dict[str, Any] | None = fields.get("metadata")
    if given is None:
        return None
    texts = all(isinstance(value, str) and len(value) <= _MAX_VALUE_CHARS for value in given.values())
    if len(given) > _MAX_METADATA or not texts or any(len(name) > _MAX_NAME_CHARS for name in given):
        hint = f"at most {_MAX_METADATA} texts of {_MAX_VALUE_CHARS} characters, with names of {_MAX_NAME_CHARS}"
        raise InvalidRequest("'metadata' is too large, or holds more than texts", hint=hint, param="metadata")
    return given


def _expiry(fields: dict[str, str], now_s: int) -> int | None:
    given = fields.get("expires_after[seconds]")
    if given is None:
        return None
    if not (given.isdecimal() and len(given) < 9 and 3600 <= int(given) <= 2_592_000):
        raise InvalidRequest("'expires_after' is out of range", hint="3600 to 2592000 seconds", param="expires_after")
    return now_s + int(given)


def _page(found: Sequence[T], after: str | None, limit: int) -> dict[str, Any]:
    ids = [one.id for one in found]
    start = ids.index(after) + 1 if after in ids else 0
    page = [one.shown() for one in found[start : start + limit]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": start + limit < len(found)}
