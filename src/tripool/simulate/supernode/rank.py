"""One decode worker in virtual time: the real scheduler, brought to the present only when something is asked of it.

While its steps are quiet it lags behind its instance; `catch_up` leaps to the last whole step and begins the one that
runs, as taking every step would have done. The SLO controller is told of one step wherever something happened, and
tokens travel to the gateway as runs. Both happen at the same moments whether steps are leapt over or taken. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tripool.core import Request, TokenEvent
from tripool.decode import StepFacts
from tripool.engine.fast_forward import fast_forward, quiet_steps
from tripool.engine.scheduler import Scheduler
from tripool.messages import (
    PROTOCOL,
    AnyMessage,
    Cancel,
    Heartbeat,
    Hello,
    Refused,
    Stamped,
    StartDecode,
    TransferDone,
    WorkerId,
)
from tripool.sequence import Sampled, Seq, Task
from tripool.simulate.supernode.site import Run, Site
from tripool.simulate.supernode.timeline import ARRIVAL, FS, to_fs

MODEL = "simulated"
_NOTHING = StepFacts()
_TOLD_FS = 10 * FS
"""Longest that the gateway hears nothing of an answer that goes on."""


@dataclass(slots=True, eq=False)
class Job:
    """One Adopt: waits for room, then for its bytes, then runs."""

    name: str
    start: StartDecode
    num_told: int
    told_fs: int
    seq: Seq | None = None


def token_of(seq: Seq) -> int:
    """An engine that answers nothing in particular; but no two requests the same."""
    return seq.request.seed


def sampled_of(seq: Seq) -> Sampled:
    return _sampled(seq.request.seed)


_sampled = lru_cache(maxsize=2**14)(Sampled)
"""The same every time: a request has one token."""


class DecodeRank:
    """`catch_up` is called before the scheduler is asked anything, `arrived` when an answer's bytes are here."""

    def __init__(
        self,
        site: Site,
        worker_id: WorkerId,
        number: int,
        *,
        catch_up: Callable[[], None],
        arrived: Callable[[Job], None],
    ) -> None:
        self.site, self.worker_id, self.number = site, worker_id, number
        self._catch_up, self._arrived = catch_up, arrived
        self.config = site.layout.decode.config
        self.scheduler = Scheduler(self.config, model=MODEL, context_tokens=site.layout.context_tokens)
        self.tasks: list[Task] | None = None
        """The step that runs, unless it is leapt over."""
        self._facts = _NOTHING
        """Of a step in which something happens."""
        self.synced = 0
        """Step of the instance up to which the scheduler has come."""
        self.noisy = False
        """Whether something happens in the step that runs."""
        self.touched = False
        """Whether something was asked while it runs."""
        self.dead = False
        self.fresh = False
        """Whether somebody has begun of whom the SLO controller has not heard: the next step is told."""
        self.has_news = True
        """Whether the gateway should hear of the step that has just ended."""
        self.starting: list[Job] = []
        """Arrived; they run from the next step on."""
        self.jobs: dict[str, Job] = {}
        self._queue: deque[Job] = deque()
        self._ceiling: int | None = None
        self._heartbeat_fs = 0

    @property
    def rows(self) -> int:
        return len(self.scheduler.decode.running)

    @property
    def context(self) -> int:
        return sum([len(seq.tokens) for seq in self.scheduler.decode.running])

    # ---- steps ------------------------------------------------------------------------------------------------------

    def fast_forward_to(self, step: int) -> None:
        if step > self.synced and self.scheduler.decode.running:
            fast_forward(self.scheduler, self.config, step - self.synced, token_of, model=MODEL)
        self.synced = step

    def quiet(self) -> int:
        return 0 if self.fresh else quiet_steps(self.scheduler, self.config)

    def begin(self) -> None:
        """The step after `synced` runs from now on, or has been running since that one ended."""
        self.noisy = self.quiet() == 0
        self.tasks = self.scheduler.schedule() if self.scheduler.busy else []
        self._facts = StepFacts.of(self.tasks) if self.noisy else _NOTHING

    @property
    def prompt_work(self) -> tuple[int, int]:
        """Tokens that the step computes again after a preemption, and the context that they read."""
        return self._facts.prompt_tokens, int(self._facts.prompt_reads)

    def settle(self, step: int, step_s: float) -> None:
        """The step that ran is over, and took so long; what has arrived meanwhile joins the batch."""
        tasks, self.tasks = self.tasks or [], None
        self.synced, self.has_news = step, self.touched or self.noisy
        noisy, self.touched, self.noisy, self.fresh = self.noisy, False, False, False
        facts, self._facts = self._facts, _NOTHING
        events = self.scheduler.settle(tasks, [sampled_of(task.seq) if task.samples else None for task in tasks])
        begun = self.start()
        if noisy and tasks:
            seqs = (*(task.seq for task in tasks), *begun)
            self.scheduler.slo_controller.settled(self.site.timeline.now_s, step_s, facts, 0, seqs)
        elif begun:
            self.fresh = True
        if noisy:
            self._tell_finished([event for event in events if event.finish_reason is not None])
        if self.has_news:
            self._ceiling = self.scheduler.slo_controller.ceiling
            self._admit()

    def start(self) -> list[Seq]:
        """At the end of a step: what has arrived joins the batch."""
        begun = []
        for job in self.starting:
            assert job.seq is not None
            self.scheduler.start(job.seq)
            begun.append(job.seq)
            start = job.start
            self.site.tell(
                self.number, self.worker_id, [TransferDone(self.worker_id, start.request.id, start.attempt, 0)]
            )
        self.starting = []
        return begun

    def heartbeat(self, num_steps: int, *, after_fs: int) -> None:
        """Unless the last one is not so long ago."""
        now_fs = self.site.timeline.now_fs
        if now_fs - self._heartbeat_fs >= after_fs:
            self._heartbeat_fs = now_fs
            waiting = sum(job.start.descriptor.num_tokens for job in self._queue)
            scheduler = self.scheduler
            running = self.rows + len(scheduler.arriving) + len(scheduler.prefill.running)
            held = scheduler.pool.num_held
            waiting += scheduler.num_waiting_tokens
            self.site.tell(
                self.number,
                self.worker_id,
                [Heartbeat(self.worker_id, num_steps, waiting, running, held, self._ceiling)],
            )

    def hello(self) -> Hello:
        size = self.config.num_blocks * self.config.block_tokens
        sizes = (size, self.config.max_running, self.scheduler.context_tokens, 2**31)
        return Hello(PROTOCOL, "decode", self.worker_id, 1, MODEL, *sizes)

    # ---- messages; the instance has caught up before ----------------------------------------------------------------

    def receive(self, message: AnyMessage) -> None:
        match message:
            case StartDecode():
                name = f"{message.request.id}/{message.attempt}"
                now_fs = self.site.timeline.now_fs
                job = self.jobs[name] = Job(name, message, len(message.answered.tokens), now_fs)
                self._queue.append(job)
                self._admit()
                if job.seq is None:
                    late_fs = now_fs + to_fs(message.deadline_s)
                    self.site.timeline.at(late_fs, ARRIVAL, self.number, self._expire, job)
            case Cancel():
                self._forget(f"{message.request_id}/{message.attempt}")

    def arrived(self, job: Job) -> bool:
        """Its bytes are here; False when nobody waits for them any more."""
        if self.jobs.get(job.name) is not job:
            return False
        if not self.site.trusts(_source(job.start)):
            self._refuse(job, "parcel_lost", "the parcel's keeper is gone")
            return False
        self.starting.append(job)
        return True

    def flush(self, *, everything: bool = False) -> None:
        """Tell the gateway of answers that go on, before it thinks that they do not."""
        now_fs = self.site.timeline.now_fs
        due = [job for job in self.jobs.values() if everything or now_fs - job.told_fs >= _TOLD_FS]
        runs = [self._run(job, None) for job in due if job.seq is not None and job.seq.num_generated > job.num_told]
        if runs:
            self.site.tell_runs(self.number, self.worker_id, runs)

    def has_untold(self) -> bool:
        now_fs = self.site.timeline.now_fs
        return any(job.seq is not None and now_fs - job.told_fs >= _TOLD_FS for job in self.jobs.values())

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Room for those that wait, oldest first."""
        while self._queue:
            job = self._queue[0]
            start = job.start
            request = renamed(start.request, job.name)
            job.seq = self.scheduler.attach(
                request, 0, start.answered.tokens, start.descriptor.num_tokens, num_cached=start.num_cached_tokens
            )
            if job.seq is None:
                return
            self._queue.popleft()
            num_bytes = start.descriptor.num_tokens * self.site.layout.token_bytes
            there_fs = self.site.transfer(_source(start), self.number, num_bytes)
            self.site.timeline.at(there_fs, ARRIVAL, self.number, self._arrived, job)

    def _expire(self, job: Job) -> None:
        if job in self._queue and not self.dead:
            self._catch_up()
            self._refuse(job, "overloaded", "no room for it in time")

    def _refuse(self, job: Job, code: str, why: str) -> None:
        self._forget(job.name)
        refused = Refused(self.worker_id, job.start.request.id, job.start.attempt, code, why, "", False)
        self.site.tell(self.number, self.worker_id, [refused])

    def _forget(self, name: str) -> None:
        job = self.jobs.pop(name, None)
        if job is None:
            return
        if job in self._queue:
            self._queue.remove(job)
        if job in self.starting:
            self.starting.remove(job)
        self.scheduler.cancel(name)
        self._admit()

    def _tell_finished(self, events: list[TokenEvent]) -> None:
        runs = [self._run(self.jobs.pop(event.request_id), event) for event in events]
        if runs:
            self.site.tell_runs(self.number, self.worker_id, runs)

    def _run(self, job: Job, last: TokenEvent | None) -> Run:
        """What is new since the gateway was last told."""
        seq, start = job.seq, job.start
        assert seq is not None
        before, generated = job.num_told, seq.num_generated
        job.num_told, job.told_fs = generated, self.site.timeline.now_fs
        token, finish = token_of(seq), last.finish_reason if last else None
        event = TokenEvent(start.request.id, 0, generated - 1, token, finish, None, start.num_cached_tokens)
        return Stamped(start.attempt, event), (token,) * (generated - before - 1)


def renamed(request: Request, name: str) -> Request:
    """Attempts of one request are strangers to a scheduler."""
    return Request(
        id=name, prompt_ids=request.prompt_ids, params=request.params, seed=request.seed, namespace=request.namespace,
        slo=request.slo,
    )  # fmt: skip


def _source(start: StartDecode) -> WorkerId:
    worker, _, epoch = start.descriptor.arena.rpartition(".")
    return WorkerId(worker, int(epoch))
