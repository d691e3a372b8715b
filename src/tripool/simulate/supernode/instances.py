"""Instances in virtual time: when the steps of their engines begin and end, and when their workers take a turn.

A prefill instance is one worker. A decode instance is many: every rank of an expert-parallel instance takes part in
every step, so that all end together, and how long a step takes depends on the batch of the whole instance. Between two
steps at which something happens, one line says how many steps are over at any moment.
"""

from __future__ import annotations

from heapq import heappop, heappush

from tripool.decode.worker import DecodeWorker
from tripool.messages import AnyMessage, WorkerId
from tripool.prefill.worker import PrefillWorker
from tripool.simulate.supernode.layout import Site
from tripool.simulate.supernode.links import Link
from tripool.simulate.supernode.modelled_engine import DecodeEngine, KeysOf, PrefillEngine
from tripool.simulate.supernode.pool import CachePool, ModelledClient
from tripool.simulate.supernode.process import ModelledTransfer, Process
from tripool.simulate.supernode.step_times import NO_TROUBLE, Line, Trouble, span_fs, steps_in, steps_within
from tripool.simulate.timeline import FS, STEP, TICK, to_fs

_HEARTBEAT_FS = to_fs(1.5)
"""Between two heartbeats of a worker that has nothing new to say; the gateway suspects it after two seconds."""
_NEWS_FS = to_fs(0.5)
"""Between two heartbeats of one that has."""
_RECENT_FS = to_fs(0.4)
"""A worker that has just sent one for another reason is passed over: the next comes before the gateway suspects it."""
_REPORT_FS = to_fs(5.0)


class PrefillInstance:
    def __init__(self, site: Site, worker_id: WorkerId, number: int, pool: CachePool, keys_of: KeysOf) -> None:
        self._site, self.worker_id, self._number = site, worker_id, number
        self._client = ModelledClient(site, pool, worker_id, number)
        self.send_link = Link(site.layout.links.send_bytes_per_s)
        self.slowness = 1.0
        self.dead = False
        self._began_fs = 0
        config = site.layout.prefill.config
        self.engine = engine = PrefillEngine(config, site.timeline, site.layout.context_tokens, keys_of)

        def make(process: Process) -> PrefillWorker:
            sender = ModelledTransfer(site, worker_id, number, engine, lambda: None).sender()
            clock = site.timeline.clock
            return PrefillWorker(engine, worker_id, sender, process.send, pool=self._client, clock=clock)

        self.process = Process(site, "prefill", worker_id, number, engine, make)
        self._keep_alive()

    def kill(self) -> None:
        self.dead = self.process.dead = True

    def cut(self, until_fs: int) -> None:
        """Its links take nothing new until then."""
        self._client.cut(until_fs)
        self.send_link.cut(until_fs)

    def receive(self, message: AnyMessage) -> None:
        self.process.messages.append(message)
        self._go()
        self.process.flush()

    def _go(self) -> None:
        """A turn of the worker, and the step that follows from it, unless one runs. To be flushed."""
        engine, timeline = self.engine, self._site.timeline
        if engine.tasks is not None and engine.over_s is None:
            return
        self.process.turn()
        work = engine.begin()
        if work is None:
            return  # nothing to compute, or all memory is held by KV that is to be sent: a Release comes
        self._began_fs = timeline.now_fs + self._client.wait_fs
        step_fs = to_fs(self._site.layout.prefill_times.step_s(*work) * self.slowness)
        timeline.at(self._began_fs + step_fs, STEP, self._number, self._end)

    def _end(self) -> None:
        if self.dead:
            return
        now_fs = self._site.timeline.now_fs
        self._site.slices.span("prefill busy", 1, self._began_fs, now_fs)
        self.engine.over_s = (now_fs - self._began_fs) / FS
        self._go()
        self.process.heartbeat(after_fs=_NEWS_FS)

    def _keep_alive(self) -> None:
        if not self.dead:
            timeline = self._site.timeline
            self._go()
            self.process.heartbeat(after_fs=_RECENT_FS)
            timeline.at(timeline.now_fs + _HEARTBEAT_FS, TICK, self._number, self._keep_alive)


class DecodeRank:
    """One worker of a decode instance. `wake`: called when something has come for it."""

    def __init__(self, site: Site, worker_id: WorkerId, number: int, instance: DecodeInstance, index: int) -> None:
        self.worker_id = worker_id
        self.engine = engine = DecodeEngine(site.layout.decode.config, site.timeline, site.layout.context_tokens)
        transfer = ModelledTransfer(site, worker_id, number, engine, lambda: instance.wake(self, index))

        def make(process: Process) -> DecodeWorker:
            return DecodeWorker(engine, worker_id, transfer.receiver(), process.send, clock=site.timeline.clock)

        self.process = Process(site, "decode", worker_id, number, engine, make)


