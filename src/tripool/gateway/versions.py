"""Versions of a registered model behind one name: follows the registry's pointer, and runs canaries.

Each version is a model to the rest of the gateway, named NAME@VERSION, with a tokenizer, engine, cache keys and
metrics of its own. Here is decided which of them a request for NAME means; `control/canary.py` decides on canaries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from tripool.control.canary import Canary, CanaryPlan
from tripool.errors import InvalidRequest, TripoolError
from tripool.gateway import json_types as of
from tripool.gateway.body import body_docs, decode_json
from tripool.gateway.model_manager import ModelLoading, in_thread
from tripool.gateway.options import Fields

if TYPE_CHECKING:
    from tripool.gateway.bodies import Bodies
    from tripool.gateway.models import ModelControl, Models, Served
    from tripool.gateway.record import Record

_LOG = logging.getLogger("tripool.models")
_LOOK_S = 0.5
"""Between two looks at the pointer, and at a canary's time."""
_LOAD_S = 1800.0
_RETRY_S = 60.0
"""Before a published version that could not be loaded is tried again: there may be room by then."""
_MOST_RESPONSES = 10_000
_START_BYTES = 512
"""Of a prompt without messages: its continuations begin with the same ones."""

CANARY = Fields(
    known={
        "version": of.INTEGER,
        "id": of.TEXT,
        "content": of.TEXT,
        **{one.name: of.INTEGER if one.type == "int" else of.NUMBER for one in fields(CanaryPlan)},
    },
    required=("version",),
)


class NoVersions(TripoolError, status=404, code="no_versions"):
    """The model is not served from a registry by this server."""


class CanaryBusy(TripoolError, status=409, code="canary_busy"):
    """Another canary of this model is under way."""


class VersionSource(Protocol):
    """One name of a registry. Blocks; called outside the event loop, except `serve`."""

    def published(self) -> int | None: ...

    def publish(self, number: int) -> None: ...

    def content(self, number: int) -> str:
        """The content hash of a version; raises a typed error without it."""
        ...

    def describe(self, number: int) -> Any: ...

    def serve(self, description: Any) -> Served:
        """Makes it known to the model control, not loaded."""
        ...


class _Start(msgspec.Struct):
    """What tells a conversation from others, as little as possible of a body that is parsed later."""

    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


class _Turn(msgspec.Struct):
    role: str = ""


def conversation_of(raw: bytes, tenant: str) -> tuple[bytes, str | None]:
    """The same for every turn of a conversation, and the response that this turn goes on from.

    A turn repeats those before it, so the messages up to the first of a user name the conversation. A client's own key
    for it comes first.
    """
    said = tenant.encode() + b"\0"
    try:
        start = msgspec.json.decode(raw, type=_Start)
    except (msgspec.DecodeError, RecursionError):
        return said, None  # the parser refuses it
    own = start.prompt_cache_key or start.session_id
    if own:
        return said + own.encode(), start.previous_response_id
    turns = bytes(start.messages) or bytes(start.input)
    try:
        for turn in msgspec.json.decode(turns or b"[]", type=list[msgspec.Raw]):
            said += bytes(turn)
            if msgspec.json.decode(turn, type=_Turn).role == "user":
                break
        return said + bytes(start.prompt)[:_START_BYTES], start.previous_response_id
    except (msgspec.DecodeError, RecursionError):
        return said + turns[:_START_BYTES], start.previous_response_id


