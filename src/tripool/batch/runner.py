"""Runs batches: keeps lines of all open batches under way, writes their answers, and ends batches that are answered.

Tenants take turns line by line; of one tenant the oldest batch goes first. What runs at once is bounded by `slots`; the
engine runs it in idle steps only (`engine/background.py`). Nothing here is needed after a restart but the store: a line
without a stored answer is run, a batch in any open state goes on from there.
"""

from __future__ import annotations

import asyncio
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

from tripool.batch.read import body_of, read_lines
from tripool.batch.store import BatchStore
from tripool.batch.types import FIRST_REST_S, MAX_REST_S, MAX_TRIES, RETRIED, Answered, Batch, Line
from tripool.errors import TripoolError

_LOG = logging.getLogger("tripool.batch")
_READ_AHEAD = 128
_TICK_S = 0.25
_WRITE_S = 0.02
"""Answers that come within this time are written together."""
_EXPIRED = {"code": "batch_expired", "message": "this request was not run before the batch expired"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    status_code: int
    request_id: str
    body: bytes
    """A JSON object."""


Answer = Callable[[Batch, str, bytes], Awaitable[Reply]]
"""answer(batch, request id, body): run one request for the batch's tenant."""


@dataclass(slots=True, eq=False)
class _Open:
    """A batch in progress."""

    batch: Batch
    lines: deque[Line] = field(default_factory=deque)
    """Read and not begun."""
    last_read: int = 0
    read_all: bool = False
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By line number."""

    @property
    def is_spent(self) -> bool:
        return self.read_all and not self.lines and not self.running


class BatchRunner:
    """For one event loop. `may_start`: whether another line may begin now."""

    def __init__(
        self,
        store: BatchStore,
        answer: Answer,
        slots: Callable[[], int],
        *,
        may_start: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self._answer, self._slots, self._may_start, self._clock = store, answer, slots, may_start, clock
        self._disk = ThreadPoolExecutor(1, "tripool-batch")
        self._reading = ThreadPoolExecutor(1, "tripool-batch-read")
        self._open: dict[str, _Open] = {}
        self._turns: deque[str] = deque()
        """Tenants with open batches, the next one first."""
        self._answers: list[Answered] = []
        self._wake = asyncio.Event()
        self._changed = False
        """Whether the store has other batches than when it was last looked at."""
        self._task: asyncio.Task[None] | None = None
        self._validating: set[str] = set()
        self.num_answered = 0

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
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            tasks = [task for one in self._open.values() for task in one.running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._write()
        self._disk.shutdown()
        self._reading.shutdown()
        self.store.close()

    # ---- the loop ---------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        next_look_s = float("-inf")
        while True:
            try:
                self._wake.clear()
                if self._changed or time.monotonic() >= next_look_s:
                    self._changed = False
                    next_look_s = time.monotonic() + _TICK_S
                    await self._look()
                await self._write()
                await self._begin_lines()
                await self._end_batches()
            except TripoolError as error:  # the disk is full, say: lines under way go on, and it is tried again
                _LOG.error("batches wait", extra={"code": error.code, "why": str(error)})
                await asyncio.sleep(1.0)
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes in the moment in which the event is set.
            with suppress(TimeoutError):
                async with asyncio.timeout(_WRITE_S if self._answers else _TICK_S):
                    await self._wake.wait()

    async def _look(self) -> None:
        """New, cancelled and expired batches."""
        await self.call(self.store.expire_files, self.now_s)
        for batch in await self.call(self.store.open_batches):
            known = self._open.get(batch.id)
            if batch.status == "in_progress" and self.now_s < batch.expires_s:
                if known is None:
                    self._open[batch.id] = _Open(batch)
                    if batch.tenant not in self._turns:
                        self._turns.append(batch.tenant)
            elif batch.status == "validating":
                if batch.id not in self._validating:
                    self._validating.add(batch.id)
                    asyncio.get_running_loop().create_task(self._validate(batch))
            else:  # cancelled or expired, or its end was interrupted
                await self._close(batch.id)

    async def _validate(self, batch: Batch) -> None:
        try:
            path = self.store.path(await self.call(self.store.file, batch.tenant, batch.input_file_id))
            loop = asyncio.get_running_loop()
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
            self._validating.discard(batch.id)
            self.wake()

    async def _begin_lines(self) -> None:
        while self._may_start() and self.num_running < self._slots():
            line = await self._next_line()
            if line is None:
                return
            one = self._open[line.batch_id]
            task = asyncio.get_running_loop().create_task(self._run(one, line))
            one.running[line.number] = task

    async def _next_line(self) -> Line | None:
        """Of the tenant whose turn it is; None: all that is open is under way."""
        for _ in range(len(self._turns)):
            tenant = self._turns.popleft()
            own = [one for one in self._open.values() if one.batch.tenant == tenant]
            if own:
                self._turns.append(tenant)
            for one in own:
                if not one.lines and not one.read_all:
                    found = await self.call(self.store.pending, one.batch.id, one.last_read, _READ_AHEAD)
                    one.lines.extend(found)
                    one.read_all = len(found) < _READ_AHEAD
                    one.last_read = found[-1].number if found else one.last_read
                if one.lines and one.batch.id in self._open:
                    return one.lines.popleft()
        return None

    async def _run(self, one: _Open, line: Line) -> None:
        batch, request_id = one.batch, f"batch_req_{line.batch_id[6:]}_{line.number}"
        rest_s = FIRST_REST_S
        try:
            for left in reversed(range(MAX_TRIES)):
                reply = await self._try(batch, line, request_id)
                if not left or reply.status_code not in RETRIED:
                    break
                await asyncio.sleep(rest_s)
                rest_s = min(2 * rest_s, MAX_REST_S)
            response = {
                "status_code": reply.status_code,
                "request_id": reply.request_id,
                "body": msgspec.Raw(reply.body),
            }
            entry = {"id": request_id, "custom_id": line.custom_id, "response": response, "error": None}
            self._answers.append(Answered(batch.id, line.number, reply.status_code, msgspec.json.encode(entry)))
        finally:
            one.running.pop(line.number, None)
            self._wake.set()

    async def _try(self, batch: Batch, line: Line, request_id: str) -> Reply:
        try:
            body = await self.call(self._read_body, batch, line)
        except (TripoolError, OSError, msgspec.DecodeError, ValueError) as error:
            shown = {"error": {"message": f"the input file cannot be read: {error}", "code": "invalid_file"}}
            return Reply(400, request_id, msgspec.json.encode(shown))
        return await self._answer(batch, request_id, body)

    def _read_body(self, batch: Batch, line: Line) -> bytes:
        return body_of(self.store.path(self.store.file(batch.tenant, batch.input_file_id)), line)

    async def _write(self) -> None:
        if self._answers:
            answers, self._answers = self._answers, []
            try:
                await self.call(self.store.answered, answers)
            except BaseException:
                self._answers = answers + self._answers
                raise
            self.num_answered += len(answers)

    async def _end_batches(self) -> None:
        for batch_id in [batch_id for batch_id, one in self._open.items() if one.is_spent]:
            await self._write()
            await self._close(batch_id)

    async def _close(self, batch_id: str) -> None:
        """It is answered, cancelled or expired: stop what is under way and write its files."""
        one = self._open.pop(batch_id, None)
        tasks = [] if one is None else list(one.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._write()
        ended = await self.call(self.store.finish, batch_id, self.now_s, _EXPIRED)
        facts = {"batch": batch_id, "completed": ended.completed, "failed": ended.failed}
        _LOG.info(f"batch {ended.status}", extra=facts)
