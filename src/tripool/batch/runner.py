"""Runs batches: keeps lines of all open batches under way, writes their answers, and ends batches that are answered.

Tenants take turns line by line; of one tenant the oldest batch goes first. What runs at once is bounded by `slots`; the
engine runs it in idle steps only (`engine/background.py`). Nothing here is needed after a restart but the store: a line
without a stored answer is run, a batch in any open state goes on from there.

A line that was refused for a passing reason rests and is tried again. It holds no slot meanwhile, and a batch with many
such lines begins no others, so that one model without workers does not keep those of other tenants waiting.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from tripool.batch.read import read_bodies, read_lines
from tripool.batch.store import BatchStore
from tripool.batch.types import FIRST_REST_S, MAX_REST_S, MAX_TRIES, Answered, Batch, Line, is_passing, is_retried
from tripool.errors import TripoolError

_LOG = logging.getLogger("tripool.batch")
_READ_AHEAD, _READ_AHEAD_BYTES = 128, 2**20
"""Lines of a batch that are read together. The last one may be larger."""
_MAX_RESTING = 16
"""Lines of a batch that rest while it begins others."""
_TICK_S = 0.25
_LOOK_S = 2.0
"""Between two looks at the store while nobody changes it: batches expire."""
_WRITE_S = 0.1
"""Answers that come within this time are written together."""
_FAILED_S = 1.0
_EXPIRED = {"code": "batch_expired", "message": "this request was not run before the batch expired"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    status_code: int
    request_id: str
    body: bytes
    """A JSON object."""
    code: str = ""
    """Of an error."""


Answer = Callable[[Batch, str, bytes], Awaitable[Reply]]
"""answer(batch, request id, body): run one request for the batch's tenant."""


@dataclass(slots=True, order=True)
class _Ready:
    """A line that can be run. They are ordered by the time when they are due."""

    due_s: float
    number: int
    line: Line = field(compare=False)
    body: bytes | Exception = field(compare=False)
    """Or why it cannot be read."""
    tries: int = field(default=0, compare=False)
    """That failed for what may be the line's own fault."""
    rest_s: float = field(default=FIRST_REST_S, compare=False)