class VersionedModel:
    """Used from the event loop, except `pick`."""

    def __init__(
        self, name: str, current: Served, number: int, source: VersionSource, control: ModelControl,
        *, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name, self.current = name, current
        self.known: dict[int, Served] = {number: current}
        """Every version that was served since the start, by its number."""
        self._source, self._control, self._clock = source, control, clock
        self._canary: Canary | None = None
        self._candidate: Served | None = None
        self._number = number
        """Of `current`."""
        self._failed: tuple[int, float] | None = None
        """A published version that could not be loaded, and when it is tried again."""
        self._look_s = 0.0
        """When the pointer is looked at next."""
        self._state: dict[str, Any] = {"state": "none"}
        self._sides: dict[str, Served] = {}
        """By response, while a canary runs: what goes on from it stays on its side."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended_one = asyncio.Event()

    # ---- for requests -----------------------------------------------------------------------------------------------

    def pick(self, raw: bytes, tenant: str) -> Served:
        """From any thread."""
        canary, candidate, current = self._canary, self._candidate, self.current
        if canary is None or candidate is None:
            return current
        conversation, previous = conversation_of(raw, tenant)
        if previous is not None and previous in self._sides:
            return self._sides[previous]
        return candidate if canary.takes(conversation) else current

    def refused(self, served: Served) -> None:
        """A request that this version's tokenizer, template or limits refuse."""
        if self._canary is not None and served in (self.current, self._candidate):
            self._canary.ended(is_new=served is self._candidate, failed=True)
            self._ended_one.set()

    def begun(self, served: Served, answer_id: str) -> None:
        """Before its client can have the id, and go on from it."""
        if self._canary is not None:
            self._sides[answer_id] = served
            if len(self._sides) > _MOST_RESPONSES:
                del self._sides[next(iter(self._sides))]

    def ended(self, served: Served, record: Record) -> None:
        canary = self._canary
        if canary is None or served not in (self.current, self._candidate) or record.state == "cancelled":
            return
        timing = record.timing() if record.has_tokens and not record.background else {}
        canary.ended(
            is_new=served is self._candidate, failed=record.state == "failed",
            ttft_ms=timing.get("first_token"), tpot_ms=timing.get("per_token") or None,
        )  # fmt: skip
        self._ended_one.set()

    # ---- for operators ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        shown = {"model": self.name, "serves": self.current.name, **self._state}
        if self._canary is not None:
            shown |= self._canary.shown()
            new = self._canary.new
            shown["summary"] = f"{new.ended} of {self._canary.plan.requests} requests, {new.errors} failed"
        return shown

    async def start(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns at once: loading may take minutes. Idempotent by `id`."""
        number = body["version"]
        plan = CanaryPlan(**{one.name: body[one.name] for one in fields(CanaryPlan) if one.name in body})
        content = await in_thread(lambda: self._source.content(number))
        if "id" in body and body["id"] == self._state.get("id"):
            return self.state()
        if self._state["state"] in ("loading", "running"):
            hint = f"wait for it, or end it: DELETE /v1/canary/{self.name}"
            raise CanaryBusy(f"a canary of {self.name}@{self._state['version']} is under way", hint=hint)
        if body.get("content", content) != content:
            hint = "is this server's registry the one in which it was registered?"
            raise InvalidRequest(f"{self.name}@{number} has other contents here", hint=hint, param="content")
        if number == self._number:
            raise InvalidRequest(f"{self.name}@{number} is served already", hint="name another", param="version")
        self._state = {"state": "loading", "version": number} | ({"id": body["id"]} if "id" in body else {})
        self._spawn(self._begin(number, plan))
        return self.state()

    async def stop(self, reason: str = "ended by an operator") -> dict[str, Any]:
        if self._state["state"] in ("loading", "running"):
            self._roll_back(reason)
        return self.state()

    async def _begin(self, number: int, plan: CanaryPlan) -> None:
        begun, failure, served = self._state, "see the server's log", None
        try:
            served = await self._loaded(number)
        except TripoolError as error:
            failure = str(error)
        finally:  # an unexpected exception is logged, and no canary stays in loading
            if served is None and self._state is begun:
                self._roll_back(f"it cannot be loaded: {failure}")
        if served is None:
            return
        if self._state is begun:  # not ended meanwhile
            self._candidate, self._canary = served, Canary(plan, served.name, self._clock())
            self._state = begun | {"state": "running"}
            _LOG.info("canary begun", extra={"model": served.name, "share": plan.share})
        else:
            self._unload(served)

    async def _loaded(self, number: int) -> Served:
        if number not in self.known:
            description = await in_thread(lambda: self._source.describe(number))
            self.known[number] = self._source.serve(description)
        served, deadline_s = self.known[number], self._clock() + _LOAD_S
        while True:
            try:
                await self._control.load(served.name)
                return served
            except ModelLoading:
                if self._clock() > deadline_s:
                    raise

    # ---- what changes which version is served ----------------------------------------------------------------------

    async def keep(self) -> None:
        """As long as the server runs."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._ended_one.wait()
            self._ended_one.clear()
            with suppress(TripoolError, OSError):  # of the registry's folder: it is looked at again
                await self.look()

    async def look(self) -> None:
        verdict = None if self._canary is None else self._canary.verdict(self._clock())
        if verdict is not None:
            if verdict.publish:
                await self._publish(verdict.reason)
            else:
                self._roll_back(verdict.reason)
        now_s = self._clock()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            await self._follow(await in_thread(self._source.published))

    async def _follow(self, number: int | None) -> None:
        """Serve what the pointer shows: it was moved by a pipeline, or by `tripool models publish` or `rollback`."""
        if number is None or number == self._number:
            return
        if self._failed is not None and self._failed[0] == number and self._clock() < self._failed[1]:
            return
        if self._state["state"] in ("loading", "running"):
            self._roll_back(f"{self.name}@{number} was published meanwhile")
        try:
            served = await self._loaded(number)
        except TripoolError as error:
            self._failed = number, self._clock() + _RETRY_S
            _LOG.warning("published version not served", extra={"model": f"{self.name}@{number}", "reason": str(error)})
            return
        self._switch(number, served)

    def _switch(self, number: int, served: Served) -> None:
        before, self.current, self._number, self._failed = self.current, served, number, None
        _LOG.info("version switched", extra={"model": served.name, "before": before.name})
        self._unload(before)

    async def _publish(self, reason: str) -> None:
        number, candidate, final = self._state["version"], self._candidate, self._final()
        assert candidate is not None
        try:
            await in_thread(lambda: self._source.publish(number))
        except (TripoolError, OSError) as error:
            self._roll_back(f"it cannot be published: {error}")
            return
        self._switch(number, candidate)
        self._end(final | {"state": "published", "reason": reason})

    def _roll_back(self, reason: str) -> None:
        candidate = self._candidate
        self._end(self._final() | {"state": "rolled_back", "reason": reason})
        if candidate is not None:
            self._unload(candidate)

    def _final(self) -> dict[str, Any]:
        return self._state | ({} if self._canary is None else self._canary.shown())

    def _end(self, state: dict[str, Any]) -> None:
        self._canary = self._candidate = None
        self._sides.clear()
        self._state = state
        facts = {"model": f"{self.name}@{state['version']}", "outcome": state["state"], "reason": state["reason"]}
        _LOG.info("canary ended", extra=facts)

    def _unload(self, served: Served) -> None:
        self._spawn(self._control.unload(served.name))  # its open answers end first

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def canary_routes(models: Models, bodies: Bodies) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/canary/{name}", openapi_extra=body_docs(CANARY.schema()))
    async def start(name: str, http: HttpRequest) -> dict[str, Any]:
        """Send a share of a model's conversations to another version, and decide by itself when it is known enough."""
        body = CANARY.checked(decode_json(await bodies.read(http)))
        return await models.versioned(name).start(body)

    @routes.get("/v1/canary/{name}")
    async def state(name: str) -> dict[str, Any]:
        return models.versioned(name).state()

    @routes.delete("/v1/canary/{name}")
    async def stop(name: str) -> dict[str, Any]:
        """Roll it back now."""
        return await models.versioned(name).stop()

    return routes
