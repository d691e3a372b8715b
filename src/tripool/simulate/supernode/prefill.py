"""A prefill instance in virtual time: the real scheduler on a modelled engine, with the cache pool before it. Pure.

What is computed stays in the instance's memory until the decode worker has it: parcels are the blocks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tripool.cache import namespace_tag
from tripool.core import Stages, TokenEvent
from tripool.decode import StepFacts
from tripool.engine.scheduler import Scheduler
from tripool.errors import TripoolError
from tripool.messages import (
    PROTOCOL,
    AnyMessage,
    Cancel,
    Heartbeat,
    Hello,
    KvDescriptor,
    Refused,
    Release,
    Stamped,
    StartPrefill,
    Tokens,
    TransferReady,
    WorkerId,
)
from tripool.sequence import Seq, Task
from tripool.simulate.supernode.links import Link, carry
from tripool.simulate.supernode.pool import CachePool, Found, Writing
from tripool.simulate.supernode.rank import MODEL, renamed, sampled_of
from tripool.simulate.supernode.site import Site
from tripool.simulate.supernode.timeline import ARRIVAL, STEP, TICK, to_fs

_HEARTBEAT_FS, _NEWS_FS, _RECENT_FS = to_fs(1.5), to_fs(0.5), to_fs(0.4)


@dataclass(slots=True, eq=False)
class _Job:
    """One Begin, until it is packed."""

    name: str
    begin: StartPrefill
    keys: Sequence[bytes]
    found: Found | None = None
    fetched_tokens: int = 0


class PrefillInstance:
    """`keys_of`: names of a request's full prompt blocks."""

    def __init__(
        self, site: Site, worker_id: WorkerId, number: int, pool: CachePool, keys_of: Callable[[str], Sequence[bytes]]
    ) -> None:
        self._site, self.worker_id, self._number, self._pool, self._keys_of = site, worker_id, number, pool, keys_of
        layout = site.layout
        self._config = layout.prefill.config
        self._scheduler = Scheduler(self._config, model=MODEL, context_tokens=layout.context_tokens)
        self._cache_link, self._cache_fs = Link(layout.links.cache_bytes_per_s), to_fs(layout.links.cache_s)
        self.send_link = Link(layout.links.send_bytes_per_s)
        self._jobs: dict[str, _Job] = {}
        self._leases: dict[int, tuple[StartPrefill, Seq]] = {}
        self._next_lease = 1
        self._tasks: list[Task] | None = None
        self._began_fs = 0
        self._num_steps = 0
        self._heartbeat_fs = 0
        self.slowness = 1.0
        self.dead = False
        size = self._config.num_blocks * self._config.block_tokens
        sizes = (size, self._config.max_running, self._scheduler.context_tokens, 2**31)
        site.tell(number, worker_id, [Hello(PROTOCOL, "prefill", worker_id, 1, MODEL, *sizes)])
        self._keep_alive()

    def cut(self, until_fs: int) -> None:
        """Its links take nothing new until then."""
        self._cache_link.cut(until_fs)
        self.send_link.cut(until_fs)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def receive(self, message: AnyMessage) -> None:
        match message:
            case StartPrefill():
                self._look_up(message)
            case Release():
                kept = self._leases.pop(message.lease, None)
                if kept is not None:
                    self._scheduler.release(kept[1])
                    self._go()
            case Cancel():
                self._forget(message.request_id, message.attempt)
                self._go()

    def _look_up(self, begin: StartPrefill) -> None:
        """What the pool has of the prompt beyond what is here; its last token is always computed."""
        size, now_s = self._config.block_tokens, self._site.timeline.now_s
        keys = self._keys_of(begin.request.id)[: (len(begin.request.prompt_ids) - 1) // size]
        name = f"{begin.request.id}/{begin.attempt}"
        job = self._jobs[name] = _Job(name, begin, keys)
        here = len(self._scheduler.pool.match(keys))
        if here < len(keys):
            found = self._pool.find(keys, here, self.worker_id, namespace_tag(begin.request.namespace), now_s)
            if found.num_blocks:
                job.found, job.fetched_tokens = found, found.num_blocks * size
                there_fs = self._move(found.num_blocks, "cache reads")
                self._site.timeline.at(there_fs, ARRIVAL, self._number, self._fetched, job, here)
                return
        self._add(job)

    def _move(self, num_blocks: int, name: str) -> int:
        """To or from the pool; returns when it is there."""
        num_bytes, now_fs = num_blocks * self._site.layout.block_bytes, self._site.timeline.now_fs
        self._site.slices.count(name, num_bytes, now_fs)
        return carry((self._cache_link,), num_bytes, now_fs, self._cache_fs)

    def _fetched(self, job: _Job, here: int) -> None:
        if self.dead or self._jobs.get(job.name) is not job or job.found is None:
            return
        blocks = self._scheduler.kept.keep(job.keys)
        wanted = here + job.found.num_blocks
        self._scheduler.kept.keep_more(blocks, wanted - len(blocks))
        self._scheduler.kept.let_go(blocks, job.keys[:wanted])
        self._pool.release(job.found, self.worker_id)
        job.found = None
        self._add(job)

    def _add(self, job: _Job) -> None:
        begin = job.begin
        request = renamed(begin.request, job.name)
        try:
            self._scheduler.add(request, answered={each.choice: each.tokens for each in begin.answered})
        except TripoolError as error:
            del self._jobs[job.name]
            told = (error.code, error.message, error.hint, True)
            self._site.tell(
                self._number, self.worker_id, [Refused(self.worker_id, begin.request.id, begin.attempt, *told)]
            )
            return
        self._scheduler.prefill.waiting[-1].keys.extend(job.keys)
        self._go()

    def _forget(self, request_id: str, attempt: int) -> None:
        job = self._jobs.pop(f"{request_id}/{attempt}", None)
        if job is not None:
            if job.found is not None:
                self._pool.release(job.found, self.worker_id)
            self._scheduler.cancel(job.name)
        for lease, (begin, seq) in list(self._leases.items()):
            if (begin.request.id, begin.attempt) == (request_id, attempt):
                del self._leases[lease]
                self._scheduler.release(seq)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Begin a step, if none runs and there is something to compute."""
        if self._tasks is not None or not self._scheduler.busy:
            return
        tasks = self._scheduler.schedule()
        if not tasks:
            return  # all memory is held by parcels: a Release comes
        facts, timeline = StepFacts.of(tasks), self._site.timeline
        # Tokens that were answered before a loss are computed again, as the prompt is.
        tokens, reads = facts.prompt_tokens + facts.rows, int(facts.prompt_reads + facts.context_tokens)
        self._tasks, self._began_fs = tasks, timeline.now_fs
        end_fs = timeline.now_fs + to_fs(self._site.layout.prefill_times.step_s(tokens, reads) * self.slowness)
        timeline.at(end_fs, STEP, self._number, self._settle)

    def _settle(self) -> None:
        if self.dead:
            return
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        self._num_steps += 1
        timeline = self._site.timeline
        self._site.slices.span("prefill busy", 1, self._began_fs, timeline.now_fs)
        events = self._scheduler.settle(tasks, [sampled_of(task.seq) if task.samples else None for task in tasks])
        if not self._hands_over:  # once it does, no promise binds its steps, and nobody asks how long they take
            self._scheduler.timed(tasks, self._began_fs / 1e15, timeline.now_s)
        stamped: list[Stamped] = []
        packed: list[AnyMessage] = []
        for event in events:
            job = self._jobs.pop(event.request_id)
            begin = job.begin
            spent = Stages(fetched_tokens=job.fetched_tokens)
            told = (event.finish_reason, None, event.num_cached_tokens, 0, 0, spent)
            own = TokenEvent(begin.request.id, event.choice, event.index, event.token_id, *told)
            stamped.append(Stamped(begin.attempt, own))
            if event.finish_reason is None:
                packed.append(self._pack(job, self._scheduler.detach(event.request_id, event.choice)))
            self._store(job)
        if stamped:
            self._site.tell(self._number, self.worker_id, [Tokens(self.worker_id, tuple(stamped)), *packed])
        self._heartbeat(_NEWS_FS)
        self._go()

    @property
    def _hands_over(self) -> bool:
        return self._next_lease > 1

    def _pack(self, job: _Job, seq: Seq) -> TransferReady:
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = job.begin, seq
        descriptor = KvDescriptor(str(self.worker_id), lease, (), (), 1, seq.num_computed)
        return TransferReady(self.worker_id, job.begin.request.id, job.begin.attempt, seq.choice, descriptor)

    def _store(self, job: _Job) -> None:
        """Offer the prompt's blocks to the pool."""
        request, timeline = job.begin.request, self._site.timeline
        keys = self._keys_of(request.id)
        if not keys:
            return
        writing = self._pool.reserve(keys, self.worker_id, namespace_tag(request.namespace), timeline.now_s)
        if writing.num_blocks:
            there_fs = self._move(writing.num_blocks, "cache writes")
            timeline.at(there_fs, ARRIVAL, self._number, self._stored, writing)

    def _stored(self, writing: Writing) -> None:
        if not self.dead:
            self._pool.commit(writing, self.worker_id, self._site.layout.block_bytes)

    # ---- pulses -----------------------------------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        if not self.dead:
            timeline = self._site.timeline
            self._heartbeat(_RECENT_FS)
            timeline.at(timeline.now_fs + _HEARTBEAT_FS, TICK, self._number, self._keep_alive)

    def _heartbeat(self, after_fs: int) -> None:
        now_fs = self._site.timeline.now_fs
        if now_fs - self._heartbeat_fs < after_fs:
            return
        self._heartbeat_fs = now_fs
        scheduler = self._scheduler
        fetching = sum(len(job.begin.request.prompt_ids) for job in self._jobs.values() if job.found is not None)
        running = len(scheduler.prefill.running) + len(scheduler.detached)
        heartbeat = Heartbeat(
            self.worker_id, self._num_steps, scheduler.num_waiting_tokens + fetching, running, scheduler.pool.num_held
        )
        self._site.tell(self._number, self.worker_id, [heartbeat])
