"""A decode instance in virtual time: workers that step together, and the leap to the next step that matters. Pure.

Every rank of an expert-parallel instance takes part in every step, so that all end together; how long one takes depends
on the batch of the whole instance. Between two steps at which something happens the instance knows by one line how
many steps are over at any moment.
"""

from __future__ import annotations

from heapq import heappop, heappush

from tripool.messages import AnyMessage, Cancel, StartDecode, WorkerId
from tripool.simulate.supernode.engines import NO_TROUBLE, Line, Trouble, span_fs, steps_in, steps_within
from tripool.simulate.supernode.rank import DecodeRank, Job
from tripool.simulate.supernode.site import Site
from tripool.simulate.supernode.timeline import FS, STEP, TICK, to_fs

_HEARTBEAT_FS = to_fs(1.5)
"""Between two pulses of a worker that has nothing new to say; the gateway bears two seconds of silence."""
_TELL_FS = to_fs(5.0)
_NEWS_FS = to_fs(0.5)
"""Between two pulses of one that has."""
_RECENT_FS = to_fs(0.4)
"""Whoever has just sent one for another reason is passed over: two pulses and this are less than what is borne."""


class DecodeInstance:
    def __init__(self, site: Site, number: int, worker_ids: list[WorkerId], first: int) -> None:
        self._site, self._number = site, number
        self.trouble: Trouble = NO_TROUBLE
        self.ranks: list[DecodeRank | None] = []
        self._first = first
        self._rows, self._base = 0, 0
        """Of all batches together: `context = base + rows x step`."""
        self._parts: list[tuple[int, int]] = [(0, 0)] * len(worker_ids)
        """Each rank's share of those."""
        self._live: set[int] = set()
        """Ranks whose current step is being taken by itself."""
        self._news: list[tuple[int, int, int]] = []
        """(step, rank, version): in which step something happens next, for ranks that are leapt over."""
        self._versions = [0] * len(worker_ids)
        self._stepping = False
        self._line = Line(0, 0, 1)
        self._batch, self._context = 0, 0
        """Of the steps under way: rows, and their context at `_origin`. What changes meanwhile counts later."""
        self._end_fs = -1
        self._origin_fs, self._origin = 0, 0
        self._target, self._plans = 0, 0
        self._extra_fs = 0
        for worker_id in worker_ids:
            self.ranks.append(self._new(worker_id, len(self.ranks)))
        site.timeline.at(_HEARTBEAT_FS, TICK, first, self._heartbeat)
        site.timeline.at(_TELL_FS, TICK, first, self._tell)

    def _new(self, worker_id: WorkerId, index: int) -> DecodeRank:
        rank: DecodeRank = DecodeRank(
            self._site, worker_id, self._first + index,
            catch_up=lambda: self._catch_up(rank, index), arrived=lambda job: self._arrived(rank, index, job),
        )  # fmt: skip
        rank.synced = self._steps_done()
        self._site.tell(rank.number, worker_id, [rank.hello()])
        return rank

    # ---- from outside -----------------------------------------------------------------------------------------------

    def receive(self, index: int, message: AnyMessage) -> None:
        rank = self.ranks[index]
        if rank is not None and isinstance(message, (StartDecode, Cancel)):
            self._catch_up(rank, index)
            rank.receive(message)

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
            self._catch_up(rank, index)
            rank.flush(everything=True)
            rank.dead = True
            self.ranks[index] = None
            self._live.discard(index)
            self._versions[index] += 1
            self._register(index, 0, 0)
        if self._stepping:
            self._extra_fs += to_fs(stall_s)
            self._cut()

    def revive(self, index: int, worker_id: WorkerId) -> None:
        if self.ranks[index] is None:
            self.ranks[index] = self._new(worker_id, index)

    @property
    def num_running(self) -> int:
        return self._rows

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _steps_done(self) -> int:
        """Whole steps up to now; what ends at this very moment is over."""
        if not self._stepping:
            return self._origin
        span, most = self._site.timeline.now_fs - self._origin_fs, self._target - self._origin - 1
        return self._origin + steps_in(self._line, self._context, self._batch, most, span)

    def _catch_up(self, rank: DecodeRank, index: int) -> None:
        if self._stepping:
            done = self._steps_done()
            if rank.tasks is None and rank.rows:
                rank.fast_forward_to(done)
                rank.begin()
                self._live.add(index)
                self._versions[index] += 1
                self._cut()
            elif rank.tasks is None:
                rank.synced = done
        rank.touched = True

    def _arrived(self, rank: DecodeRank, index: int, job: Job) -> None:
        if self.ranks[index] is not rank:
            return
        self._catch_up(rank, index)
        if not rank.arrived(job):
            return
        if not self._stepping:
            self._origin_fs = self._site.timeline.now_fs
            rank.settle(self._origin, 0.0)
            self._go_on(rank, index)
            self._plan()
        else:
            self._live.add(index)
            self._cut()

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
        last_fs = self._line.step_fs(self._context + self._batch * (step - 1 - self._origin)) + self._extra_fs
        self._extra_fs = 0
        self._site.slices.span("decode rows", self._batch, self._origin_fs, now_fs)
        self._site.slices.span("decode busy", 1, self._origin_fs, now_fs)
        self._wake(step)
        self._origin_fs, self._origin = now_fs, step
        settled = []
        for index in sorted(self._live):
            rank = self.ranks[index]
            assert rank is not None
            rank.settle(step, last_fs / FS)
            settled.append((index, rank))
        for index, rank in settled:
            self._go_on(rank, index)
        self._plan()

    def _wake(self, step: int) -> None:
        """Ranks in whose part of this step something happens take it by itself."""
        while self._news and self._news[0][0] <= step:
            _, index, version = heappop(self._news)
            rank = self.ranks[index]
            if rank is None or version != self._versions[index]:
                continue
            rank.fast_forward_to(step - 1)
            if not self._foresee(rank, index):
                rank.begin()
                self._live.add(index)

    def _go_on(self, rank: DecodeRank, index: int) -> None:
        """After a step that was taken by itself: how the next ones are taken."""
        self._live.discard(index)
        rank.synced = self._origin
        if rank.has_news:
            rank.heartbeat(self._origin, after_fs=_NEWS_FS)
        self._register_now(rank, index)
        if not rank.scheduler.busy:
            return
        if not (self._site.fast_forwards and self._foresee(rank, index)):
            rank.begin()
            self._live.add(index)

    def _foresee(self, rank: DecodeRank, index: int) -> bool:
        """Let it lag behind until something happens; False when that is in the next step."""
        quiet = rank.quiet()
        if quiet:
            self._versions[index] += 1
            heappush(self._news, (rank.synced + quiet + 1, index, self._versions[index]))
        return quiet > 0

    def _plan(self) -> None:
        self._stepping = bool(self._rows or self._live)
        if not self._stepping:
            return
        rows, context = self._rows, self._base + self._rows * self._origin
        self._batch, self._context = rows, context
        layout = self._site.layout
        self._line = layout.decode_times.line(max(1, rows), context, self.trouble)
        target = self._origin + steps_within(self._line, context, rows)
        if self._live:
            target = self._origin + 1
            work = [self.ranks[index].prompt_work for index in self._live]  # type: ignore[union-attr]
            again = max(work)
            if again[0]:
                self._extra_fs += to_fs(layout.replay_times.step_s(*again))
        while self._news and self._news[0][2] != self._versions[self._news[0][1]]:
            heappop(self._news)
        if self._news:
            target = min(target, self._news[0][0])
        self._aim(target)

    # ---- books ------------------------------------------------------------------------------------------------------

    def _register_now(self, rank: DecodeRank, index: int) -> None:
        rows = rank.rows
        self._register(index, rows, rank.context - rows * rank.synced)

    def _register(self, index: int, rows: int, base: int) -> None:
        old_rows, old_base = self._parts[index]
        self._parts[index] = rows, base
        self._rows += rows - old_rows
        self._base += base - old_base

    def _heartbeat(self) -> None:
        done = self._steps_done()
        for rank in self.ranks:
            if rank is not None:
                rank.heartbeat(done, after_fs=_RECENT_FS)
        self._site.timeline.at(self._site.timeline.now_fs + _HEARTBEAT_FS, TICK, self._first, self._heartbeat)

    def _tell(self) -> None:
        for index, rank in enumerate(self.ranks):
            if rank is not None and rank.has_untold():
                self._catch_up(rank, index)
                rank.flush()
        self._site.timeline.at(self._site.timeline.now_fs + _TELL_FS, TICK, self._first, self._tell)
