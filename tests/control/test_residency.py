"""Which models are in memory: within the budget, never a busy one away, first asked first served, nobody forgotten."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tripool.control.residency import RETRY_S, Load, Residency, Unload

NAMES = ["a", "b", "c", "d"]


def ready(residency: Residency, name: str, now_s: float = 0.0) -> None:
    residency.want(name, now_s)
    while residency.state(name) != "ready":
        for decision in residency.decide():
            if isinstance(decision, Load):
                residency.loaded(decision.name, residency.needs(decision.name))
            else:
                residency.left(decision.name)
        residency.check()


def test_without_a_budget_everything_stays():
    residency = Residency({"a": 10**12, "b": 10**12}, None)
    ready(residency, "a")
    ready(residency, "b")
    assert residency.state("a") == "ready" and residency.shortage("b") is None


def test_the_one_used_longest_ago_makes_room():
    residency = Residency(dict.fromkeys(NAMES, 4), 12)
    for now_s, name in enumerate("abc"):
        ready(residency, name, now_s)
    residency.opened("a", 9.0)
    residency.closed("a", 10.0)
    residency.want("d", 11.0)
    assert residency.decide() == [Unload("b")]
    assert residency.decide() == [], "said once"
    residency.left("b")
    assert residency.decide() == [Load("d")]


def test_a_busy_one_is_never_unloaded_and_the_shortage_is_told():
    residency = Residency({"a": 7, "b": 5}, 10)
    ready(residency, "a")
    residency.opened("a", 1.0)
    residency.want("b", 2.0)
    assert residency.decide() == []
    short = residency.shortage("b")
    assert (short.needs, short.in_use, short.missing, short.for_ever) == (5, 7, 2, False)
    residency.closed("a", 3.0)
    assert residency.shortage("b") is None
    assert residency.decide() == [Unload("a")]


def test_nothing_is_unloaded_that_would_not_be_enough():
    residency = Residency({"a": 4, "b": 4, "c": 9}, 10)
    ready(residency, "a")
    ready(residency, "b")
    residency.opened("a", 1.0)
    residency.want("c", 2.0)
    assert residency.decide() == []
    assert residency.state("b") == "ready"


def test_one_that_is_waited_for_is_not_idle():
    residency = Residency({"a": 6, "b": 6}, 10)
    residency.wait("a", 0.0)
    assert residency.decide() == [Load("a")]
    residency.loaded("a", 6)
    residency.wait("b", 1.0)
    assert residency.decide() == []
    residency.waited("a")
    assert residency.decide() == [Unload("a")]


def test_what_was_sent_away_drains_and_stays_away():
    residency = Residency({"a": 6}, 10)
    ready(residency, "a")
    residency.opened("a", 1.0)
    residency.send_away("a")
    assert residency.decide() == [] and residency.state("a") == "draining"
    residency.closed("a", 2.0)
    assert residency.decide() == [Unload("a")]
    residency.left("a")
    residency.want("a", 3.0)
    assert residency.decide() == [] and residency.sent_away("a")
    residency.want("a", 4.0, by_operator=True)
    assert residency.decide() == [Load("a")]


def test_a_drain_can_be_taken_back():
    residency = Residency({"a": 6}, 10)
    ready(residency, "a")
    residency.opened("a", 1.0)
    residency.send_away("a")
    residency.want("a", 2.0, by_operator=True)
    assert residency.state("a") == "ready"


def test_a_failure_is_not_tried_again_at_once():
    residency = Residency({"a": 6}, 10)
    residency.want("a", 0.0)
    assert residency.decide() == [Load("a")]
    residency.failed("a", 1.0)
    residency.want("a", 2.0)
    assert residency.decide() == [] and residency.has_failed("a")
    residency.want("a", 1.0 + RETRY_S)
    assert residency.decide() == [Load("a")]


def test_one_that_turned_out_larger_costs_an_idle_one_its_place():
    residency = Residency({"a": 4, "b": 4}, 10)
    ready(residency, "a", 0.0)
    residency.want("b", 1.0)
    assert residency.decide() == [Load("b")]
    residency.loaded("b", 9)
    residency.check()
    assert residency.decide() == [Unload("a")]


@pytest.mark.parametrize("needs", [11, 100])
def test_what_would_not_fit_alone_never_will(needs):
    residency = Residency({"a": needs}, 10)
    residency.want("a", 0.0)
    assert residency.decide() == []
    assert residency.shortage("a").for_ever


class Machine(RuleBasedStateMachine):
    """Any order of events that a runner could report; what it was told to do, it does, some time."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = {"a": 3, "b": 4, "c": 5, "d": 7}
        self.residency = Residency(self.needs, 10)
        self.now_s = 0.0
        self.doing: list[Load | Unload] = []
        self.open: list[str] = []
        self.waiting: list[str] = []

    def after(self) -> None:
        self.now_s += 1.0
        for decision in self.residency.decide():
            if isinstance(decision, Unload):
                assert decision.name not in self.open, "a busy model was unloaded"
                assert decision.name not in self.waiting or self.residency.sent_away(decision.name)
            self.doing.append(decision)

    @rule(name=st.sampled_from(NAMES))
    def waits(self, name):
        self.residency.wait(name, self.now_s)
        self.waiting.append(name)
        self.after()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def gives_up_or_opens(self, data):
        name = data.draw(st.sampled_from(self.waiting))
        if self.residency.state(name) == "ready":
            self.residency.opened(name, self.now_s)
            self.open.append(name)
        self.residency.waited(name)
        self.waiting.remove(name)
        self.after()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def closes(self, data):
        name = data.draw(st.sampled_from(self.open))
        self.open.remove(name)
        self.residency.closed(name, self.now_s)
        self.after()

    @rule(name=st.sampled_from(NAMES), come=st.booleans())
    def operator(self, name, come):
        if come:
            self.residency.want(name, self.now_s, by_operator=True)
        else:
            self.residency.send_away(name)
        self.after()

    @precondition(lambda self: self.doing)
    @rule(data=st.data())
    def done(self, data):
        decision = data.draw(st.sampled_from(self.doing))
        self.doing.remove(decision)
        if isinstance(decision, Unload):
            self.residency.left(decision.name)
        elif data.draw(st.integers(0, 4)) == 0:
            self.residency.failed(decision.name, self.now_s)
        else:
            self.residency.loaded(decision.name, self.needs[decision.name] + data.draw(st.sampled_from([0, 0, 1])))
        self.after()

    @invariant()
    def holds(self):
        self.residency.check()
        assert len({decision.name for decision in self.doing}) == len(self.doing), "two things done to one model"

    def teardown(self):
        """When all answers have ended and every task is done, whoever is still waited for gets its turn."""
        while self.open or self.doing:
            for name in self.open:
                self.residency.closed(name, self.now_s)
            self.open = []
            doing, self.doing = self.doing, []
            for decision in doing:
                if isinstance(decision, Load):
                    self.residency.loaded(decision.name, self.needs[decision.name])
                else:
                    self.residency.left(decision.name)
            self.after()
            self.residency.check()
        self.now_s += RETRY_S
        asked = list(dict.fromkeys(name for name in self.waiting if not self.residency.sent_away(name)))
        for name in self.waiting:
            self.residency.waited(name)
        self.waiting = []
        for name in asked:
            if self.residency.needs(name) <= 10:
                self.residency.wait(name, self.now_s)
                for _ in range(10):
                    self.after()
                    for decision in self.doing:
                        if isinstance(decision, Load):
                            self.residency.loaded(decision.name, self.needs[decision.name])
                        else:
                            self.residency.left(decision.name)
                    self.doing = []
                assert self.residency.state(name) == "ready"
                self.residency.waited(name)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
