"""The scheduler of an engine: continuous batching of prefill and decode over one block pool. Pure.

`schedule` returns the tasks of the next step, `settle` takes the sampled tokens. Preemption is by recomputation: a
sequence that needs a block takes those of the youngest holder, or waits if it is the youngest. Between tenants,
`engine/batch_shares.py` decides: slots and blocks are taken from the group that has more than its share.

A sequence may have a draft of its next token (`propose`), which runs as a second row if there is free room. After
`settle`, `verify` says whether it was accepted; then its row is settled like any other.

Between two processes a sequence moves with its blocks. The sender: `detach` takes it out of the batch with its blocks
held, `release` frees them once they are copied. The receiver: `attach` holds blocks for it, `start` puts it into the
batch once they are filled. Neither kind can be preempted. With a TPOT objective, `slo_controller` bounds which
sequences start and how many prompt tokens a step computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

from tripool.cache import BlockPool, HeldBlocks
from tripool.config import SchedulerConfig
from tripool.core import FinishReason, Request, TokenEvent
from tripool.decode import DecodeScheduler, SloController, StepFacts
from tripool.engine.background import Background, yield_to_others
from tripool.engine.batch_shares import Sharing
from tripool.engine.invariants import check_invariants, check_prompt
from tripool.engine.time_shares import TimeShares
from tripool.errors import InvalidRequest
from tripool.prefill import PrefillScheduler
from tripool.sequence import UNKNOWN, Guide, Sampled, Seq, Task


class Scheduler:
    def __init__(self, config: SchedulerConfig, *, model: str, context_tokens: int) -> None:
        self._config = config
        self.block_tokens, self.max_running = config.block_tokens, config.max_running
        self.context_tokens = min(context_tokens, config.num_blocks * config.block_tokens)
        """Longest sequence there can be: the model's context, or all of the KV memory if that is less."""
        self.pool = BlockPool(config.num_blocks)
        self.prefill = PrefillScheduler(config, self.pool, model)
        self.decode = DecodeScheduler()
        self.slo_controller = SloController()
        self.time_shares = TimeShares(self.slo_controller.step_time)
        self.background = Background(self.slo_controller.step_time)
        self.sharing = Sharing(config, self.pool, self._running, self.holders)
        self._hands_over = False
        """Answers continue in another process: nothing decodes here, and no TPOT objective applies."""
        self._ended_s: float | None = None
        """When the last step ended, if there was work left then."""
        self.arriving, self.detached = list[Seq](), list[Seq]()
        """From and to other processes, their blocks being copied."""
        self.kept = HeldBlocks(self.pool)
        self.requests: dict[str, list[Seq]] = {}
        self._next_order = 0
        self.num_preemptions = self.num_drafted = self.num_accepted = self._num_accepted_before = 0
        """The last: at the end of the last step but this."""

    @property
    def busy(self) -> bool:
        """Whether anything may be computed; what only arrives or leaves is not."""
        return bool(self.decode.running or self.prefill.running or self.prefill.waiting)

    def add(
        self,
        request: Request,
        guides: Sequence[Guide] | None = None,
        answered: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """`answered`: the choices that are still open, with what is known of each; all of them, without a token, when
        not given. Known tokens are computed again, never chosen again.

        `guides`: one per open choice, after its known tokens, when the answers must have a structure.
        """
        check_prompt(request, self.context_tokens)
        if request.id in self.requests:
            raise InvalidRequest(f"request id '{request.id}' is in use", param="request_id")
        leader: Seq | None = None
        known: Mapping[int, Sequence[int]] = answered or dict.fromkeys(range(request.params.n), ())
        seqs = [self._new(request, *one) for one in known.items()]
        for position, seq in enumerate(seqs):
            seq.leader = leader
            seq.guide = guides[position] if guides is not None else None
            leader = leader or seq
            self.requests.setdefault(request.id, []).append(seq)
            self._joined(seq)
            self.prefill.add(seq)

    def detach(self, request_id: str, choice: int) -> Seq:
        """Take a sequence that has just answered out of the batch; it keeps its blocks until `release`."""
        seq = next(seq for seq in self.decode.running if (seq.request.id, seq.choice) == (request_id, choice))
        self.decode.remove(seq)
        self._hands_over, seq.draft = True, None
        self.detached.append(seq)
        return seq

    def release(self, seq: Seq) -> None:
        """A detached sequence is copied, and no longer ours. Its full blocks stay findable until the room is needed."""
        assert seq in self.detached
        self._retire(seq, None)
        self._forget(seq)

    def can_attach(self, request: Request, choice: int, num_tokens: int, num_shared: int = 0) -> bool:
        """Whether there is room for a sequence of so many tokens, or those who must make it."""
        return self._making_room(request, choice, num_tokens, num_shared) is not None

    def _making_room(self, request: Request, choice: int, num_tokens: int, num_shared: int) -> list[Seq] | None:
        """Preemptions if it is attached; None: it has to wait. Preempted sequences are older and go first."""
        victims = self.sharing.room_for(request.slo, num_tokens, num_shared, self.prefill.waiting)
        promised = self.slo_controller.active or request.slo.tpot_ms is not None
        if victims is None or not promised or request.slo.background:
            return victims
        running = [seq for seq in self._running() if seq not in victims and not seq.is_background]
        return victims if self.slo_controller.may_arrive(running, request, choice, num_tokens) else None

    def attach(
        self,
        request: Request,
        choice: int,
        answer: Sequence[int],
        num_computed: int,
        *,
        num_cached: int = 0,
        guide: Guide | None = None,
        shared: Sequence[int] = (),
    ) -> Seq | None:
        """Blocks for a sequence that was computed elsewhere up to its newest token; None while there is no room.

        `shared`: its leading full blocks that another sequence holds here. The caller fills the others, then `start`s
        it.
        """
        assert num_computed == len(request.prompt_ids) + len(answer) - 1 >= len(request.prompt_ids)
        assert len(shared) <= num_computed // self._config.block_tokens
        victims = self._making_room(request, choice, num_computed + 1, len(shared))
        if victims is None:
            return None
        self.slo_controller.computes_prompts = False
        seq = self._new(request, choice, answer)
        self._joined(seq)
        self.pool.acquire(shared)
        for victim in victims:
            self.preempt(victim)
        seq.table.extend(shared)
        need = len(seq.tokens) // self._config.block_tokens + 1 - len(shared)
        seq.table.extend(self.pool.allocate(need, after=shared[-1] if shared else None))
        seq.num_computed, seq.num_cached, seq.guide = num_computed, num_cached, guide
        self.requests.setdefault(request.id, []).append(seq)
        self.arriving.append(seq)
        return seq

    def start(self, seq: Seq) -> None:
        """An attached sequence's blocks are filled: it runs from the next step on."""
        self.arriving.remove(seq)
        self.decode.admit(seq)
        self.prefill.publish(seq, seq.num_computed)

    def cancel(self, request_id: str) -> None:
        """Give everything back at once. Unknown or finished ids are fine: a cancel may cross the last token."""
        for seq in self.requests.pop(request_id, []):
            if seq.finish is None:
                self._retire(seq, "abort")

    def schedule(self) -> list[Task]:
        tasks: dict[int, Task] = {}
        size = self.block_tokens

        def grow(seq: Seq, stop: int) -> int:
            return stop if stop <= len(seq.table) * size else self._grow(seq, stop, tasks)

        prefill, decode = self.prefill, self.decode
        decoding, paused = yield_to_others(self) if self.background.num_open else (decode.running, frozenset())
        # What is preempted in this step may start again in it, but no background sequence that is paused.
        prefill.queue = self._queue() if prefill.waiting or paused else prefill.waiting
        turn = prefill.limit = self.time_shares.next(decoding, chain(prefill.running, prefill.queue))
        decode.left_out, prefill.left_out = self.time_shares.left_out(turn, decoding) | paused, paused
        for task in decode.plan(grow):
            if task.work.table is task.seq.table:  # else it was preempted after its turn
                tasks[task.seq.order] = task
        running = len(decode.running) + len(prefill.running) + len(self.arriving)
        slots = self._config.max_running - running
        budget = self.background.prompt_tokens(self._config.step_tokens - len(tasks))
        # Drafts have their rows before prompts, but leave them one, and their blocks after everybody else.
        drafting = [task for task in tasks.values() if task.seq.draft is not None][: budget - 1]
        budget -= len(drafting)
        if self._keeps_slos:
            slots, budget = self._keep_slos(tasks, slots, budget, len(drafting))
        for task in prefill.plan(budget, slots, grow):
            if task.work.table is task.seq.table:
                tasks[task.seq.order] = task
        for task in drafting:
            if tasks.get(task.seq.order) is task:
                self._add_draft(task)
        return list(tasks.values())

    def _queue(self) -> Sequence[Seq]:
        """Those that wait, in the order in which they may start. Room is made for the first, if it is due to it."""
        prefill, waiting = self.prefill, self.background.allowed(self.prefill.waiting)
        if not self.sharing.active:
            return waiting
        ready = [seq for seq in waiting if not seq.waits]
        under_way = sum(len(seq.tokens) - seq.num_computed for seq in prefill.running) + len(self.decode.running)
        head = next(self.sharing.order(ready), None)
        if head is not None and under_way < self._config.step_tokens:  # else the next step has no token left for it
            victims = self.sharing.victims(self.sharing.claim(head), prefill.blocks_needed(head)) or []
            rest = [seq for seq in self._running() if seq not in victims] if victims and self._keeps_slos else None
            if rest is None or self.slo_controller.slots(rest, [head], 1) > 0:
                for victim in victims:
                    self.preempt(victim)
        return list(islice(self.sharing.order(ready), self._config.max_running - len(self._running()) + 1))

    @property
    def _keeps_slos(self) -> bool:
        return self.slo_controller.active and not self._hands_over

    def _keep_slos(self, tasks: Mapping[int, Task], slots: int, budget: int, num_drafts: int) -> tuple[int, int]:
        """Newcomers and prompt tokens of this step, so that promised answers keep their pace."""
        running = [seq for seq in self._running() if seq not in self.background.paused]
        slots = self.slo_controller.slots(running, (seq for seq in self.prefill.queue if not seq.waits), slots)
        if tasks and (self.prefill.running or slots > 0):  # without a row that waits for it, nothing bounds a prompt
            start = self.prefill.running[0].num_computed if self.prefill.running else 0
            tokens = self.slo_controller.prompt_tokens([task.seq for task in tasks.values()], num_drafts, start)
            budget = budget if tokens is None else min(budget, tokens)
        return slots, budget

    def timed(self, tasks: Sequence[Task], began_s: float, ended_s: float) -> None:
        """A step was settled, and took so long. What comes between two steps that follow each other counts as well."""
        step_s = ended_s - (began_s if self._ended_s is None else self._ended_s)
        self._ended_s = ended_s if self.busy else None
        accepted, self._num_accepted_before = self.num_accepted - self._num_accepted_before, self.num_accepted
        self.background.settled(ended_s, tasks)
        facts, seqs = StepFacts.of(tasks), (task.seq for task in tasks)
        self.slo_controller.settled(ended_s, step_s, facts, accepted, seqs, learn=self.time_shares.active)
        if self.slo_controller.computes_prompts:  # else no request waits here for a first token
            self.time_shares.settled(ended_s, step_s, tasks, facts)

    def advance(self, tasks: Sequence[Task]) -> None:
        """The tasks run: their sequences go on before the step is settled, with tokens that are `UNKNOWN`. Those whose
        token is not chosen by logits and noise alone stay as they are, and out of the next `schedule`."""
        for task in tasks:
            seq = task.seq
            seq.num_pending += task.samples
            if task.samples and not seq.is_simple:
                continue
            task.in_flight, seq.num_computed = True, task.work.stop
            if task.samples:
                seq.tokens.append(UNKNOWN)
                self._answers(seq)

    def settle(self, tasks: Sequence[Task], sampled: Sequence[Sampled | None]) -> list[TokenEvent]:
        """Account for a step that ran: `sampled` holds a token for each task that samples, None for the others."""
        pairs = zip(tasks, sampled, strict=True)
        return [event for task, result in pairs if (event := self.settle_one(task, result)) is not None]

    def settle_one(self, task: Task, result: Sampled | None) -> TokenEvent | None:
        seq, work = task.seq, task.work
        if seq.finish is not None:  # cancelled while the step ran, or its answer ended a step earlier
            return None
        assert task.samples == (result is not None)
        seq.draft = None
        if work.table is seq.table:  # else it was preempted while the step ran
            seq.num_computed = work.stop if work.stop > seq.num_computed else seq.num_computed
            self.prefill.publish(seq, work.stop)
        if task.draft is not None:
            seq.num_drafted += 1
            self.num_drafted += 1
        return None if result is None else self._take(task, result)

    def verify(self, task: Task) -> Task | None:
        """After its task was settled: whether a draft is the token that was sampled. If so, a task for its row, which
        has run already and says what comes next."""
        seq, stop = task.seq, task.work.stop
        if task.draft is None or seq.finish is not None or seq.tokens[stop] != task.draft:
            return None
        assert seq.num_computed == stop == len(seq.tokens) - 1
        seq.num_accepted += 1
        self.num_accepted += 1
        return Task(seq, seq.work(1))

    def propose(self, seq: Seq, draft: int) -> None:
        """A guess at what follows the newest token. One that would end the answer is not worth a row."""
        assert seq.wants_draft
        if draft not in seq.stop_ids:
            seq.draft = draft

    def holders(self) -> Iterator[Seq]:
        """Those in the batch, whose blocks an older one may take."""
        return chain(self.decode.running, self.prefill.running)

    def _running(self) -> list[Seq]:
        """Those that hold a place in the batch, or soon will."""
        return [*self.decode.running, *self.prefill.running, *self.arriving]

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens that are not computed yet."""
        return sum(len(seq.tokens) - seq.num_computed for seq in chain(self.prefill.waiting, self.prefill.running))

    def check(self) -> None:
        check_invariants(self, self._config, [s for seqs in self.requests.values() for s in seqs if s.finish is None])

    def _take(self, task: Task, result: Sampled) -> TokenEvent:
        seq, position = task.seq, task.work.stop
        seq.tokens[position : position + 1] = (result.token_id,)
        seq.num_pending -= seq.num_pending > 0
        if seq.guide is not None:
            seq.guide.accept(result.token_id)
        finish = seq.finish_reason(position)
        if finish is not None:
            del seq.tokens[position + 1 :]  # what runs after the end
            self._retire(seq, finish)
            self._forget(seq)
        elif not task.in_flight:
            self._answers(seq)
        cached = min((seq.leader or seq).num_cached or 0, seq.prompt_len)  # of a replay more may be found, its answer
        facts = (result.token_id, finish, result.logprobs, cached, seq.num_drafted, seq.num_accepted)
        scores, index = seq.take_prompt_scores(), position - seq.prompt_len
        return TokenEvent(seq.request.id, seq.choice, index, *facts, None, scores)

    def _answers(self, seq: Seq) -> None:
        """A sequence has a new token: it decodes from now on."""
        if seq in self.prefill.running:
            self.prefill.remove(seq)
            self.decode.admit(seq)

    def _grow(self, seq: Seq, stop: int, tasks: dict[int, Task]) -> int:
        """Blocks for positions up to `stop`, or as far as there is room; none is preempted in vain."""
        need = -(-stop // self._config.block_tokens) - len(seq.table)
        if not self.pool.can_allocate(need):
            takeable = self.sharing.takeable(seq, need)
            need = min(need, self.pool.num_free + self.pool.num_freed_by([s.table for s in takeable]))
            for victim in takeable:
                if self.pool.can_allocate(need):
                    break
                tasks.pop(victim.order, None)
                self.preempt(victim)
        seq.table.extend(self.pool.allocate(max(need, 0), after=seq.table[-1] if seq.table else None))
        return min(stop, len(seq.table) * self._config.block_tokens)

    def _add_draft(self, task: Task) -> None:
        """Let the draft run, if there is room for its KV without preempting anyone: it may be for nothing."""
        seq, size = task.seq, self._config.block_tokens
        stop = task.work.stop + 1
        # One position more, where the next draft would be made, unless the answer ends before that.
        wanted = min(stop + 1, seq.prompt_len + seq.max_new_tokens - 1)
        need = min(-(-wanted // size) - len(seq.table), self.pool.num_free)
        seq.table.extend(self.pool.allocate(max(need, 0), after=seq.table[-1] if seq.table else None))
        if len(seq.table) * size >= stop:
            task.draft = seq.draft

    def preempt(self, seq: Seq) -> None:
        self._drop(seq)
        seq.num_computed = 0
        seq.carry = None
        self.num_preemptions += 1
        self.prefill.add(seq)

    def _new(self, request: Request, choice: int, answer: Sequence[int]) -> Seq:
        most, asked = self.context_tokens - len(request.prompt_ids), request.params.max_tokens
        max_new_tokens = asked if asked is not None and asked < most else most
        if len(answer) >= max_new_tokens:
            raise InvalidRequest(f"choice {choice} has {len(answer)} of at most {max_new_tokens} tokens already")
        self._ended_s = self._ended_s if self.busy else None  # idle time is no part of a step
        seq = Seq(request, choice, self._next_order, max_new_tokens, [*request.prompt_ids, *answer])
        self._next_order += 1
        return seq

    def _joined(self, seq: Seq) -> None:
        for policy in (self.slo_controller, self.sharing, self.background):
            policy.joined(seq)

    def _retire(self, seq: Seq, finish: FinishReason | None) -> None:
        self._drop(seq)
        seq.finish = finish
        for policy in (self.slo_controller, self.sharing, self.background):
            policy.left(seq)

    def _forget(self, seq: Seq) -> None:
        """One choice less; with the last one the request."""
        seqs = self.requests[seq.request.id]
        seqs.remove(seq)
        if not seqs:
            del self.requests[seq.request.id]

    def _drop(self, seq: Seq) -> None:
        """Out of its queue, blocks back to the pool."""
        for queue in (self.decode.running, self.detached, self.arriving):
            if seq in queue:
                queue.remove(seq)
                break
        else:
            self.prefill.remove(seq)
        self.pool.release(seq.table)
        seq.table, seq.num_published, seq.draft = [], 0, None
