"""A decode worker: receives the KV of sequences, a few blocks between two steps, and decodes its batch to the end.

When its memory is full, KV waits at its sender, leased. A sequence that is preempted here is computed again here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from tripool.core import Stages, TokenEvent
from tripool.engine_protocol import PoolEngine, local_id, renamed
from tripool.errors import RequestFailed, TripoolError
from tripool.fabric.kv_transfer import IncomingKv, KvReceiver
from tripool.fabric.prefixes import Prefixes, PrefixPool
from tripool.messages import (
    AnyMessage,
    Cancel,
    Heartbeat,
    Refused,
    Stamped,
    StartDecode,
    Tokens,
    TransferDone,
    WorkerId,
)
from tripool.sequence import Seq

_logger = logging.getLogger("tripool.engine")

_COPY_BYTES = 8 * 2**20
"""Fetched before a step at most, so that the running batch hardly notices."""
_IDLE_COPY_BYTES = 64 * 2**20
_MAX_ADOPTED = 64
"""Before a step, however little of each is to be copied."""
_MAX_QUEUED = 4096


class _Job(msgspec.Struct, eq=False):
    """One StartDecode: queued without a sequence, arriving until all blocks are filled, then running."""

    name: str
    """Under which the engine knows it."""
    start: StartDecode
    num_tokens: int
    """Tokens whose KV it receives."""
    kv: IncomingKv
    came_s: float
    deadline_s: float
    grammar: Future[Any] | None = None
    """Being compiled until it is done; held so that what was compiled is there when it is attached."""
    started_s: float | None = None
    """When it had all its blocks; None again once that is reported."""
    seq: Seq | None = None
    num_filled: int = 0


class DecodeWorker:
    def __init__(
        self,
        engine: PoolEngine,
        worker_id: WorkerId,
        receiver: KvReceiver,
        send: Callable[[AnyMessage], None],
        *,
        pool: PrefixPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._worker_id, self._receiver, self._send = engine, worker_id, receiver, send
        self._clock, self._prefixes = clock, Prefixes(engine, pool)
        self._jobs: dict[str, _Job] = {}
        """By the name under which the engine knows it."""
        self._queue: deque[_Job] = deque()
        """Not running yet, oldest first."""
        self._is_full = False
        """There was no memory for any sequence in the queue, and none was released since."""
        self._num_steps = 0
        self._staging = bytearray(engine.block_bytes)

    @property
    def busy(self) -> bool:
        return self._engine.busy

    @property
    def moving(self) -> bool:
        return bool(self._queue or self._prefixes.waiting)

    @property
    def blocked(self) -> bool:
        """Nothing is being copied, and nothing waits but for memory."""
        compiled = all(job.grammar is None or job.grammar.done() for job in self._queue)
        return self._is_full and compiled and not self._prefixes.pending

    @property
    def placed(self) -> set[str]:
        return {name for name, job in self._jobs.items() if job.seq is not None}

    def receive(self, message: AnyMessage, now_s: float) -> None:
        match message:
            case StartDecode():
                self._queue_up(message, now_s)
            case Cancel():
                self._forget(local_id(message.request_id, message.attempt))
            case _:
                pass  # for another role, or from a newer gateway

    def work(self, now_s: float) -> None:
        engine = self._engine
        if self._queue:
            for job in [job for job in self._queue if job.deadline_s <= now_s]:
                self._refuse(job.start, "overloaded", "no room for it in time")
            self._fetch(_COPY_BYTES if engine.busy else _IDLE_COPY_BYTES)
        else:
            self._is_full = False
        if engine.busy:
            events = engine.step()
            self._num_steps += 1
            self._is_full = False
            for name in engine.take_failed():
                if name in self._jobs:
                    self._fail(self._jobs[name])
            if events:
                self._tell([event for event in events if event.request_id in self._jobs])
        if self._prefixes.waiting:
            self._prefixes.work(_COPY_BYTES)
            self._is_full = False

    def drop(self) -> None:
        for name in self._jobs:
            self._engine.cancel(name)
        for job in self._queue:
            job.kv.close()
        self._jobs.clear()
        self._queue.clear()
        self._prefixes.drop()

    def heartbeat(self) -> Heartbeat:
        engine = self._engine
        waiting, stats = engine.num_waiting_tokens, engine.stats()
        for job in self._queue:
            waiting += job.num_tokens
        return Heartbeat(
            self._worker_id, self._num_steps, waiting, stats.running, engine.num_held_blocks, ceiling=stats.slo_ceiling
        )

    def _queue_up(self, start: StartDecode, now_s: float) -> None:
        name = local_id(start.request.id, start.attempt)
        if name in self._jobs:
            return  # said twice
        if len(self._queue) >= _MAX_QUEUED:
            self._refuse(start, "overloaded", "too many wait here already")
            return
        num_tokens = len(start.request.prompt_ids) + len(start.answered.tokens) - 1  # the newest has no KV yet
        fits = num_tokens > 0 and self._fits(start)
        kv = self._receiver.open(start.descriptor, num_tokens) if fits else None
        if kv is None:
            self._refuse(start, "bad_kv", "the KV does not fit the request and its answer, or this worker's memory")
            return
        self._jobs[name] = job = _Job(name, start, num_tokens, kv, now_s, now_s + start.deadline_s)
        job.grammar = self._engine.prepare(start.request)
        self._queue.append(job)

    def _fits(self, start: StartDecode) -> bool:
        """Whether answer and request belong to one sequence of this model."""
        request, tokens = start.request, start.answered.tokens
        return (
            start.num_cached_tokens <= len(request.prompt_ids)
            and start.answered.choice < request.params.n
            and (not tokens or max(tokens) < self._engine.vocab)
        )

    def _fetch(self, budget: int) -> None:
        """Blocks of the oldest that waits, then of the next: nothing of its own client's overtakes it, so a long one
        gets its room, and others need not wait for that."""
        full: set[tuple[str, str]] = set()
        num_adopted = 0
        while budget > 0 and num_adopted < _MAX_ADOPTED and (job := self._next(full)) is not None:
            num_blocks, intact = job.kv.num_blocks, True
            try:
                if job.seq is None:
                    num_adopted += 1
                    job.seq = self._attach(job)
                    if job.seq is None:
                        full.add(job.start.request.slo.group)
                        continue
                    job.kv.begin()
                    if not job.kv.arrived:
                        continue
                while intact and job.num_filled < num_blocks and budget > 0:
                    intact = self._fill(job, job.seq)
                    budget -= self._engine.block_bytes
            except TripoolError as error:
                self._refuse(job.start, error.code, error.message, error.hint, final=True)
                continue
            except Exception:
                _logger.exception("request %s could not be attached", job.start.request.id)
                self._fail(job)
                continue
            if not intact:
                self._refuse(job.start, "bad_kv", "the bytes are not those that were sent")
            elif job.num_filled == num_blocks:
                self._queue.remove(job)
                job.kv.close()
                self._engine.start(job.seq)
                job.started_s = self._clock()
                start = job.start
                self._send(TransferDone(self._worker_id, start.request.id, start.attempt, start.answered.choice))
        waits = bool(self._queue) and all(job.seq is None for job in self._queue)  # else blocks are under way
        self._is_full = waits and budget > 0 and num_adopted < _MAX_ADOPTED

    def _next(self, full: set[tuple[str, str]]) -> _Job | None:
        """The oldest whose blocks are here to be read, or else the oldest of a client for whom there may be room."""
        oldest: _Job | None = None
        for job in self._queue:
            if job.seq is not None:
                if job.kv.arrived:
                    return job
            elif oldest is None and (not full or job.start.request.slo.group not in full):
                oldest = job
        return oldest

    def _attach(self, job: _Job) -> Seq | None:
        if job.grammar is not None and not job.grammar.done():
            return None  # not yet, as without room
        start = job.start
        shared = self._shared(job) if start.request.params.n > 1 else []
        job.num_filled = len(shared)
        return self._engine.attach(
            renamed(start.request, job.name),
            start.answered.choice,
            start.answered.tokens,
            job.num_tokens,
            num_cached=start.num_cached_tokens,
            shared=shared,
        )

    def _shared(self, job: _Job) -> list[int]:
        """Leading full blocks that another choice of the same request brought here: the same bytes, by their sums."""
        best: list[int] = []
        request, size = job.start.request, self._engine.block_tokens
        for other in self._jobs.values():
            if other.seq is None or other in self._queue or other.start.request.id != request.id:
                continue
            # One that was preempted has as much as is computed again.
            num_there = min(job.num_tokens, other.num_tokens, other.seq.num_computed) // size
            count = min(job.kv.num_shared(other.kv), num_there)
            if count > len(best):
                best = other.seq.table[:count]
        return best

    def _fill(self, job: _Job, seq: Seq) -> bool:
        block = job.kv.read(job.num_filled, memoryview(self._staging))
        if block is None:
            return False
        self._engine.import_block(seq.table[job.num_filled], block)
        job.num_filled += 1
        return True

    def _tell(self, events: list[TokenEvent]) -> None:
        stamped = []
        for event in events:
            job = self._jobs[event.request_id]
            start, stages = job.start, None
            if job.started_s is not None:
                stages, job.started_s = Stages(transfer_s=job.started_s - job.came_s), None
            stamped.append(Stamped(start.attempt, event.of_request(start.request.id, stages)))
        if stamped:
            self._send(Tokens(self._worker_id, tuple(stamped)))
        for event in events:
            if event.finish_reason is not None:
                seq = self._jobs.pop(event.request_id).seq
                if seq is not None:
                    self._prefixes.publish_later(seq.request, seq.keys)

    def _fail(self, job: _Job) -> None:
        """By a fault of this worker, not for lack of resources: no other worker is asked."""
        error = RequestFailed.of(job.start.request.id)
        self._refuse(job.start, error.code, error.message, error.hint, final=True)

    def _refuse(self, start: StartDecode, code: str, message: str, hint: str = "", *, final: bool = False) -> None:
        request_id, attempt = start.request.id, start.attempt
        self._forget(local_id(request_id, attempt))
        self._send(Refused(self._worker_id, request_id, attempt, code, message, hint, final))

    def _forget(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            self._engine.cancel(name)
            if job in self._queue:
                self._queue.remove(job)
                job.kv.close()
