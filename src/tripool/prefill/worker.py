"""A prefill worker: computes prompts, samples each choice's next token and hands the KV to a decode worker.

Both kinds of worker run the same scheduler. This one takes a sequence out of its batch as soon as it has a token, and
copies its blocks into the KV sender a few at a time: steps never wait for copies, copies wait for free slots.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from tripool.core import Request, Stages, TokenEvent
from tripool.engine_protocol import PoolEngine, local_id, renamed
from tripool.errors import InvalidRequest, RequestFailed, TripoolError
from tripool.fabric.kv_transfer import KvSender, Lease
from tripool.fabric.prefixes import Prefixes, PrefixPool
from tripool.messages import (
    AnyMessage,
    Cancel,
    Heartbeat,
    Refused,
    Release,
    Stamped,
    StartPrefill,
    Tokens,
    TransferReady,
    WorkerId,
)
from tripool.sequence import Seq

_logger = logging.getLogger("tripool.engine")

_COPY_BYTES = 32 * 2**20
"""Packed between two steps at most: a few milliseconds."""
_MAX_BEGUN = 64
"""Choices begun between two steps, those of the last request not counted: running sequences wait for them."""


class _Job(msgspec.Struct, eq=False):
    """One StartPrefill, while any of its choices is computed or packed."""

    request: Request
    attempt: int
    deadline_s: float
    lease_s: float
    """How long the KV of a choice may wait to be fetched."""
    choices: set[int]
    lookup_s: float = 0.0
    fetched_tokens: int = 0
    """From the cache pool."""
    disk_tokens: int = 0
    """Of those, from its disks."""
    started_s: float | None = None
    """When the first step with it began."""

    @property
    def request_id(self) -> str:
        return self.request.id


class _Waiting(msgspec.Struct, eq=False):
    """A StartPrefill that is not passed to the engine yet."""

    start: StartPrefill
    job: _Job
    grammar: Future[Any] | None
    """Being compiled until it is done; held so that what was compiled is there when it is needed."""

    @property
    def ready(self) -> bool:
        return self.grammar is None or self.grammar.done()


class _Leaving(msgspec.Struct, eq=False):
    job: _Job
    seq: Seq
    lease: Lease | None = None


class PrefillWorker:
    def __init__(
        self,
        engine: PoolEngine,
        worker_id: WorkerId,
        sender: KvSender,
        send: Callable[[AnyMessage], None],
        *,
        pool: PrefixPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._worker_id, self._sender, self._send, self._clock = engine, worker_id, sender, send, clock
        self._prefixes = Prefixes(engine, pool)
        self._jobs: dict[str, _Job] = {}
        """By the name under which the engine knows it."""
        self._waiting: dict[str, _Waiting] = {}
        """Of the jobs, by name: those that are not begun yet, oldest first."""
        self._leaving: deque[_Leaving] = deque()
        self._num_steps = 0

    @property
    def busy(self) -> bool:
        return self._engine.busy or any(waiting.ready for waiting in self._waiting.values())

    @property
    def moving(self) -> bool:
        return bool(self._leaving or self._waiting or self._prefixes.waiting)

    @property
    def blocked(self) -> bool:
        waits = bool(self._leaving) and self._leaving[0].lease is None
        return waits and not (self._waiting or self._prefixes.pending)

    @property
    def placed(self) -> set[str]:
        return self._jobs.keys() - self._waiting.keys()

    def receive(self, message: AnyMessage, now_s: float) -> None:
        match message:
            case StartPrefill():
                self._await(message, now_s)
            case Release():
                self._sender.release(message.lease)
            case Cancel():
                self._forget(message.request_id, message.attempt)
            case _:
                pass  # for another role, or from a newer gateway

    def work(self, now_s: float) -> None:
        self._expire(now_s)
        if self._waiting:
            self._begin_some()
        engine = self._engine
        if engine.busy:
            events = engine.step()
            self._num_steps += 1
            for name in engine.started:
                self._jobs[name].started_s = now_s
            for name in engine.take_failed():
                if name in self._jobs:
                    self._fail(self._jobs[name])
            if events:
                self._answered([event for event in events if event.request_id in self._jobs])
        if self._leaving:
            self._pack(now_s)
        if self._prefixes.waiting:
            self._prefixes.work(_COPY_BYTES)

    def _answered(self, events: list[TokenEvent]) -> None:
        self._tell(events)
        for event in events:
            if event.finish_reason is None:
                job = self._jobs[event.request_id]
                self._leaving.append(_Leaving(job, self._engine.detach(event.request_id, event.choice)))
            else:
                # It ended with its first token, and is never packed.
                self._prefixes.publish_prompt_later(self._jobs[event.request_id].request)
                self._done(event.request_id, event.choice)

    def drop(self) -> None:
        for name in self._jobs:
            self._engine.cancel(name)
        self._jobs.clear()
        self._waiting.clear()
        self._leaving.clear()
        self._sender.drop(lambda lease: True)
        self._prefixes.drop()

    def heartbeat(self) -> Heartbeat:
        engine = self._engine
        held = engine.num_held_blocks + self._sender.num_held
        tokens = engine.num_waiting_tokens
        for waiting in self._waiting.values():
            tokens += len(waiting.job.request.prompt_ids)
        return Heartbeat(self._worker_id, self._num_steps, tokens, engine.stats().running, held)

    def _await(self, start: StartPrefill, now_s: float) -> None:
        request, attempt = start.request, start.attempt
        name = local_id(request.id, attempt)
        if name in self._jobs:
            return  # said twice
        choices = {known.choice for known in start.answered}
        job = _Job(request, attempt, now_s + start.deadline_s, start.lease_s, choices)
        self._jobs[name] = job
        self._waiting[name] = _Waiting(start, job, self._engine.prepare(request))

    def _begin_some(self) -> None:
        """Those whose grammar is compiled, oldest first; not so many that the step is long in coming."""
        num_begun = 0
        for name in [name for name, waiting in self._waiting.items() if waiting.ready]:
            if num_begun >= _MAX_BEGUN:
                return
            num_begun += len(self._waiting[name].job.choices)
            self._begin(name, self._waiting[name])
            self._waiting.pop(name, None)

    def _begin(self, name: str, waiting: _Waiting) -> None:
        start, job = waiting.start, waiting.job
        request = start.request
        try:
            self._check(start)
            began_s = self._clock()
            if request.params.prompt_logprobs is None:  # else every row is computed
                job.fetched_tokens, job.disk_tokens = self._prefixes.fetch(request)
            job.lookup_s = self._clock() - began_s
            self._engine.add(renamed(request, name), {known.choice: known.tokens for known in start.answered})
        except TripoolError as error:
            self._forget(request.id, start.attempt)
            self._refuse(job, error.code, error.message, error.hint, final=True)
        except Exception:
            _logger.exception("request %s could not be begun", request.id)
            self._fail(job)

    def _check(self, start: StartPrefill) -> None:
        """What is known of the answers must be of this request and of this model."""
        choices = [known.choice for known in start.answered]
        tokens = [token for known in start.answered for token in known.tokens]
        if not choices or len(set(choices)) < len(choices) or max(choices) >= start.request.params.n:
            raise InvalidRequest("the choices to go on with are not those of the request")
        if tokens and max(tokens) >= self._engine.vocab:
            raise InvalidRequest("the answer so far has tokens that this model does not have")

    def _tell(self, events: list[TokenEvent]) -> None:
        stamped, now_s = [], self._clock()
        for event in events:
            job = self._jobs[event.request_id]
            began_s = job.started_s if job.started_s is not None else now_s
            spent = Stages(
                lookup_s=job.lookup_s,
                prefill_s=now_s - began_s,
                fetched_tokens=job.fetched_tokens,
                disk_tokens=job.disk_tokens,
            )
            stamped.append(Stamped(job.attempt, event.of_request(job.request_id, spent)))
        if stamped:
            self._send(Tokens(self._worker_id, tuple(stamped)))

    def _pack(self, now_s: float) -> None:
        """The oldest first: nothing overtakes it, so a long one gets its room."""
        budget = _COPY_BYTES
        while self._leaving and budget > 0:
            leaving = self._leaving[0]
            seq, job = leaving.seq, leaving.job
            if leaving.lease is None:
                leaving.lease = self._lease(leaving, now_s)
            lease = leaving.lease
            if lease is None:
                if not self._sender.leases:  # nothing will become free: it does not fit at all
                    self._forget(job.request_id, job.attempt)
                    reason = f"the KV of {seq.num_computed} tokens does not fit into the shared memory"
                    self._refuse(job, "no_shared_memory", reason, "give the machine more of it", final=False)
                return
            try:
                while lease.num_filled < len(lease.slots) and budget > 0:
                    block = seq.table[lease.num_filled]
                    budget -= self._sender.fill(lease, partial(self._engine.export_block, block))
            except Exception:
                _logger.exception("request %s could not be packed", job.request_id)
                self._fail(job)
                continue
            if lease.packed:
                self._leaving.popleft()
                self._engine.release(seq)
                descriptor = self._sender.descriptor(lease)
                which = job.request_id, job.attempt, seq.choice
                self._send(TransferReady(self._worker_id, *which, lease.number, lease.num_tokens, descriptor))
                self._publish(seq, lease)
                self._done(seq.request.id, seq.choice)

    def _publish(self, seq: Seq, lease: Lease) -> None:
        """The prompt's full blocks, from where they stand packed."""
        keys = seq.keys[: seq.prompt_len // self._engine.block_tokens]
        self._prefixes.publish(keys, self._sender.blocks(lease, len(keys)), lease.checksums, seq.request)

    def _lease(self, leaving: _Leaving, now_s: float) -> Lease | None:
        seq, job = leaving.seq, leaving.job
        size = self._engine.block_tokens
        keys: list[bytes | None] = [*seq.keys[: seq.num_computed // size]]
        keys += [None] * (-(-seq.num_computed // size) - len(keys))
        which, deadline_s = (job.request_id, job.attempt, seq.choice), now_s + job.lease_s
        return self._sender.lease(*which, keys, num_tokens=seq.num_computed, deadline_s=deadline_s)

    def _expire(self, now_s: float) -> None:
        for job in [job for job in self._jobs.values() if job.deadline_s <= now_s]:
            self._forget(job.request_id, job.attempt)
            self._refuse(job, "overloaded", "not computed in time", "", final=False)
        for number in [lease.number for lease in self._sender.leases.values() if lease.deadline_s <= now_s]:
            if self._sender.leases[number].packed:
                self._sender.release(number)

    def _done(self, name: str, choice: int) -> None:
        """Nothing more to do here for a choice; its KV, if any, has a lease of its own."""
        job = self._jobs[name]
        job.choices.discard(choice)
        if not job.choices:
            del self._jobs[name]

    def _forget(self, request_id: str, attempt: int) -> None:
        name = local_id(request_id, attempt)
        self._waiting.pop(name, None)
        if self._jobs.pop(name, None) is not None:
            self._engine.cancel(name)
            self._leaving = deque(leaving for leaving in self._leaving if leaving.seq.request.id != name)
        self._sender.drop(lambda lease: (lease.request_id, lease.attempt) == (request_id, attempt))

    def _fail(self, job: _Job) -> None:
        """By a fault of this worker, not for lack of resources: no other worker is asked."""
        self._forget(job.request_id, job.attempt)
        error = RequestFailed.of(job.request_id)
        self._refuse(job, error.code, error.message, error.hint, final=True)

    def _refuse(self, job: _Job, code: str, message: str, hint: str, *, final: bool) -> None:
        self._send(Refused(self._worker_id, job.request_id, job.attempt, code, message, hint, final))
