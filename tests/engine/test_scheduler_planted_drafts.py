"""A test of the tests: bugs in drafting and verifying do not get past the simulation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import tripool.prefill.scheduler as prefill_scheduler
from tripool.core import TokenEvent
from tripool.engine.scheduler import Scheduler
from tripool.prefill import PrefillScheduler
from tripool.sequence import Sampled, Seq, Task, Work

from .scheduler_plant import Bugs

bug = Bugs()


@bug("a token computed twice, or skipped|computed beyond what is known")
def drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    settle = Scheduler.settle

    def hopeful(self: Scheduler, tasks: Sequence[Task], sampled: Sequence[Sampled | None]) -> list[TokenEvent]:
        events = settle(self, tasks, sampled)
        for task in tasks:
            if task.draft is not None and task.seq.finish is None:
                task.seq.num_computed += 1
        return events

    patch.setattr(Scheduler, "settle", hopeful)


@bug("no block for a row")
def a_draft_needs_no_block(patch: pytest.MonkeyPatch) -> None:
    def blind(self: Scheduler, task: Task) -> None:
        task.draft = task.seq.draft

    patch.setattr(Scheduler, "_add_draft", blind)


@bug("preempted for a draft")
def a_draft_is_worth_preempting_for(patch: pytest.MonkeyPatch) -> None:
    def ruthless(self: Scheduler, task: Task) -> None:
        stop = task.work.stop + 1
        if self._grow(task.seq, stop, {}) == stop:
            task.draft = task.seq.draft

    patch.setattr(Scheduler, "_add_draft", ruthless)


@bug("left out although there is room")
def drafts_never_get_a_new_block(patch: pytest.MonkeyPatch) -> None:
    def timid(self: Scheduler, task: Task) -> None:
        if len(task.seq.table) * self._config.block_tokens > task.work.stop:
            task.draft = task.seq.draft

    patch.setattr(Scheduler, "_add_draft", timid)


@bug("more rows than a step has")
def budget_ignores_drafts(patch: pytest.MonkeyPatch) -> None:
    plan = PrefillScheduler.plan

    def generous(self: PrefillScheduler, budget: int, slots: int, grow: prefill_scheduler.Grow) -> list[Task]:
        return plan(self, budget + 1, slots, grow)

    patch.setattr(PrefillScheduler, "plan", generous)


@bug("wrong draft was accepted")
def every_draft_is_right(patch: pytest.MonkeyPatch) -> None:
    verify = Scheduler.verify

    def gullible(self: Scheduler, task: Task) -> Task | None:
        if task.draft is not None and task.seq.finish is None:
            task.draft = task.seq.tokens[task.work.stop]
        return verify(self, task)

    patch.setattr(Scheduler, "verify", gullible)


@bug("right draft was thrown away")
def no_draft_is_right(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "verify", lambda self, task: None)


@bug("wrong draft was accepted|right draft was thrown away")
def a_draft_is_compared_with_the_token_before(patch: pytest.MonkeyPatch) -> None:
    def shifted(self: Scheduler, task: Task) -> Task | None:
        seq = task.seq
        if task.draft is None or seq.finish is not None or seq.tokens[task.work.stop - 1] != task.draft:
            return None
        return Task(seq, seq.work(1))

    patch.setattr(Scheduler, "verify", shifted)


@bug("outlived its step")
def an_unused_draft_stays(patch: pytest.MonkeyPatch) -> None:
    settle = Scheduler.settle

    def forgetful(self: Scheduler, tasks: Sequence[Task], sampled: Sequence[Sampled | None]) -> list[TokenEvent]:
        drafts = [task.seq.draft for task in tasks]
        events = settle(self, tasks, sampled)
        for task, draft in zip(tasks, drafts, strict=True):
            if task.seq.wants_draft and task.draft is None:
                task.seq.draft = draft
        return events

    patch.setattr(Scheduler, "settle", forgetful)


@bug("outlived its sequence's blocks")
def a_draft_survives_a_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def forgetful(self: Scheduler, seq: Seq) -> None:
        draft = seq.draft
        preempt(self, seq)
        seq.draft = draft

    patch.setattr(Scheduler, "preempt", forgetful)


@bug("drafts miscounted")
def thrown_away_drafts_are_counted_as_accepted(patch: pytest.MonkeyPatch) -> None:
    verify = Scheduler.verify

    def proud(self: Scheduler, task: Task) -> Task | None:
        follower = verify(self, task)
        if task.draft is not None and follower is None:
            task.seq.num_accepted += 1
            self.num_accepted += 1
        return follower

    patch.setattr(Scheduler, "verify", proud)


@bug("not the token of an undisturbed run")
def the_second_token_comes_from_the_first_row(patch: pytest.MonkeyPatch) -> None:
    """The draft's row is not run at all: its place holds the row before it."""
    rows = Task.rows.fget
    assert rows is not None

    def stuttering(self: Task) -> Work:
        work: Work = rows(self)
        if self.draft is not None:
            work.tokens[-1] = work.tokens[-2]
        return work

    patch.setattr(Task, "rows", property(stuttering))


@bug("a draft is wanted when no step can use it")
def drafts_for_an_answer_that_ends_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seq, "wants_draft", property(lambda self: self.finish is None and self.prompt_done))


@pytest.mark.parametrize("name", bug.plants)
def test_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.expect_caught(name, monkeypatch)
