"""One worker process in virtual time: the real scheduler on a made-up model, and the messages of its role. Pure.

A turn is what a worker's loop does between two steps: settle the step that ran, read the messages, move parcels, talk
to the cache pool, pulse, begin the next step. Between two turns anything may happen to the process.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from tripool.config import SchedulerConfig
from tripool.core import Request, TokenEvent
from tripool.engine.scheduler import Scheduler
from tripool.errors import TripoolError
from tripool.messages import (
    PROTOCOL,
    AnyMessage,
    Cancel,
    Drain,
    Heartbeat,
    Hello,
    Left,
    Refused,
    Release,
    Role,
    Stamped,
    StartDecode,
    StartPrefill,
    Tokens,
    TransferDone,
    TransferReady,
    Welcome,
    WorkerId,
)
from tripool.prefill.scheduler import extend_keys
from tripool.sequence import Sampled, Seq, Task
from tripool.simulate.kv_sender import KvSender
from tripool.simulate.model import Memory, checksum, sample
from tripool.simulate.pool import CacheMember, Fetch, PoolClient

MODEL = "made-up"
GATEWAY_SILENCE_S = 1.5
"""A worker that hears nothing for so long drops everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    role: Role
    config: SchedulerConfig
    context_tokens: int
    sender_slots: int
    slo: float
    """KV memory that it tells of, as a multiple of what it has: above 1 it will be full."""
    token_s: float
    """Time per row of a step, and of a step without any."""


@dataclass(slots=True)
class _Arrival:
    start: StartDecode
    deadline_s: float
    seq: Seq | None = None
    """None while there is no room for it."""


@dataclass(slots=True)
class _Job:
    """One Begin or Adopt."""

    request_id: str
    attempt: int
    num_open: int
    """Choices that are still here."""