@dataclass(slots=True, eq=False)
class _Open:
    """A batch in progress."""

    batch: Batch
    lines: deque[_Ready] = field(default_factory=deque)
    """Read and not begun."""
    resting: list[_Ready] = field(default_factory=list)
    """A heap of those that are tried again."""
    last_read: int = 0
    read_all: bool = False
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By line number."""

    @property
    def is_spent(self) -> bool:
        return self.read_all and not (self.lines or self.running or self.resting)

    @property
    def needs_lines(self) -> bool:
        return not (self.lines or self.read_all) and len(self.resting) < _MAX_RESTING

    def next(self, now_s: float) -> _Ready | None:
        if self.resting and self.resting[0].due_s <= now_s:
            return heapq.heappop(self.resting)
        return self.lines.popleft() if self.lines and len(self.resting) < _MAX_RESTING else None

    def rest(self, ready: _Ready, now_s: float) -> None:
        ready.due_s = now_s + ready.rest_s
        ready.rest_s = min(2 * ready.rest_s, MAX_REST_S)
        heapq.heappush(self.resting, ready)


class BatchRunner:
    """For one event loop. `may_start`: whether another line may begin now. `may_run`: whether batches are run here;
    once they are, they stay here."""

    def __init__(
        self,
        store: BatchStore,
        answer: Answer,
        slots: Callable[[], int],
        *,
        may_start: Callable[[], bool] = lambda: True,
        may_run: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self._answer, self._slots, self._may_start, self._clock = store, answer, slots, may_start, clock
        self._may_run = may_run
        self._disk = ThreadPoolExecutor(1, "tripool-batch")
        self._reading = ThreadPoolExecutor(1, "tripool-batch-read")
        self._open: dict[str, _Open] = {}
        self._turns: deque[str] = deque()
        """Tenants with open batches, the next one first."""
        self._answers: list[Answered] = []
        """Not written yet; the oldest is, at this time."""
        self._write_s = 0.0
        self._wake = asyncio.Event()
        self._changed = False
        """Whether the store has other batches than when it was last looked at."""
        self._task: asyncio.Task[None] | None = None
        self._validating: dict[str, asyncio.Task[None]] = {}
        self._full: frozenset[str] = frozenset()
        """Tenants without room for more answers: their batches wait."""

    # ---- for the routes ---------------------------------------------------------------------------------------------

    async def call(self, work: Callable[..., T], *args: Any, **named: Any) -> T:
        """A call of the store, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, partial(work, *args, **named))

    def wake(self) -> None:
        """Batches were added, cancelled or found good."""
        self._changed = True
        self._wake.set()

    @property
    def num_running(self) -> int:
        return sum(len(one.running) for one in self._open.values())

    @property
    def now_s(self) -> int:
        return int(self._clock())

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._main())

    async def stop(self) -> None:
        """End what is under way; answers that are complete are written."""
        if self._task is not None:
            await _cancelled([self._task, *self._validating.values()])
            await _cancelled([task for one in self._open.values() for task in one.running.values()])
            with suppress(TripoolError):  # those lines are run again after a restart
                await self._write()
        self._disk.shutdown()
        self._reading.shutdown()
        self.store.close()

    # ---- the loop ---------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        next_look_s = float("-inf")
        while not self._may_run():
            await asyncio.sleep(_TICK_S)
        while True:
            try:
                self._wake.clear()
                if self._changed or time.monotonic() >= next_look_s:
                    self._changed = False
                    next_look_s = time.monotonic() + _LOOK_S
                    await self._look()
                if time.monotonic() >= self._write_s:
                    await self._write()
                await self._begin_lines()
                await self._end_batches()
            except TripoolError as error:  # the disk is full, say: lines under way go on, and it is tried again
                _LOG.error("batches wait", extra={"code": error.code, "why": str(error)})
                next_look_s = float("-inf")
                await asyncio.sleep(_FAILED_S)
            except Exception:  # noqa: BLE001 (logged; the batches of all tenants depend on this loop)
                _LOG.exception("batches wait")
                await asyncio.sleep(_FAILED_S)
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes in the moment in which the event is set.
            with suppress(TimeoutError):
                async with asyncio.timeout(_WRITE_S if self._answers else _TICK_S):
                    await self._wake.wait()

    async def _look(self) -> None:
        """New, cancelled and expired batches."""
        await self.call(self.store.expire, self.now_s)
        full = await self.call(self.store.full_tenants)
        for tenant in full - self._full:
            _LOG.warning("batches wait for room", extra={"tenant": tenant})
        self._full = full
        for batch in await self.call(self.store.open_batches):
            known = self._open.get(batch.id)
            if batch.status == "in_progress" and self.now_s < batch.expires_s:
                if known is None:
                    self._open[batch.id] = _Open(batch)
                    if batch.tenant not in self._turns:
                        self._turns.append(batch.tenant)
            elif batch.status == "validating":
                if batch.id not in self._validating:
                    self._validating[batch.id] = asyncio.get_running_loop().create_task(self._validate(batch))
            else:  # cancelled or expired, or its end was interrupted
                await self._close(batch.id)

    async def _validate(self, batch: Batch) -> None:
        try:
            path, loop = self.store.path(batch.input_file_id), asyncio.get_running_loop()
            lines, errors = await loop.run_in_executor(self._reading, read_lines, path, batch.id, batch.endpoint)
        except (TripoolError, OSError) as error:
            lines, errors = [], [{"code": "invalid_file", "line": None, "message": str(error), "param": None}]
        try:
            begun = await self.call(self.store.start, batch.id, lines, errors, self.now_s)
            facts = {"batch": batch.id, "lines": begun.total, "errors": len(errors)}
            _LOG.info("batch begins" if not errors else "batch refused", extra=facts)
        except TripoolError as error:
            _LOG.error("batches wait", extra={"code": error.code, "why": str(error)})
        finally:
            self._validating.pop(batch.id, None)
            self.wake()

    async def _begin_lines(self) -> None:
        for _ in range(self._slots() - self.num_running):
            found = await self._next_line() if self._may_start() else None
            if found is None:
                return
            one, ready = found
            task = asyncio.get_running_loop().create_task(self._run(one, ready))
            one.running[ready.number] = task
            await asyncio.sleep(0)  # to parse a line takes a millisecond: tokens of others pass in between

    async def _next_line(self) -> tuple[_Open, _Ready] | None:
        """Of the tenant whose turn it is; None: all that is open is under way, or waits."""
        for _ in range(len(self._turns)):
            tenant = self._turns.popleft()
            own = [one for one in self._open.values() if one.batch.tenant == tenant]
            if own:
                self._turns.append(tenant)
            for one in () if tenant in self._full else own:
                if one.needs_lines:
                    await self._read_ahead(one)
                if (ready := one.next(time.monotonic())) is not None and one.batch.id in self._open:
                    return one, ready
        return None

    async def _read_ahead(self, one: _Open) -> None:
        lines = await self.call(self.store.pending, one.batch.id, one.last_read, _READ_AHEAD)
        path, loop = self.store.path(one.batch.input_file_id), asyncio.get_running_loop()
        bodies = await loop.run_in_executor(self._reading, read_bodies, path, lines, _READ_AHEAD_BYTES)
        one.lines.extend(_Ready(0.0, line.number, line, body) for line, body in zip(lines, bodies, strict=False))
        one.read_all = len(bodies) == len(lines) < _READ_AHEAD
        one.last_read = lines[len(bodies) - 1].number if bodies else one.last_read

    async def _run(self, one: _Open, ready: _Ready) -> None:
        batch, line = one.batch, ready.line
        request_id = f"batch_req_{line.batch_id[6:]}_{line.number}"
        try:
            reply = await self._try(batch, ready.body, request_id)
            ready.tries += not is_passing(reply.status_code, reply.code)
            if is_retried(reply.status_code) and ready.tries < MAX_TRIES:
                one.rest(ready, time.monotonic())
                return
            response = {
                "status_code": reply.status_code,
                "request_id": reply.request_id,
                "body": msgspec.Raw(reply.body),
            }
            entry = {"id": request_id, "custom_id": line.custom_id, "response": response, "error": None}
            self._write_s = self._write_s if self._answers else time.monotonic() + _WRITE_S
            self._answers.append(Answered(batch.id, line.number, reply.status_code, msgspec.json.encode(entry)))
        finally:
            one.running.pop(line.number, None)
            self._wake.set()

    async def _try(self, batch: Batch, body: bytes | Exception, request_id: str) -> Reply:
        if isinstance(body, Exception):
            shown = {"error": {"message": f"the input file cannot be read: {body}", "code": "invalid_file"}}
            return Reply(400, request_id, msgspec.json.encode(shown))
        return await self._answer(batch, request_id, body)

    async def _write(self) -> None:
        if self._answers:
            answers, self._answers = self._answers, []
            try:
                await self.call(self.store.answered, answers)
            except BaseException:
                self._answers = answers + self._answers
                raise

    async def _end_batches(self) -> None:
        for batch_id in [batch_id for batch_id, one in self._open.items() if one.is_spent]:
            await self._write()
            await self._close(batch_id)

    async def _close(self, batch_id: str) -> None:
        """It is answered, cancelled or expired: stop what is under way and write its files."""
        one = self._open.pop(batch_id, None)
        await _cancelled([] if one is None else list(one.running.values()))
        await self._write()
        ended = await self.call(self.store.finish, batch_id, self.now_s, _EXPIRED)
        facts = {"batch": batch_id, "completed": ended.completed, "failed": ended.failed}
        _LOG.info(f"batch {ended.status}", extra=facts)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
