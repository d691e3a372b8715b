"""Loads and unloads the models behind one gateway, as `control/model_policy.py` decides.

Runs on the gateway's event loop; opening and closing a model takes seconds and happens in threads. A request for a
model that is not ready waits here, with a deadline. The caller provides the function that opens a model.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from tripool.control.model_policy import Load, ModelPolicy, Shortage
from tripool.core import Request, ServingStats, TokenEvent
from tripool.errors import EngineStopped, TripoolError
from tripool.gateway.backend import Backend, Facts
from tripool.token_stream import Watcher

T = TypeVar("T")

_LOG = logging.getLogger("tripool.models")

WAIT_S = 60.0
"""Longest wait of a request for its model."""
DRAIN_S = 60.0
"""How long an operator's unload waits for open answers before it returns."""


class ModelLoading(TripoolError, status=503, code="model_loading", retry_after_s=5):
    """Not ready within the time that a request may wait for it."""


class ModelUnloaded(TripoolError, status=503, code="model_unloaded"):
    """Unloaded by the operator."""


class NoRoom(TripoolError, status=503, code="no_room", retry_after_s=5):
    """The memory is used by other models that are serving requests."""


class ModelTooLarge(TripoolError, status=507, code="model_too_large"):
    """Larger than the whole memory budget."""


class LoadedModel(Protocol):
    """A model in memory."""

    @property
    def backend(self) -> Backend: ...

    @property
    def num_bytes(self) -> int:
        """Total memory use."""
        ...

    @property
    def from_memory(self) -> bool:
        """Whether its weights came from the weight cache."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Cancel open requests and free everything. Blocks: called outside the event loop."""
        ...


@dataclass(slots=True)
class _Held:
    loaded_model: LoadedModel
    load_s: float


class ModelManager:
    """A `ModelControl`. `open_model` opens a model by name, blocking, in any thread; waiting requests get errors."""

    def __init__(
        self,
        policy: ModelPolicy,
        open_model: Callable[[str], LoadedModel],
        *,
        wait_s: float = WAIT_S,
        drain_s: float = DRAIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._open_model, self._clock = policy, open_model, clock
        self._wait_s, self._drain_s = wait_s, drain_s
        self._held: dict[str, _Held] = {}
        self._errors: dict[str, TripoolError] = {}
        self._past: dict[str, ServingStats] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: set[asyncio.Future[None]] = set()
        self._ended = False

    # ---- ModelControl -----------------------------------------------------------------------------------------------

    def describe(self, name: str) -> dict[str, Any]:
        policy, held = self._policy, self._held.get(name)
        shown = {"away": "unloaded", "leaving": "unloading"}
        state: str = shown.get(policy[name].state, policy[name].state)
        if state == "unloaded" and policy[name].failed_s is not None:
            state = "failed"
        facts: dict[str, Any] = {"state": state, "bytes": policy[name].needs, "open": policy[name].open}
        if held is not None:
            facts |= {"load_s": round(held.load_s, 3), "from_model_cache": held.loaded_model.from_memory}
        if name in self._errors:
            facts["error"] = str(self._errors[name])
        return facts

    async def load(self, name: str) -> None:
        self._policy.want(name, self._clock(), by_operator=True)
        self._errors.pop(name, None)
        self._refuse_if_short(name)
        await self._until_ready(name)

    async def unload(self, name: str) -> None:
        self._policy.send_away(name)
        self._act()
        deadline_s = self._clock() + self._drain_s
        while self._policy[name].state != "away" and self._policy[name].sent_away:
            if not await self._change(deadline_s):
                return  # draining goes on; the state shows it

    def prefer(self, name: str) -> None:
        """Load it if no other model has to be unloaded for it."""
        if self._policy[name].state == "away" and self._policy.fits_beside(name):
            self._policy.want(name, self._clock())
            self._act()

    def check_fits(self, name: str) -> None:
        """Refuse a model that would not fit alone, before anything is loaded."""
        short = self._policy.shortage(name)
        if short is not None:
            raise _no_room(short)

    def know(self, name: str, num_bytes: int) -> None:
        """One more model, not loaded. `num_bytes`: an estimate."""
        self._policy.add(name, num_bytes)

    def add(self, name: str, loaded_model: LoadedModel, load_s: float) -> None:
        """Add a model opened before the event loop started. Call it before anything else."""
        policy = self._policy
        policy.want(name, self._clock(), by_operator=True)
        assert policy.decide() == [Load(name)]
        policy.loaded(name, loaded_model.num_bytes)
        self._held[name] = _Held(loaded_model, load_s)

    # ---- for requests -----------------------------------------------------------------------------------------------

    async def enter(self, name: str) -> Backend:
        """Waits until it is ready, within the deadline; it stays loaded until `leave`."""
        if self._policy[name].state != "ready":
            await self._until_ready(name, opens=True)
        else:
            self._policy.opened(name, self._clock())
        return self._held[name].loaded_model.backend

    def leave(self, name: str) -> None:
        self._policy.closed(name, self._clock())
        self._act()

    def current(self, name: str) -> Backend | None:
        held = self._held.get(name)
        return None if held is None else held.loaded_model.backend

    def past(self, name: str) -> ServingStats:
        """Counters of earlier loads."""
        return self._past.get(name, ServingStats())

    async def _until_ready(self, name: str, *, opens: bool = False) -> None:
        policy, deadline_s = self._policy, self._clock() + self._wait_s
        policy.wait(name, self._clock())
        try:
            while True:
                self._act()
                if policy[name].state == "ready":
                    if opens:
                        policy.opened(name, self._clock())
                    return
                self._refuse_if_hopeless(name)
                if not await self._change(deadline_s):
                    self._refuse_if_short(name)
                    raise ModelLoading(f"'{name}' is still being loaded", hint="try again in a while")
        finally:
            policy.waited(name)

    def _refuse_if_hopeless(self, name: str) -> None:
        policy = self._policy
        if self._ended:
            raise EngineStopped("the server is shutting down")
        if policy[name].sent_away:
            raise ModelUnloaded(f"'{name}' was unloaded", hint=f"load it with `tripool models load {name}`")
        if policy[name].failed_s is not None:
            raise self._errors[name]
        short = policy.shortage(name)
        if short is not None and short.for_ever:
            raise _no_room(short)

    def _refuse_if_short(self, name: str) -> None:
        short = self._policy.shortage(name)
        if short is not None:
            self._policy.unwant(name)
            raise _no_room(short)

    # ---- executing decisions ----------------------------------------------------------------------------------------

    def _act(self) -> None:
        if self._ended:
            return
        for decision in self._policy.decide():
            work = self._load(decision.name) if isinstance(decision, Load) else self._unload(decision.name)
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _load(self, name: str) -> None:
        began_s = self._clock()
        failure: TripoolError | None = EngineStopped(f"'{name}' failed to load", hint="see the server's log")
        try:
            loaded_model = await in_thread(lambda: self._open_model(name))
            self._held[name] = _Held(loaded_model, self._clock() - began_s)
            failure = None
        except TripoolError as error:
            failure = error
        except (OSError, RuntimeError, MemoryError) as error:  # disk, torch, memory
            failure = EngineStopped(f"'{name}' failed to load: {error}")
        finally:  # an unexpected exception is logged; waiting requests get an error either way
            if failure is None:
                self._errors.pop(name, None)
                self._policy.loaded(name, self._held[name].loaded_model.num_bytes)
                _LOG.info("model loaded", extra={"model": name} | self.describe(name))
            else:
                _LOG.warning("model not loaded", extra={"model": name, "error": failure.code, "reason": str(failure)})
                self._errors[name] = failure
                self._policy.failed(name, self._clock())
            self._act()
            self._notify()

    async def _unload(self, name: str) -> None:
        loaded_model: LoadedModel | None = self._held.pop(name).loaded_model
        assert loaded_model is not None
        while not await in_thread(partial(loaded_model.close, self._drain_s)):
            pass  # a hanging step holds its memory: it is not unloaded yet
        self._past[name] = _counted(ServingStats(), self.past(name), loaded_model.backend.stats())
        loaded_model = None  # drops the last reference
        self._policy.left(name)
        _LOG.info("model unloaded", extra={"model": name})
        self._act()
        self._notify()

    def _notify(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)
        self._changed.clear()

    async def _change(self, deadline_s: float) -> bool:
        """Wait for a state change; False after the deadline."""
        future = asyncio.get_running_loop().create_future()
        self._changed.add(future)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock())):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            self._changed.discard(future)

    def end(self) -> None:
        """Open answers end with an error, waiting requests are refused. Must not block."""
        self._ended = True
        for held in self._held.values():
            held.loaded_model.close(0)
        self._notify()

    def close(self, timeout_s: float) -> None:
        """After the event loop has ended."""
        self._ended = True
        for held in self._held.values():
            held.loaded_model.close(timeout_s)
        self._held.clear()