class SimWorker:
    def __init__(
        self,
        worker_id: WorkerId,
        spec: WorkerSpec,
        members: list[CacheMember],
        senders: dict[str, KvSender],
        send: Callable[[AnyMessage], None],
    ) -> None:
        self.worker_id, self.spec = worker_id, spec
        self.receiver: deque[AnyMessage] = deque()
        self.session = 1
        """A line of its own to the gateway: what was sent on an earlier one reaches nobody."""
        self._send = send
        self._senders = senders
        self.sender = KvSender(str(worker_id), spec.sender_slots)
        senders[self.sender.name] = self.sender
        self.pool = PoolClient(worker_id, members)
        self._memory = Memory(spec.config.num_blocks, spec.config.block_tokens)
        self.scheduler = Scheduler(spec.config, model=MODEL, context_tokens=spec.context_tokens)
        self._tasks: list[Task] | None = None
        """The step that runs, and since when."""
        self._began_s = 0.0
        self._jobs: dict[str, _Job] = {}
        """By the name that the scheduler knows."""
        self._fetches: dict[str, tuple[StartPrefill, Fetch]] = {}
        self._to_pack: list[Seq] = []
        self._arrivals: list[_Arrival] = []
        self._gateway_epoch: int | None = None
        self._heartbeat_s = 0.1
        self._heard_s = 0.0
        self._heartbeat_due_s = 0.0
        self._num_steps = 0
        self._draining = False
        self.disconnected = False
        """The connection broke: noticed at the next turn."""
        self.exited = False
        self.seen: Counter[str] = Counter()
        self.slowness = 1.0

    # ---- for those who look -----------------------------------------------------------------------------------------

    @property
    def stepping(self) -> bool:
        """In the middle of a step: messages wait."""
        return self._tasks is not None

    @property
    def blocks_held(self) -> int:
        return self.scheduler.pool.num_held + self.sender.num_held

    @property
    def holds_nothing(self) -> bool:
        open_ends = self._fetches or self._to_pack or self._arrivals or self.pool.writes or self._jobs
        return not (self.blocks_held or self.scheduler.busy or open_ends)

    def check(self) -> None:
        self.scheduler.check()
        self.sender.check()
        seqs = {s.request.id for s in [*self.scheduler.holders(), *self.scheduler.prefill.waiting]}
        seqs |= {s.request.id for s in [*self.scheduler.arriving, *self.scheduler.detached]}
        known = seqs | set(self._fetches) | {_name(a.start.request.id, a.start.attempt) for a in self._arrivals}
        assert known == set(self._jobs), "a worker remembers what it has not, or the reverse"

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def turn(self, now_s: float) -> float:
        """Everything between two steps. Returns when the loop wants to go on, if no message comes before."""
        self._settle_step(now_s)
        while self.receiver and not self.disconnected:
            self._receive(self.receiver.popleft(), now_s)
        silent = self._gateway_epoch is not None and now_s - self._heard_s > GATEWAY_SILENCE_S
        if silent or self.disconnected:
            self._reset()
        if self._fetches:
            self._take_fetched(now_s)
        if self._to_pack:
            self._pack(now_s)
        if self._arrivals:
            self._arrive(now_s)
        if self.pool.writes:
            self.pool.turn()
        if now_s >= self._heartbeat_due_s:
            self.sender.expire(now_s)
            self._heartbeat(now_s)
        if self._draining and self.holds_nothing:
            self._send(Left(self.worker_id))
            self.exited = True
            return now_s
        if self.scheduler.busy and (tasks := self.scheduler.schedule()):
            self._tasks, self._began_s = tasks, now_s
            rows = sum([task.num_rows for task in tasks])
            return now_s + self.spec.token_s * (1 + rows) * self.slowness
        # What waits for room waits for a message; what is under way goes on by itself.
        under_way = self._fetches or self.pool.writes or any(arrival.seq is not None for arrival in self._arrivals)
        return min(now_s + 0.02, self._heartbeat_due_s) if under_way else self._heartbeat_due_s

    def _reset(self) -> None:
        """The gateway is gone, or a new one: nobody wants what we hold."""
        for name in list(self._jobs):
            self._forget(name)
        self.sender.drop_all()
        self.receiver.clear()
        self.disconnected = False
        self._gateway_epoch = None
        self.session += 1
        self._heartbeat_due_s = 0.0

    def _heartbeat(self, now_s: float) -> None:
        self._heartbeat_due_s = now_s + self._heartbeat_s
        if self._gateway_epoch is None:
            config = self.spec.config
            size = int(config.num_blocks * config.block_tokens * self.spec.slo)
            sizes = (size, config.max_running, self.scheduler.context_tokens, 100)
            self._send(Hello(PROTOCOL, self.spec.role, self.worker_id, 1, MODEL, *sizes))
            return
        scheduler = self.scheduler
        waiting = scheduler.num_waiting_tokens + sum(len(b.request.prompt_ids) for b, _ in self._fetches.values())
        waiting += sum(a.start.descriptor.num_tokens for a in self._arrivals)
        running = len(scheduler.decode.running) + len(scheduler.prefill.running) + len(scheduler.detached)
        ceiling = scheduler.slo_controller.ceiling if self.spec.role == "decode" else None
        self._send(Heartbeat(self.worker_id, self._num_steps, waiting, running, self.blocks_held, ceiling))

    def _settle_step(self, now_s: float) -> None:
        if self._tasks is None:
            return
        tasks, self._tasks = self._tasks, None
        self._num_steps += 1
        sampled: list[Sampled | None] = []
        for task in tasks:
            seq = task.seq
            value = self._memory.run(task)
            token = sample(value, seq.request, seq.choice, len(seq.tokens)) if task.samples else None
            sampled.append(None if token is None else Sampled(token))
        events = [self._stamp(event) for event in self.scheduler.settle(tasks, sampled)]
        self.scheduler.timed(tasks, self._began_s, now_s)
        if events:
            self._send(Tokens(self.worker_id, tuple(events)))
        for task in tasks:
            seq = task.seq
            if seq.finish is not None:
                self._store(seq, now_s)
                self._leave(seq)
            elif self.spec.role == "prefill" and seq in self.scheduler.decode.running:
                self._to_pack.append(self.scheduler.detach(seq.request.id, seq.choice))

    def _stamp(self, event: TokenEvent) -> Stamped:
        job = self._jobs[event.request_id]
        told = (event.finish_reason, event.logprobs, event.num_cached_tokens, event.num_draft_tokens)
        own = (event.choice, event.index, event.token_id, *told, event.num_accepted_draft_tokens, event.stages)
        return Stamped(job.attempt, TokenEvent(job.request_id, *own))

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, message: AnyMessage, now_s: float) -> None:
        self._heard_s = now_s
        match message:
            case Welcome():
                assert self._gateway_epoch in (None, message.gateway_epoch), "two gateways in one session"
                self._gateway_epoch, self._heartbeat_s = message.gateway_epoch, message.heartbeat_s
            case Cancel():
                self._forget(_name(message.request_id, message.attempt))
                self.sender.cancel(message.request_id, message.attempt)
            case Release():
                self.sender.release(message.lease)
            case Drain():
                self._draining = True
            case StartPrefill() | StartDecode():
                name = _name(message.request.id, message.attempt)
                if self._gateway_epoch is None or name in self._jobs:
                    return
                if self._draining:
                    self._refuse(message, "draining", "this worker is to leave")
                    return
                num_open = len(message.answered) if isinstance(message, StartPrefill) else 1
                self._jobs[name] = _Job(message.request.id, message.attempt, num_open)
                if isinstance(message, StartDecode):
                    self._arrivals.append(_Arrival(message, now_s + message.deadline_s))
                elif (fetch := self._find_prefix(message.request, now_s)) is not None:
                    self._fetches[name] = (message, fetch)
                else:
                    self._add(message)
            case _:
                raise AssertionError(f"a worker is not sent {type(message).__name__}")

    def _add(self, begin: StartPrefill) -> None:
        request = replace(begin.request, id=_name(begin.request.id, begin.attempt))
        try:
            self.scheduler.add(request, answered={each.choice: each.tokens for each in begin.answered})
        except TripoolError as error:
            del self._jobs[request.id]
            self._refuse(begin, error.code, error.message, final=True)

    def _refuse(self, message: StartPrefill | StartDecode, code: str, why: str, *, final: bool = False) -> None:
        self._send(Refused(self.worker_id, message.request.id, message.attempt, code, why, "", final))

    def _forget(self, name: str) -> None:
        self._jobs.pop(name, None)
        if name in self._fetches:
            self.pool.let_go(self._fetches.pop(name)[1])
        self._to_pack = [seq for seq in self._to_pack if seq.request.id != name]
        self._arrivals = [a for a in self._arrivals if _name(a.start.request.id, a.start.attempt) != name]
        self.scheduler.cancel(name)

    # ---- parcels ----------------------------------------------------------------------------------------------------

    def _pack(self, now_s: float) -> None:
        """What is computed leaves as soon as the outbox has room for it."""
        waiting, self._to_pack = self._to_pack, []
        size = self.spec.config.block_tokens
        for seq in waiting:
            table = seq.table[: -(-seq.num_computed // size)]
            if not self.sender.has_room(len(table)):
                self._to_pack.append(seq)
                self.seen["waited for room in an outbox"] += 1
                continue
            job = self._jobs[seq.request.id]
            blocks = [self._memory.read(block) for block in table]
            descriptor = self.sender.pack(job.request_id, job.attempt, blocks, seq.num_computed, now_s + 4.0)
            self._store(seq, now_s)
            self.scheduler.release(seq)
            self._leave(seq)
            self._send(TransferReady(self.worker_id, job.request_id, job.attempt, seq.choice, descriptor))

    def _arrive(self, now_s: float) -> None:
        """Parcels that got room in an earlier turn are copied; those that wait get room, oldest first."""
        waiting, self._arrivals = self._arrivals, []
        for arrival in waiting:
            start, name = arrival.start, _name(arrival.start.request.id, arrival.start.attempt)
            if arrival.seq is not None:
                self._copy(arrival.seq, start)
            elif arrival.deadline_s <= now_s:
                del self._jobs[name]
                self._refuse(start, "overloaded", "no room")
                self.seen["refused for want of room"] += 1
            else:
                request = replace(start.request, id=name)
                arrival.seq = self.scheduler.attach(
                    request,
                    start.answered.choice,
                    start.answered.tokens,
                    start.descriptor.num_tokens,
                    num_cached=start.num_cached_tokens,
                )
                self._arrivals.append(arrival)
                self.seen["waited for room at decode"] += arrival.seq is None

    def _copy(self, seq: Seq, start: StartDecode) -> None:
        sender = self._senders.get(start.descriptor.arena)
        for block, slot, told in zip(seq.table, start.descriptor.offsets, start.descriptor.checksums, strict=False):
            values = sender.read(slot) if sender is not None else ()
            if checksum(values) != told:
                self.scheduler.cancel(seq.request.id)
                del self._jobs[seq.request.id]
                self._refuse(start, "parcel_lost", "the parcel is not what it was")
                self.seen["parcel lost"] += 1
                return
            self._memory.write(block, values)
        self.scheduler.start(seq)
        self._send(TransferDone(self.worker_id, start.request.id, start.attempt, start.answered.choice))

    # ---- cache pool -------------------------------------------------------------------------------------------------

    def _find_prefix(self, request: Request, now_s: float) -> Fetch | None:
        """What the pool has of a prompt beyond what is here."""
        config = self.spec.config
        probe = Seq(request, 0, 0, 1, list(request.prompt_ids))
        keys = extend_keys(probe, len(request.prompt_ids) - 1, config.block_tokens, MODEL)
        if not keys or len(self.scheduler.pool.match(keys)) == len(keys):
            return None
        return self.pool.find(keys, request, now_s)

    def _take_fetched(self, now_s: float) -> None:
        for name in [name for name, (_, fetch) in self._fetches.items() if self.pool.is_ready(fetch, now_s)]:
            begin, fetch = self._fetches.pop(name)
            self._take_prefix(begin, fetch)
            self._add(begin)

    def _take_prefix(self, begin: StartPrefill, fetch: Fetch) -> None:
        """Copy found blocks into free ones, where the scheduler finds them by their keys."""
        pool, config = self.scheduler.pool, self.spec.config
        probe = Seq(begin.request, 0, 0, 1, list(begin.request.prompt_ids))
        keys = extend_keys(probe, len(begin.request.prompt_ids) - 1, config.block_tokens, MODEL)
        here = pool.match(keys)
        pool.acquire(here)
        held = list(here)
        copied = self.pool.copy(fetch)
        for key, values in list(zip(keys, copied, strict=False))[len(here) :]:
            if not pool.can_allocate(1):
                break
            (block,) = pool.allocate(1, after=held[-1] if held else None)
            self._memory.write(block, values)
            pool.publish(block, key)
            held.append(block)
        pool.release(held)

    def _store(self, seq: Seq, now_s: float) -> None:
        """Offer a sequence's full blocks to the pool, as far as they are still here."""
        found = self.scheduler.pool.match(seq.keys)
        if found:
            blocks = [self._memory.read(block) for block in found]
            self.pool.store(seq.keys[: len(found)], blocks, seq.request, now_s)

    def _leave(self, seq: Seq) -> None:
        """One choice less; with the last one the job is over."""
        job = self._jobs[seq.request.id]
        job.num_open -= 1
        if not job.num_open:
            del self._jobs[seq.request.id]


def _name(request_id: str, attempt: int) -> str:
    """Attempts of one request are strangers to the scheduler."""
    return f"{request_id}/{attempt}"
