"""Accounts, paces and patience: what one answer can bear, and what the controller does about it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.core import FinishReason, Request, SamplingParams, Slo
from tripool.decode import SloController, StepFacts, slo_controller
from tripool.sequence import Seq

FIXED_S, ROW_S, PROMPT_S = 0.005, 0.0005, 0.00005


def cost_s(rows: int, prompt: int = 0) -> float:
    return FIXED_S + ROW_S * rows + PROMPT_S * prompt


def make_seq(order: int, tpot_ms: float | None, *, generated: int = 0, max_tokens: int = 200) -> Seq:
    request = Request(
        id=f"r{order}",
        prompt_ids=tuple(range(50)),
        params=SamplingParams(),
        seed=0,
        slo=Slo(tpot_ms=tpot_ms),
    )
    return Seq(request, 0, order, max_tokens, list(range(50 + generated)), num_computed=49 + generated)


class Desk:
    """A controller, and a batch that takes a token each per step."""

    def __init__(self) -> None:
        self.slo_controller = SloController()
        self.now_s = 0.0
        self.batch: list[Seq] = []
        self.num_seqs = 0

    def learn(self) -> Desk:
        for number in range(400):
            rows, prompt = number % 23, (0, 100, 300)[number % 3]
            self.now_s += cost_s(rows, prompt)
            self.slo_controller.settled(self.now_s, cost_s(rows, prompt), StepFacts(rows, 0, rows * 50, prompt), 0, ())
        return self

    def new(self, tpot_ms: float | None, max_tokens: int = 200) -> Seq:
        self.num_seqs += 1
        seq = make_seq(self.num_seqs, tpot_ms, max_tokens=max_tokens)
        self.slo_controller.joined(seq)
        return seq

    def add(self, tpot_ms: float | None, max_tokens: int = 200) -> Seq:
        seq = self.new(tpot_ms, max_tokens)
        self.batch.append(seq)
        return seq

    def step(self, took_s: float | None = None, prompt: int = 0) -> None:
        facts = StepFacts(len(self.batch), 0, sum(len(seq.tokens) for seq in self.batch), prompt)
        took_s = cost_s(facts.rows, prompt) if took_s is None else took_s
        self.now_s += took_s
        for seq in self.batch:
            seq.tokens.append(1)
        self.slo_controller.settled(self.now_s, took_s, facts, 0, self.batch)
        self.check()

    def end(self, seq: Seq, finish: FinishReason = "length") -> None:
        self.batch.remove(seq)
        seq.finish = finish
        self.slo_controller.left(seq)
        self.check()

    def check(self) -> None:
        self.slo_controller.check(self.batch)

    def chunk(self) -> int | None:
        return self.slo_controller.prompt_tokens(self.batch, 0, 0)


def test_a_piece_of_a_prompt_fits_into_what_the_tightest_promise_leaves() -> None:
    desk = Desk().learn()
    desk.add(None)
    desk.step()
    assert desk.chunk() is None, "nobody there was promised anything"
    desk.add(30.0)
    assert desk.chunk() is None, "its first token is not there yet: no pace to keep"
    desk.step()
    relaxed = desk.chunk()
    desk.add(15.0)
    desk.step()
    strict = desk.chunk()
    assert relaxed is not None and strict is not None and strict < relaxed
    assert 0.8 * 15 <= 1000 * cost_s(3, strict) <= 15


def test_slack_is_earned_by_fast_steps_and_lost_by_slow_ones() -> None:
    desk = Desk().learn()
    desk.add(15.0)
    desk.step()
    fresh = desk.chunk()
    for _ in range(20):
        desk.step()
    earned = desk.chunk()
    assert fresh is not None and earned is not None and earned > 2 * fresh
    desk.step(took_s=0.5)
    assert desk.chunk() < fresh, "half a second late: it has to catch up first"
    for _ in range(150):
        desk.step()
    assert desk.chunk() > fresh


def test_prompts_get_a_piece_now_and_then_whatever_was_promised() -> None:
    desk = Desk().learn()
    for _ in range(18):
        desk.add(14.2, max_tokens=4000)
    pieces = []
    for _ in range(100):
        desk.step()
        pieces.append(desk.chunk())
    assert set(pieces) == {0, slo_controller._LEAST_CHUNK}, "a step of these rows alone takes the whole promise"
    assert pieces.count(slo_controller._LEAST_CHUNK) == 100 // slo_controller._PATIENT_STEPS
    assert desk.slo_controller.num_forced == pieces.count(slo_controller._LEAST_CHUNK)


def test_late_answers_make_their_class_more_careful_and_no_other() -> None:
    desk = Desk().learn()

    def bears(tpot_ms: float) -> int:
        waiting = [desk.new(tpot_ms) for _ in range(60)]
        granted = desk.slo_controller.slots([], waiting, 60)
        for seq in waiting:
            desk.slo_controller.left(seq)
        desk.slo_controller._recent.clear()
        return granted

    def answer(hiccup_s: float = 0.0) -> None:
        seq = desk.add(15.0, max_tokens=1000)
        for number in range(6):
            desk.step(cost_s(1) + hiccup_s * (number == 3))
        desk.end(seq)

    for _ in range(60):
        answer()
    desk.learn()
    before = bears(15.0), bears(50.0)
    for _ in range(5):
        answer(hiccup_s=0.2)
    for _ in range(60):
        answer()
    desk.learn()
    careful = bears(15.0), bears(50.0)
    assert careful[0] < before[0] and careful[1] == before[1]
    for _ in range(1200):
        answer()
    desk.learn()
    assert bears(15.0) == before[0], "kept a thousand times: as bold as before"


@pytest.mark.parametrize(("tpot_ms", "most"), [(10.0, 9), (15.0, 19), (30.0, 44)])
def test_as_many_may_start_as_a_class_bears(tpot_ms: float, most: int) -> None:
    desk = Desk().learn()
    waiting = [desk.new(tpot_ms) for _ in range(60)]
    granted = desk.slo_controller.slots([], waiting, 60)
    assert 0.75 * most <= granted <= most, "the line through the known steps says so"
    assert desk.slo_controller.ceiling is not None and abs(desk.slo_controller.ceiling - granted) <= 1
    assert desk.slo_controller.held_back
    assert desk.slo_controller.slots([], waiting, 3) == 3, "other bounds stay"
    assert not desk.slo_controller.held_back


def test_one_strict_request_in_the_queue_bounds_all_who_come_before_it() -> None:
    desk = Desk().learn()
    relaxed = [desk.new(50.0) for _ in range(60)]
    free = desk.slo_controller.slots([], relaxed, 60)
    strict = desk.new(10.0)
    assert desk.slo_controller.slots([], [*relaxed, strict], 61) < free / 3


def test_a_class_counts_for_a_moment_after_it_has_gone() -> None:
    """As long as an answer takes: else the batch is full of others when the next of its kind comes."""
    desk = Desk().learn()
    relaxed = desk.add(50.0)
    strict = desk.add(10.0)
    for _ in range(40):
        desk.step()
    desk.end(strict)
    waiting = [desk.new(50.0) for _ in range(60)]
    desk.batch += waiting
    shortly_after = desk.slo_controller.slots([relaxed], waiting, 60)
    desk.batch = [relaxed]
    for _ in range(60):
        desk.now_s += 0.006
        relaxed.tokens.append(1)
        desk.slo_controller.settled(desk.now_s, 0.006, StepFacts(1, 0, 100), 0, [relaxed])
    assert desk.slo_controller.slots([relaxed], waiting, 60) > 3 * shortly_after


@pytest.mark.parametrize("tpot_ms", [0.0, 0.01, 5.0])
def test_what_could_not_be_kept_alone_binds_nobody_and_is_counted(tpot_ms: float) -> None:
    desk = Desk().learn()
    hopeless = desk.add(tpot_ms)
    desk.step()
    desk.step()
    assert desk.slo_controller.num_given_up == 1
    assert desk.chunk() is None
    waiting = [desk.new(None) for _ in range(60)]
    assert desk.slo_controller.slots(desk.batch, waiting, 60) == 60
    assert desk.slo_controller.ceiling is None
    desk.batch += waiting
    desk.end(hopeless)
    assert not desk.slo_controller.active


def test_the_head_of_the_queue_is_patient_but_not_for_ever() -> None:
    desk = Desk().learn()
    for _ in range(30):
        desk.add(None)
    desk.step()
    strict = desk.new(10.0)
    desk.batch.append(strict)
    running = desk.batch[:-1]
    began_s = desk.now_s
    while not desk.slo_controller.slots(running, [strict], 5):
        desk.now_s += cost_s(30)
        desk.slo_controller.settled(desk.now_s, cost_s(30), StepFacts(30, 0, 1500), 0, ())
    assert desk.now_s - began_s == pytest.approx(slo_controller._PATIENCE_S, abs=0.2)
    assert desk.slo_controller.num_forced == 1


def test_accepted_drafts_make_a_longer_step_bearable() -> None:
    """Two tokens per step and row: the promise on each is kept by steps of twice its length."""
    plain, drafting = Desk().learn(), Desk().learn()
    for _ in range(300):
        drafting.now_s += cost_s(10)
        drafting.slo_controller.settled(drafting.now_s, cost_s(10), StepFacts(10, 0, 500), 10, ())
        plain.now_s += cost_s(10)
        plain.slo_controller.settled(plain.now_s, cost_s(10), StepFacts(10, 0, 500), 0, ())
    for desk in (plain, drafting):
        for _ in range(20):
            desk.now_s += cost_s(10)
            desk.new(10.0)
            desk.slo_controller.settled(
                desk.now_s, cost_s(10), StepFacts(10, 0, 500), 10 if desk is drafting else 0, ()
            )
    waiting = [make_seq(1000 + number, 10.0) for number in range(60)]
    assert drafting.slo_controller.slots([], waiting, 60) >= 2 * plain.slo_controller.slots([], waiting, 60)


Event = tuple[str, float | None, float]
events = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "step", "step", "step", "slow", "end", "ask"]),
        st.sampled_from([None, 0.0, 0.01, 6.0, 15.0, 50.0, 1e9]),
        st.floats(0.0, 0.05),
    ),
    max_size=80,
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(events, st.booleans())
def test_any_history_leaves_it_able_to_go_on(history: list[Event], learned: bool) -> None:
    desk = Desk().learn() if learned else Desk()
    for kind, tpot_ms, took_s in history:
        if kind == "add":
            desk.add(tpot_ms)
        elif kind == "end" and desk.batch:
            desk.end(desk.batch[0], "stop")
        elif kind == "ask":
            waiting = [desk.new(tpot_ms) for _ in range(3)]
            granted = desk.slo_controller.slots(desk.batch, waiting, 2)
            assert 0 <= granted <= 2
            assert granted >= 1 or desk.batch, "alone, anybody may run"
            for seq in waiting:
                seq.finish = "abort"
                desk.slo_controller.left(seq)
        else:
            desk.step(took_s * (20 if kind == "slow" else 1))
        chunk = desk.chunk()
        assert chunk is None or chunk == 0 or chunk >= slo_controller._LEAST_CHUNK
        desk.check()
    while desk.batch:
        desk.end(desk.batch[0])
    assert (
        not desk.slo_controller.active
        and desk.slo_controller.ceiling is None
        and desk.slo_controller.slots([], [], 5) == 0
    )


def test_an_objective_that_not_even_one_row_keeps_does_not_hold_others_back() -> None:
    """Steps that are slow now and then, for a reason that the controller does not see, as another rank's prompt: it
    kept the batch at one row, which makes no step shorter, and memory and time were left unused."""
    desk = Desk()
    for _ in range(8):
        desk.add(50.0)
    for number in range(60):
        desk.step(took_s=(0.03, 0.03, 0.072)[number % 3])
    controller = desk.slo_controller
    times = controller.step_time
    assert not any(account.given_up for account in controller._accounts.values())
    assert 0.05 - times.error_s < times.fixed_s + times.row_s, "by its estimate a row alone would be too slow"
    assert controller.may_arrive(desk.batch, make_seq(99, 50.0).request, 0, 50)
    assert controller.ceiling is None
