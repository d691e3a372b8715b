"""A made-up model under the real scheduler: every step is run against a memory of slots and held to an oracle.

The memory holds a chain value (`scheduler_model`) per block and slot. The model reads the one before its first row and
writes one per row; what each sequence should see, get and be counted is known beforehand from the request alone.
"""

from __future__ import annotations

from collections import Counter

from tripool.config import SchedulerConfig
from tripool.core import Request, TokenEvent
from tripool.engine.scheduler import Scheduler
from tripool.prefill.scheduler import Grow
from tripool.sequence import Sampled, Seq, Task

from .scheduler_drafts import check_followers, check_planned, propose
from .scheduler_model import Memory, Shadow, enders, known_prefix, next_token, steps_to_live


class Simulation:
    """Drive it with `add`, `cancel`, `begin` (schedule) and `end` (run, settle); every call checks all it can."""

    def __init__(self, config: SchedulerConfig, context_tokens: int, draft_quality: float | None = None) -> None:
        self.config = config
        self.draft_quality = draft_quality
        """Share of drafts that are right; None: nobody drafts."""
        self.scheduler = Scheduler(config, model="made-up", context_tokens=context_tokens)
        self.memory = Memory(config.num_blocks, config.block_tokens)
        self.names: dict[int, int] = {}
        """Oracle of the prefix index: chain value at a block's end -> block."""
        self.shadows: dict[Seq, Shadow] = {}
        self.in_flight: list[Task] | None = None
        self.num_steps = 0
        self.trace: list[tuple[int, int, int]] = []
        self.seen: Counter[str] = Counter()
        """What the traffic made happen: shows that the checks had something to check."""
        self.preempted: list[Seq] = []
        """In the step that was planned last."""
        self._free_before_release = 0
        self._prompts_planned = False
        self._enough_before_victim = -1
        """After a preemption: blocks that were free before it. Whoever preempted must now take more than those."""
        self._names_at_admission: list[dict[int, int]] = []
        self._admitted: list[Seq] = []
        self._oldest: Shadow | None = None
        self._oldest_deadline = 0
        self.promised = False
        """Whether any request was promised a pace; then some wait that otherwise would not."""
        self.shared = False
        """Whether requests are of different clients; then shares decide before age does."""
        self._observe()

    def _observe(self) -> None:
        """Watch the public verbs that happen inside one call, where order matters."""
        pool, prefill = self.scheduler.pool, self.scheduler.prefill
        pool_allocate, pool_acquire, pool_release = pool.allocate, pool.acquire, pool.release
        prefill_add, prefill_plan, prefill_admit = prefill.add, prefill.plan, prefill._admit

        def allocate(count: int, *, after: int | None = None) -> list[int]:
            assert self.shared or count > self._enough_before_victim, "preempted in vain"
            self._enough_before_victim = -1
            blocks = pool_allocate(count, after=after)
            owned = {block for seq in self.scheduler.holders() for block in seq.table}
            assert not owned.intersection(blocks), "a block was given out while somebody holds it"
            self.names = {value: block for value, block in self.names.items() if block not in blocks}
            self.memory.wipe(blocks)
            return blocks

        def acquire(blocks: list[int]) -> None:
            self._names_at_admission.append(dict(self.names))
            pool_acquire(blocks)

        def admit(seq: Seq) -> bool:
            admitted = prefill_admit(seq)
            self._admitted.extend([seq] if admitted else [])
            return admitted

        def release(blocks: list[int]) -> None:
            self._free_before_release = pool.num_free
            pool_release(blocks)

        def add(seq: Seq) -> None:
            if seq in self.shadows:
                assert not self._prompts_planned, "preempted for a draft"
                self.preempted.append(seq)
                self._enough_before_victim = self._free_before_release
            prefill_add(seq)

        def plan(budget: int, slots: int, grow: Grow) -> list[Task]:
            tasks = prefill_plan(budget, slots, grow)
            self._prompts_planned = True
            return tasks

        pool.allocate, pool.acquire, pool.release, prefill.add, prefill.plan = allocate, acquire, release, add, plan
        prefill._admit = admit

    # ---- events -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.promised |= request.slo.tpot_ms is not None
        self.shared |= bool(request.slo.tenant or request.slo.job)
        room = self.scheduler.context_tokens - len(request.prompt_ids)
        limit = min(request.params.max_tokens or room, room)
        leader: Shadow | None = None
        mine = sorted((s for s in self.scheduler.prefill.waiting if s.request is request), key=lambda s: s.choice)
        assert [seq.choice for seq in mine] == list(range(request.params.n)), "a choice is missing"
        for seq in mine:
            shadow = Shadow(request, seq.choice, limit, leader, deadline=0)
            leader = leader or shadow
            self.shadows[seq] = shadow
            shadow.deadline = self.num_steps + self._patience()
        self._after_event()

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)
        for shadow in self.shadows.values():
            if shadow.request.id == request_id and not shadow.over:
                shadow.over = shadow.cancelled = True
                self.seen["cancelled"] += 1
        self._after_event()

    def begin(self) -> list[Task]:
        assert self.in_flight is None
        self.preempted.clear()
        self._prompts_planned = False
        self._names_at_admission.clear()
        self._admitted.clear()
        preemptions = self.scheduler.num_preemptions
        before = set(self.scheduler.holders())
        tasks = self.in_flight = self.scheduler.schedule()
        self.num_steps += 1
        self.trace.extend((task.seq.order, task.rows.start, task.rows.stop) for task in tasks)
        for task in tasks:
            self.memory.check(task, self.shadows[task.seq])
        self._check_preemptions(before, self.scheduler.num_preemptions - preemptions)
        self._check_admissions(before, tasks)
        self._check_tasks(before, tasks)
        check_planned(self, tasks)
        self._after_event()
        return tasks

    def end(self) -> list[TokenEvent]:
        assert self.in_flight is not None
        tasks, self.in_flight = self.in_flight, None
        samples = {task.seq for task in tasks if task.work.stop == self.shadows[task.seq].num_known}
        values = [self.memory.run(task, self.shadows[task.seq]) for task in tasks]
        for task in tasks:
            shadow = self.shadows[task.seq]
            assert task.samples == (task.seq in samples), "samples when it must not, or the reverse"
            self.seen["cancelled while it ran"] += shadow.over
            self.seen["replay of many rows"] += task.work.decode and len(task.work.tokens) > 1
            if not shadow.over:
                shadow.num_drafted += task.draft is not None
                shadow.draft = None
        certain = [value for value, _ in values]
        events = self._settle(tasks, [v if t.seq in samples else None for t, v in zip(tasks, certain, strict=True)])
        followers = check_followers(self, tasks)
        guessed = {task.seq: value for task, (_, value) in zip(tasks, values, strict=True)}
        events += self._settle(followers, [guessed[task.seq] for task in followers])
        propose(self, [task.seq for task in tasks if task.seq in samples and not self.shadows[task.seq].over])
        self._after_event()
        return events

    def _settle(self, tasks: list[Task], values: list[int | None]) -> list[TokenEvent]:
        """Each task with the chain value that its sampled token follows from, or None if it must not sample."""
        sampled: list[Sampled | None] = []
        due: list[Shadow] = []
        for task, value in zip(tasks, values, strict=True):
            shadow = self.shadows[task.seq]
            token = None if value is None else next_token(value, shadow.request, shadow.choice, shadow.num_events)
            sampled.append(None if token is None else Sampled(token))
            if not shadow.over:
                shadow.num_computed = task.work.stop
                self._name_blocks(task, shadow)
                due.extend([shadow] if token is not None else [])
        events = self.scheduler.settle(tasks, sampled)
        assert len(events) == len(due), "an event is missing or too many"
        for event, shadow in zip(events, due, strict=True):
            self._check_event(event, shadow)
        self.scheduler.check()
        return events

    def drain(self) -> None:
        """Run until idle; then every answer must be there in full and every block back."""
        if self.in_flight is not None:
            self.end()
        # Each in turn from nothing to its end, beside a full house: nobody takes longer than that, whoever goes first.
        last_step = self.num_steps + 10 * (self._patience() + 100)
        while self.scheduler.busy:
            assert self.promised or self.num_steps < last_step, "work without an end"
            self.begin()
            self.end()
        assert self.scheduler.schedule() == [], "an idle scheduler found work"
        assert self.scheduler.pool.num_held == 0, "blocks leaked"
        for shadow in self.shadows.values():
            assert shadow.over, "a request was lost"
            assert shadow.cancelled or shadow.num_known == len(shadow.tokens), "an answer was cut short"

    def _name_blocks(self, task: Task, shadow: Shadow) -> None:
        """Blocks become findable by the step that fills them. Of two equal ones only the first ever gets the name."""
        size = self.config.block_tokens
        if self.config.prefix_reuse:
            for i in range(task.work.start // size, task.work.stop // size):
                self.names.setdefault(shadow.chain[(i + 1) * size - 1], task.work.table[i])

    # ---- what must hold -----------------------------------------------------------------------------------------

    def _check_preemptions(self, before: set[Seq], count: int) -> None:
        """Victims are the youngest holders, as many as counted, and an older one got their blocks."""
        assert count == len(self.preempted) == len(set(self.preempted)), "preemptions miscounted"
        if self.shared:
            self._check_exchanges(before)
        else:
            oldest_victim = min((seq.order for seq in self.preempted), default=0)
            for seq in before:
                spared = seq not in self.preempted
                assert not (self.preempted and spared and seq.order > oldest_victim), "an older one was preempted"
            assert self._enough_before_victim == -1, "preempted in vain"
        self._enough_before_victim = -1
        for victim in self.preempted:
            self.shadows[victim].num_computed = 0
            self.shadows[victim].answering = False
            self.seen["preempted with a draft"] += self.shadows[victim].draft is not None
            self.shadows[victim].draft = None
            self.seen["preempted"] += 1
            self.seen["preempted with an answer"] += self.shadows[victim].num_events > 0

    def _first(self, seqs: set[Seq]) -> set[Seq]:
        """Those that come before background sequences, if there are any; else all."""
        others = any(not shadow.request.slo.background for shadow in self._live())
        return {seq for seq in seqs if not seq.is_background} if others else seqs

    def _check_exchanges(self, before: set[Seq]) -> None:
        """Whatever is shared how: the oldest holder goes on, and no older one makes room for its own group."""
        first = self._first(before)
        assert not first or min(first, key=lambda s: s.order) not in self.preempted, "the oldest was preempted"
        groups = {seq.request.slo.group for seq in self.preempted}
        for group in groups:
            victims = [seq.order for seq in self.preempted if seq.request.slo.group == group]
            spared = [s for s in before if s.request.slo.group == group and s not in self.preempted]
            assert all(seq.order < min(victims) for seq in spared), "an older one of its group was preempted"
        self.seen["exchanged"] += len(self.preempted)

    def _check_admissions(self, before: set[Seq], tasks: list[Task]) -> None:
        """In order of age, nobody overtaken, exactly the known prefix taken, and nobody refused without a reason."""
        size = self.config.block_tokens
        fresh = [task for task in tasks if task.seq not in before or task.seq in self.preempted]
        assert len(fresh) == len(self._names_at_admission), "admitted without work, or worked without admission"
        in_order = [t.seq.order for t in fresh] == sorted(t.seq.order for t in fresh)
        assert self.shared or in_order, "admitted out of order"
        if self.shared:  # whoever was admitted and preempted in one step has no task; here, nobody is
            fresh.sort(key=lambda task: self._admitted.index(task.seq))
        for task, names in zip(fresh, self._names_at_admission, strict=True):
            shadow = self.shadows[task.seq]
            assert shadow.may_start, "started before its leader had computed the prompt"
            found = known_prefix(shadow, names, size)
            assert task.work.start == len(found) * size, "not the longest known prefix"
            assert task.seq.table[: len(found)] == found, "not the blocks of the known prefix"
            shadow.num_computed = task.work.start
            self.seen["hit"] += bool(found)
            self.seen["hit inside the answer"] += task.work.start > shadow.prompt_len
            if shadow.num_cached is None:
                shadow.num_cached = task.work.start
        ready = [seq for seq in self.scheduler.prefill.waiting if self.shadows[seq].may_start]
        self.seen["waited for its leader"] += len(self.scheduler.prefill.waiting) - len(ready)
        self.seen["held back"] += len(list(self.scheduler.holders())) - len(tasks)
        if not ready or self.shared:
            return
        head = min(ready, key=lambda s: s.order)
        assert all(task.seq.order < head.order for task in fresh), "a younger one overtook the head of the queue"
        found = known_prefix(self.shadows[head], self.names, size)
        need = self.shadows[head].num_known // size + 1 - len(found) + self.scheduler.pool.num_idle(found)
        room = len(list(self.scheduler.holders())) + len(self.preempted) < self.config.max_running
        # Rows were kept for those preempted later, and for drafts that then found no block.
        kept = 2 * len(self.preempted) + sum(self.shadows[t.seq].draft != t.draft for t in tasks)
        budget = sum(t.num_rows for t in tasks) + kept < self.config.step_tokens
        held = self.promised and self.scheduler.slo_controller.active
        assert held or not (room and budget and need <= self.scheduler.pool.num_free), "refused although it fits"

    def _check_tasks(self, before: set[Seq], tasks: list[Task]) -> None:
        assert tasks or not self.scheduler.busy, "a busy scheduler found nothing to do"
        first = self._first(before)
        if (
            first
            and not (self.promised and self.scheduler.slo_controller.active)
            and not self.scheduler.time_shares.heavy()
        ):
            assert min(first, key=lambda s: s.order) in {task.seq for task in tasks}, "the oldest holder stood still"
        running = {task.seq for task in tasks}
        assert self._first(running) == running, "a background sequence ran beside another"
        self.seen["paused"] += len(before) > len(first)
        assert sum(task.num_rows for task in tasks) <= self.config.step_tokens, "more rows than a step has"
        assert len({task.seq for task in tasks}) == len(tasks), "a sequence has two tasks"
        assert len(list(self.scheduler.holders())) <= self.config.max_running, "more sequences than slots"
        size = self.config.block_tokens
        for seq in before.intersection(self.scheduler.holders()) - {task.seq for task in tasks}:
            room = len(seq.table) * size > self.shadows[seq].num_computed
            left_out = seq in self.scheduler.decode.left_out
            assert left_out or not (self.shadows[seq].answering and room), "a prompt made an answer wait"
        owners = Counter(block for seq in self.scheduler.holders() for block in seq.table)
        published = set(self.names.values())
        for task in tasks:
            work, shadow = task.work, self.shadows[task.seq]
            assert not shadow.over, "work for a sequence that is over"
            assert work.table is task.seq.table, "a task of blocks the sequence no longer holds"
            assert work.start == shadow.num_computed, "a token computed twice, or skipped"
            assert work.tokens == shadow.tokens[work.start : work.stop] != [], "not the sequence's tokens"
            assert work.stop <= shadow.num_known, "computes a token nobody knows yet"
            assert work.decode == (work.start >= shadow.prompt_len), "wrong form"
            assert work.decode or work.stop <= shadow.prompt_len, "not cut at the prompt's end"
            for block in work.table[work.start // size : -(-task.rows.stop // size)]:
                assert owners[block] == 1, "writes into a shared block"
                assert block not in published, "writes into a published block"

    def _check_event(self, event: TokenEvent, shadow: Shadow) -> None:
        assert (event.request_id, event.choice) == (shadow.request.id, shadow.choice)
        assert event.index == shadow.num_events, "token indices must run 0, 1, 2, ..."
        assert event.token_id == shadow.tokens[shadow.num_known], "not the token of an undisturbed run"
        assert event.num_cached_tokens == (shadow.leader or shadow).num_cached, "cached tokens miscounted"
        drafts = (shadow.num_drafted, shadow.num_accepted)
        assert (event.num_draft_tokens, event.num_accepted_draft_tokens) == drafts, "drafts miscounted"
        shadow.num_events += 1
        shadow.answering = True
        finish = None
        if shadow.num_known == len(shadow.tokens):
            finish = "stop" if event.token_id in enders(shadow.request) else "length"
            shadow.over = True
        assert event.finish_reason == finish, "finished too early, too late, or for the wrong reason"

    def _after_event(self) -> None:
        self.scheduler.check()
        live = self._live()
        assert self.scheduler.busy == bool(live)
        if self.promised or self.shared:
            return  # how long they wait is told in seconds, or depends on what others have
        for shadow in live:
            assert self.num_steps < shadow.deadline, "starved"
        oldest = next(iter(live), None)
        if oldest is not self._oldest:
            self._oldest = oldest
            self._oldest_deadline = self.num_steps
            if oldest is not None:
                holders = [self.shadows[seq] for seq in self.scheduler.holders()]
                self._oldest_deadline += steps_to_live(oldest, holders)
        if oldest is not None:
            assert self.num_steps < self._oldest_deadline, "the oldest request does not get through"

    def _live(self) -> list[Shadow]:
        """Oldest first: shadows are kept in order of arrival."""
        return [shadow for shadow in self.shadows.values() if not shadow.over]

    def _patience(self) -> int:
        """For the newest sequence: each of those before it becomes the oldest in turn, behind a full house at worst."""
        house = self.config.max_running * (self.scheduler.context_tokens - 1)
        return sum(shadow.most_rows + house for shadow in self._live()) + 1