class DecodeInstance:
    def __init__(self, site: Site, worker_ids: list[WorkerId], first: int) -> None:
        """`first`: number of its first worker among all."""
        self._site, self._first = site, first
        self.trouble: Trouble = NO_TROUBLE
        self.ranks: list[DecodeRank | None] = []
        self._rows, self._base = 0, 0
        """Of all batches together: `context = base + rows x step`."""
        self._parts: list[tuple[int, int]] = [(0, 0)] * len(worker_ids)
        """Each rank's share of those."""
        self._live: set[int] = set()
        """Ranks whose current step is taken by itself, and those that join at its end."""
        self._woken: set[int] = set()
        """Ranks whose worker has something to do at the end of the current step."""
        self._news: list[tuple[int, int, int]] = []
        """(step, rank, version): in which step something happens next, for ranks whose steps are skipped."""
        self._versions = [0] * len(worker_ids)
        self._stepping = False
        self._line = Line(0, 0, 1)
        self._batch, self._context = 0, 0
        """Of the steps under way: rows, and their context at `_origin`. What changes meanwhile counts later."""
        self._end_fs = -1
        self._origin_fs, self._origin = 0, 0
        self._target, self._plans = 0, 0
        self._extra_fs = 0
        for index, worker_id in enumerate(worker_ids):
            self.ranks.append(DecodeRank(site, worker_id, first + index, self, index))
        site.timeline.at(_HEARTBEAT_FS, TICK, first, self._heartbeat)
        site.timeline.at(_REPORT_FS, TICK, first, self._report)

    # ---- from outside -----------------------------------------------------------------------------------------------

    def receive(self, index: int, message: AnyMessage) -> None:
        rank = self.ranks[index]
        if rank is not None:
            rank.process.messages.append(message)
            self.wake(rank, index)

    def wake(self, rank: DecodeRank, index: int) -> None:
        """The worker takes a turn: at once, if no step of its own runs, or else at the end of that step."""
        if self.ranks[index] is not rank:
            return
        engine = rank.engine
        if engine.skipping or engine.tasks is not None:
            if index not in self._woken:
                self._woken.add(index)
                self._cut()
            return
        rank.process.turn()
        rank.process.flush()
        if not engine.busy:
            return
        if self._stepping:
            self._live.add(index)
            self._cut()
        else:
            self._origin_fs = self._site.timeline.now_fs
            self._go_on(index)
            self._plan()

    def set_trouble(self, trouble: Trouble) -> None:
        """From the next step on."""
        self.trouble = trouble
        self._cut()

    def kill(self, indices: list[int], stall_s: float) -> None:
        """These ranks are gone; the others stand still until they are masked."""
        for index in indices:
            rank = self.ranks[index]
            if rank is None:
                continue
            if rank.engine.skipping:
                rank.engine.pass_quietly(self._steps_done())
            rank.engine.reports = True  # what was computed before the end has been sent
            rank.process.worker.work(self._site.timeline.now_s)
            rank.process.flush()
            rank.process.dead = True
            self.ranks[index] = None
            self._live.discard(index)
            self._woken.discard(index)
            self._versions[index] += 1
            self._register(index, 0, 0)
        if self._stepping:
            self._extra_fs += to_fs(stall_s)
            self._cut()

    def revive(self, index: int, worker_id: WorkerId) -> None:
        if self.ranks[index] is None:
            self.ranks[index] = DecodeRank(self._site, worker_id, self._first + index, self, index)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _steps_done(self) -> int:
        """Whole steps up to now; one that ends at this moment is over."""
        if not self._stepping:
            return self._origin
        span, most = self._site.timeline.now_fs - self._origin_fs, self._target - self._origin - 1
        return self._origin + steps_in(self._line, self._context, self._batch, most, span)

    def _cut(self) -> None:
        """Something changes: the next step is the last one that can be foreseen."""
        if self._stepping:
            self._aim(self._steps_done() + 1)

    def _aim(self, target: int) -> None:
        span = span_fs(self._line, self._context, self._batch, target - self._origin)
        end_fs = self._origin_fs + span + self._extra_fs
        if end_fs == self._end_fs:
            return
        self._target, self._end_fs = target, end_fs
        self._plans += 1
        self._site.timeline.at(end_fs, STEP, self._first, self._boundary, self._plans)

    def _boundary(self, plan: int) -> None:
        """The step that was aimed at is over."""
        if plan != self._plans:
            return
        step, now_fs = self._target, self._site.timeline.now_fs
        line, slices = self._line, self._site.slices
        last_context = self._context + self._batch * (step - 1 - self._origin)
        last_fs = line.fixed_fs + line.token_fs * last_context + self._extra_fs
        self._extra_fs = 0
        slices.span("decode rows", self._batch, self._origin_fs, now_fs)
        slices.span("decode busy", 1, self._origin_fs, now_fs)
        if self._news and self._news[0][0] <= step:
            self._resume(step)
        self._origin_fs, self._origin = now_fs, step
        here = sorted(self._live | self._woken) if self._woken else sorted(self._live)
        for index in here:
            self._settle(index, last_fs / FS)
        if self._woken:
            self._woken.clear()
        for index in here:
            self._go_on(index)
        self._plan()

    def _settle(self, index: int, step_s: float) -> None:
        rank = self.ranks[index]
        assert rank is not None
        engine, process = rank.engine, rank.process
        if engine.tasks is not None and engine.noisy:
            engine.over_s = step_s
        elif engine.tasks is not None or engine.skipping:
            engine.pass_quietly(self._origin)
        if engine.over_s is not None or index in self._woken:
            process.turn()
            process.heartbeat(after_fs=_NEWS_FS)

    def _resume(self, step: int) -> None:
        """Ranks in whose part of this step something happens take it by itself."""
        while self._news and self._news[0][0] <= step:
            _, index, version = heappop(self._news)
            rank = self.ranks[index]
            if rank is None or version != self._versions[index]:
                continue
            rank.engine.fast_forward_to(step - 1)
            if not self._foresee(rank, index):
                rank.engine.begin(noisy=True)
                self._live.add(index)

    def _go_on(self, index: int) -> None:
        """After a step at which the rank came to the present: how the next ones are taken."""
        rank = self.ranks[index]
        assert rank is not None
        engine = rank.engine
        self._live.discard(index)
        self._versions[index] += 1
        engine.synced = self._origin
        rows = engine.rows
        self._register(index, rows, (engine.context if rows else 0) - rows * self._origin)
        fast_forwards = self._site.layout.fast_forwards
        if engine.busy and not (fast_forwards and self._foresee(rank, index)):
            engine.begin(noisy=True if fast_forwards else None)
            self._live.add(index)

    def _foresee(self, rank: DecodeRank, index: int) -> bool:
        """Skip its steps until something happens; False when that is in the next step."""
        quiet = rank.engine.quiet()
        rank.engine.skipping = quiet > 0
        if quiet:
            self._versions[index] += 1
            heappush(self._news, (rank.engine.synced + quiet + 1, index, self._versions[index]))
        return quiet > 0

    def _plan(self) -> None:
        self._stepping = bool(self._rows or self._live)
        if not self._stepping:
            return
        rows, context = self._rows, self._base + self._rows * self._origin
        self._batch, self._context = rows, context
        layout = self._site.layout
        self._line = layout.decode_times.line(rows or 1, context, self.trouble)
        if not self._live:
            target = self._origin + steps_within(self._line, context, rows)
        else:
            target = self._origin + 1
            again = max([self._rank(index).engine.prompt_work for index in self._live])
            if again[0]:
                self._extra_fs += to_fs(layout.replay_times.added_s(*again))
        news, versions = self._news, self._versions
        while news and news[0][2] != versions[news[0][1]]:
            heappop(news)
        if news and news[0][0] < target:
            target = news[0][0]
        self._aim(target)

    def _rank(self, index: int) -> DecodeRank:
        rank = self.ranks[index]
        assert rank is not None
        return rank

    # ---- ticks ------------------------------------------------------------------------------------------------------

    def _register(self, index: int, rows: int, base: int) -> None:
        old_rows, old_base = self._parts[index]
        self._parts[index] = rows, base
        self._rows += rows - old_rows
        self._base += base - old_base

    def _heartbeat(self) -> None:
        """Also a turn for workers with something that waits: it may be overdue."""
        for index, rank in enumerate(self.ranks):
            if rank is not None:
                if rank.process.worker.moving:
                    self.wake(rank, index)
                rank.process.heartbeat(after_fs=_RECENT_FS)
        self._site.timeline.at(self._site.timeline.now_fs + _HEARTBEAT_FS, TICK, self._first, self._heartbeat)

    def _report(self) -> None:
        for index, rank in enumerate(self.ranks):
            if rank is not None and rank.engine.has_due:
                rank.engine.reports = True
                self.wake(rank, index)
        self._site.timeline.at(self._site.timeline.now_fs + _REPORT_FS, TICK, self._first, self._report)
