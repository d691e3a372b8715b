"""A test of the tests: bugs in order, preemption and counting do not get past the simulation."""

from __future__ import annotations

from typing import Any

import pytest

import tripool.prefill.scheduler as prefill_scheduler
from tripool.config import SchedulerConfig
from tripool.core import FinishReason, Request, SamplingParams, TokenEvent
from tripool.engine.scheduler import Scheduler
from tripool.prefill import PrefillScheduler
from tripool.sequence import Sampled, Seq, Task, Work

from .scheduler_plant import Bugs
from .scheduler_sim import Simulation

bug = Bugs()


@bug("stood still|an older one was preempted|shows foreign KV")
def preempts_the_oldest(patch: pytest.MonkeyPatch) -> None:
    def unfair(self: Scheduler, seq: Seq, stop: int, tasks: dict[int, Task]) -> int:
        need = -(-stop // self._config.block_tokens) - len(seq.table)
        while not self.pool.can_allocate(need):
            victim = min((s for s in self.holders() if s is not seq), key=lambda s: s.order)
            tasks.pop(victim.order, None)
            self.preempt(victim)
        seq.table.extend(self.pool.allocate(max(need, 0)))
        return stop

    patch.setattr(Scheduler, "_grow", unfair)


@bug("an older one was preempted|shows foreign KV")
def preempts_one_older_than_itself(patch: pytest.MonkeyPatch) -> None:
    """Never gives way: when it is itself the youngest, it takes the next."""

    def selfish(self: Scheduler, seq: Seq, stop: int, tasks: dict[int, Task]) -> int:
        need = -(-stop // self._config.block_tokens) - len(seq.table)
        while not self.pool.can_allocate(need):
            victim = max((s for s in self.holders() if s is not seq), key=lambda s: s.order)
            tasks.pop(victim.order, None)
            self.preempt(victim)
        seq.table.extend(self.pool.allocate(max(need, 0)))
        return stop

    patch.setattr(Scheduler, "_grow", selfish)


@bug("shows foreign KV|admitted without work")
def preempted_task_still_runs(patch: pytest.MonkeyPatch) -> None:
    grow = Scheduler._grow
    patch.setattr(Scheduler, "_grow", lambda self, seq, stop, tasks: grow(self, seq, stop, {}))


@bug("preemptions miscounted")
def preempted_one_is_lost(patch: pytest.MonkeyPatch) -> None:
    def careless(self: Scheduler, seq: Seq) -> None:
        self._drop(seq)
        seq.num_computed = 0
        self.num_preemptions += 1

    patch.setattr(Scheduler, "preempt", careless)


@bug("samples when it must not|longest known prefix")
def preempted_one_loses_its_answer(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def from_scratch(self: Scheduler, seq: Seq) -> None:
        preempt(self, seq)
        del seq.tokens[seq.prompt_len :]

    patch.setattr(Scheduler, "preempt", from_scratch)


@bug("not the sequence's tokens")
def computed_count_one_short(patch: pytest.MonkeyPatch) -> None:
    init = Work.__init__

    def short(self: Work, *args: Any) -> None:
        init(self, *args)
        self.stop -= 1

    patch.setattr(Work, "__init__", short)


@bug("finished too early, too late")
def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    finish_reason = Seq.finish_reason

    def late(self: Seq, position: int) -> FinishReason | None:
        finish = finish_reason(self, position)
        return None if finish == "length" and self.num_generated == self.max_new_tokens else finish

    patch.setattr(Seq, "finish_reason", late)


@bug("token indices must run")
def indices_start_at_one(patch: pytest.MonkeyPatch) -> None:
    take = Scheduler._take

    def shifted(self: Scheduler, task: Task, result: Sampled) -> TokenEvent:
        event = take(self, task, result)
        return TokenEvent(event.request_id, event.choice, event.index + 1, event.token_id, event.finish_reason)

    patch.setattr(Scheduler, "_take", shifted)


@bug("not cut at the prompt's end")
def prompt_not_cut_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    def uncut(self: Seq, count: int) -> Work:
        start = self.num_computed
        return Work(self.tokens[start : start + count], start, self.table, start >= self.prompt_len)

    patch.setattr(Seq, "work", uncut)
    patch.setattr(Seq, "work_stop", lambda self, count: min(self.num_computed + count, len(self.tokens)))


@bug("overtook the head|admitted out of order")
def the_queue_is_a_stack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillScheduler, "add", lambda self, seq: self.waiting.insert(0, seq))


@bug("overtook the head")
def small_ones_overtake(patch: pytest.MonkeyPatch) -> None:
    plan = PrefillScheduler.plan

    def eager(self: PrefillScheduler, budget: int, slots: int, grow: prefill_scheduler.Grow) -> list[Task]:
        """Whoever stands at the head and does not fit is hidden for this step, so that the next one may try."""
        tasks = plan(self, budget, slots, grow)
        hidden = self.waiting[:1]
        budget -= sum(len(task.work.tokens) for task in tasks)
        slots -= len({t.seq for t in tasks})
        if hidden and budget > 0 and slots > 0:
            running, self.running = self.running, []
            self.waiting.remove(hidden[0])
            tasks += plan(self, budget, slots, grow)
            self.running = sorted(running + self.running, key=lambda s: s.order)
            self.waiting.insert(0, hidden[0])
        return tasks

    patch.setattr(PrefillScheduler, "plan", eager)


@bug("before its leader")
def choices_do_not_wait_for_their_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seq, "waits", property(lambda self: False))


@bug("more rows than a step has")
def budget_ignores_decoding_rows(patch: pytest.MonkeyPatch) -> None:
    plan = PrefillScheduler.plan

    def generous(self: PrefillScheduler, budget: int, slots: int, grow: prefill_scheduler.Grow) -> list[Task]:
        return plan(self, self._config.step_tokens, slots, grow)

    patch.setattr(PrefillScheduler, "plan", generous)


@bug("more sequences than slots")
def slots_ignore_decoding_sequences(patch: pytest.MonkeyPatch) -> None:
    plan = PrefillScheduler.plan

    def generous(self: PrefillScheduler, budget: int, slots: int, grow: prefill_scheduler.Grow) -> list[Task]:
        return plan(self, budget, self._config.max_running - len(self.running), grow)

    patch.setattr(PrefillScheduler, "plan", generous)


@bug("a prompt made an answer wait|left out although there is room")
def nobody_is_handed_over_to_decode(patch: pytest.MonkeyPatch) -> None:
    """They go on as prompts of one token each: the same answers, but behind every older prompt."""
    take = Scheduler._take

    def and_back(self: Scheduler, task: Task, result: Sampled) -> TokenEvent:
        event, seq = take(self, task, result), task.seq
        if seq in self.decode.running:
            self.decode.remove(seq)
            self.prefill.running.append(seq)
            self.prefill.running.sort(key=lambda s: s.order)
        return event

    patch.setattr(Scheduler, "_take", and_back)


@bug("an event is missing or too many")
def cancelled_result_is_counted(patch: pytest.MonkeyPatch) -> None:
    settle = Scheduler.settle

    def blind(self: Scheduler, tasks: list[Task], sampled: list[Sampled | None]) -> list[TokenEvent]:
        events = settle(self, tasks, sampled)
        for task, result in zip(tasks, sampled, strict=True):
            if task.seq.finish == "abort" and result is not None:
                seq = task.seq
                events.append(TokenEvent(seq.request.id, seq.choice, seq.num_generated, result.token_id))
        return events

    patch.setattr(Scheduler, "settle", blind)


@bug("cached tokens miscounted")
def cached_tokens_counted_again_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def recount(self: Scheduler, seq: Seq) -> None:
        preempt(self, seq)
        seq.num_cached = None

    patch.setattr(Scheduler, "preempt", recount)


@pytest.mark.parametrize("name", bug.plants)
def test_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.expect_caught(name, monkeypatch)


def one_block_short(sim: Simulation) -> None:
    """Three old ones grow in the step in which a prompt wants two blocks, and the only younger holder has one."""
    for number in range(3):
        sim.add(make_request(f"old {number}", [number, number], max_tokens=8))
    sim.add(make_request("two choices", [4] * 18, max_tokens=1, n=2))
    sim.add(make_request("young", [3], max_tokens=8))
    sim.drain()


def make_request(name: str, prompt: list[int], **params: int) -> Request:
    return Request(id=name, prompt_ids=tuple(prompt), params=SamplingParams(**params), seed=0)


def test_a_preemption_in_vain_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SchedulerConfig(num_blocks=10, block_tokens=4, max_running=5, step_tokens=14, prefix_reuse=False)
    sim = Simulation(config, context_tokens=40)
    one_block_short(sim)
    assert sim.scheduler.num_preemptions > 0

    def hasty(self: Scheduler, seq: Seq, stop: int, tasks: dict[int, Task]) -> int:
        """All or nothing, and the younger ones lose their work before it is clear that it is nothing."""
        need = -(-stop // self._config.block_tokens) - len(seq.table)
        while not self.pool.can_allocate(need):
            youngest = max(self.holders(), key=lambda s: s.order)
            if youngest is seq:
                return seq.num_computed
            tasks.pop(youngest.order, None)
            self.preempt(youngest)
        seq.table.extend(self.pool.allocate(max(need, 0)))
        return stop

    monkeypatch.setattr(Scheduler, "_grow", hasty)
    with pytest.raises(AssertionError, match="preempted in vain"):
        one_block_short(Simulation(config, context_tokens=40))


def test_starvation_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the local claims about order switched off, the bound on the oldest request's steps still speaks up."""

    def only_note(self: Simulation, before: set[Seq], tasks: list[Task]) -> None:
        for task in tasks:
            if task.seq not in before or task.seq in self.preempted:
                self.shadows[task.seq].num_computed = task.work.start
                self.shadows[task.seq].num_cached = task.seq.num_cached

    monkeypatch.setattr(Simulation, "_check_admissions", only_note)
    bug.expect_caught("the_queue_is_a_stack", monkeypatch, caught_by="does not get through")