def _no_room(short: Shortage) -> TripoolError:
    needs, budget = _gb(short.needs), _gb(short.budget)
    if short.for_ever:
        hint = "raise --memory-gb, or lower --kv-gb"
        return ModelTooLarge(f"'{short.name}' needs {needs}, all models together may take {budget}", hint=hint)
    message = f"'{short.name}' needs {needs}; of {budget}, models in use hold {_gb(short.in_use)}"
    hint = "try again when they are idle, unload one, or raise --memory-gb"
    return NoRoom(f"{message}: {_gb(short.missing)} are missing", hint=hint)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GB"


async def in_thread(work: Callable[[], T]) -> T:
    """In a daemon thread: loading may take minutes, and must not delay an exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def done(result: T | None, error: BaseException | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 (not swallowed: raised again where it is awaited)
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done, result, error)

    threading.Thread(target=run, name="tripool-models", daemon=True).start()
    return await future


class ManagedBackend:
    """One model as a Backend. Its counters continue over reloads."""

    def __init__(self, manager: ModelManager, name: str, context_tokens: int) -> None:
        self._manager, self._name = manager, name
        self._context_tokens = context_tokens

    @property
    def alive(self) -> bool:
        """An unloaded model is not dead."""
        backend = self._manager.current(self._name)
        return backend is None or backend.alive

    @property
    def context_tokens(self) -> int:
        backend = self._manager.current(self._name)
        return self._context_tokens if backend is None else backend.context_tokens

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        backend = await self._manager.enter(self._name)
        try:
            async with aclosing(backend.stream(*requests, watcher=watcher)) as events:
                async for event in events:
                    yield event
        finally:
            self._manager.leave(self._name)

    def cancel(self, request_id: str) -> None:
        backend = self._manager.current(self._name)
        if backend is not None:
            backend.cancel(request_id)

    def stats(self) -> ServingStats:
        backend = self._manager.current(self._name)
        now = ServingStats() if backend is None else backend.stats()
        return _counted(now, now, self._manager.past(self._name))

    def explain(self, request_id: str) -> Facts:
        backend = self._manager.current(self._name)
        facts: Mapping[str, Any] = {} if backend is None else backend.explain(request_id)
        return {**facts, "model": self._name}


def _counted(now: ServingStats, *several: ServingStats) -> ServingStats:
    """`now`, with the summed counters of several."""
    counters = ("num_steps", "num_preemptions", "num_drafted", "num_accepted")
    return replace(now, **{name: sum(getattr(stats, name) for stats in several) for name in counters})
