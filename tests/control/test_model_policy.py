"""Which models are in memory: within the budget, never a busy one away, first asked first served, nobody forgotten."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tripool.control.model_policy import RETRY_S, Load, ModelPolicy, Unload

NAMES = ["a", "b", "c", "d"]


def ready(model_policy: ModelPolicy, name: str, now_s: float = 0.0) -> None:
    model_policy.want(name, now_s)
    while model_policy[name].state != "ready":
        for decision in model_policy.decide():
            if isinstance(decision, Load):
                model_policy.loaded(decision.name, model_policy[decision.name].needs)
            else:
                model_policy.left(decision.name)
        model_policy.check()


def test_without_a_budget_everything_stays():
    model_policy = ModelPolicy({"a": 10**12, "b": 10**12}, None)
    ready(model_policy, "a")
    ready(model_policy, "b")
    assert model_policy["a"].state == "ready" and model_policy.shortage("b") is None


def test_the_one_used_longest_ago_makes_room():
    model_policy = ModelPolicy(dict.fromkeys(NAMES, 4), 12)
    for now_s, name in enumerate("abc"):
        ready(model_policy, name, now_s)
    model_policy.opened("a", 9.0)
    model_policy.closed("a", 10.0)
    model_policy.want("d", 11.0)
    assert model_policy.decide() == [Unload("b")]
    assert model_policy.decide() == [], "said once"
    model_policy.left("b")
    assert model_policy.decide() == [Load("d")]


def test_a_busy_one_is_never_unloaded_and_the_shortage_is_told():
    model_policy = ModelPolicy({"a": 7, "b": 5}, 10)
    ready(model_policy, "a")
    model_policy.opened("a", 1.0)
    model_policy.want("b", 2.0)
    assert model_policy.decide() == []
    short = model_policy.shortage("b")
    assert (short.needs, short.in_use, short.missing, short.for_ever) == (5, 7, 2, False)
    model_policy.closed("a", 3.0)
    assert model_policy.shortage("b") is None
    assert model_policy.decide() == [Unload("a")]


def test_nothing_is_unloaded_that_would_not_be_enough():
    model_policy = ModelPolicy({"a": 4, "b": 4, "c": 9}, 10)
    ready(model_policy, "a")
    ready(model_policy, "b")
    model_policy.opened("a", 1.0)
    model_policy.want("c", 2.0)
    assert model_policy.decide() == []
    assert model_policy["b"].state == "ready"


def test_one_that_is_waited_for_is_not_idle():
    model_policy = ModelPolicy({"a": 6, "b": 6}, 10)
    model_policy.wait("a", 0.0)
    assert model_policy.decide() == [Load("a")]
    model_policy.loaded("a", 6)
    model_policy.wait("b", 1.0)
    assert model_policy.decide() == []
    model_policy.waited("a")
    assert model_policy.decide() == [Unload("a")]


def test_what_was_sent_away_drains_and_stays_away():
    model_policy = ModelPolicy({"a": 6}, 10)
    ready(model_policy, "a")
    model_policy.opened("a", 1.0)
    model_policy.send_away("a")
    assert model_policy.decide() == [] and model_policy["a"].state == "draining"
    model_policy.closed("a", 2.0)
    assert model_policy.decide() == [Unload("a")]
    model_policy.left("a")
    model_policy.want("a", 3.0)
    assert model_policy.decide() == [] and model_policy["a"].sent_away
    model_policy.want("a", 4.0, by_operator=True)
    assert model_policy.decide() == [Load("a")]


def test_a_drain_can_be_taken_back():
    model_policy = ModelPolicy({"a": 6}, 10)
    ready(model_policy, "a")
    model_policy.opened("a", 1.0)
    model_policy.send_away("a")
    model_policy.want("a", 2.0, by_operator=True)
    assert model_policy["a"].state == "ready"


def test_a_failure_is_not_tried_again_at_once():
    model_policy = ModelPolicy({"a": 6}, 10)
    model_policy.want("a", 0.0)
    assert model_policy.decide() == [Load("a")]
    model_policy.failed("a", 1.0)
    model_policy.want("a", 2.0)
    assert model_policy.decide() == [] and model_policy["a"].failed_s is not None
    model_policy.want("a", 1.0 + RETRY_S)
    assert model_policy.decide() == [Load("a")]


def test_one_that_turned_out_larger_costs_an_idle_one_its_place():
    model_policy = ModelPolicy({"a": 4, "b": 4}, 10)
    ready(model_policy, "a", 0.0)
    model_policy.want("b", 1.0)
    assert model_policy.decide() == [Load("b")]
    model_policy.loaded("b", 9)
    model_policy.check()
    assert model_policy.decide() == [Unload("a")]


@pytest.mark.parametrize("needs", [11, 100])
def test_what_would_not_fit_alone_never_will(needs):
    model_policy = ModelPolicy({"a": needs}, 10)
    model_policy.want("a", 0.0)
    assert model_policy.decide() == []
    assert model_policy.shortage("a").for_ever


class Machine(RuleBasedStateMachine):
    """Any order of events that a runner could report; what it was told to do, it does, some time."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = {"a": 3, "b": 4, "c": 5, "d": 7}
        self.model_policy = ModelPolicy(self.needs, 10)
        self.now_s = 0.0
        self.doing: list[Load | Unload] = []
        self.open: list[str] = []
        self.waiting: list[str] = []

    def after(self) -> None:
        self.now_s += 1.0
        for decision in self.model_policy.decide():
            if isinstance(decision, Unload):
                assert decision.name not in self.open, "a busy model was unloaded"
                assert decision.name not in self.waiting or self.model_policy[decision.name].sent_away
            self.doing.append(decision)

    @rule(name=st.sampled_from(NAMES))
    def waits(self, name):
        self.model_policy.wait(name, self.now_s)
        self.waiting.append(name)
        self.after()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def gives_up_or_opens(self, data):
        name = data.draw(st.sampled_from(self.waiting))
        if self.model_policy[name].state == "ready":
            self.model_policy.opened(name, self.now_s)
            self.open.append(name)
        self.model_policy.waited(name)
        self.waiting.remove(name)
        self.after()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def closes(self, data):
        name = data.draw(st.sampled_from(self.open))
        self.open.remove(name)
        self.model_policy.closed(name, self.now_s)
        self.after()

    @rule(name=st.sampled_from(NAMES), come=st.booleans())
    def operator(self, name, come):
        if come:
            self.model_policy.want(name, self.now_s, by_operator=True)
        else:
            self.model_policy.send_away(name)
        self.after()

    @precondition(lambda self: self.doing)
    @rule(data=st.data())
    def done(self, data):
        decision = data.draw(st.sampled_from(self.doing))
        self.doing.remove(decision)
        if isinstance(decision, Unload):
            self.model_policy.left(decision.name)
        elif data.draw(st.integers(0, 4)) == 0:
            self.model_policy.failed(decision.name, self.now_s)
        else:
            self.model_policy.loaded(decision.name, self.needs[decision.name] + data.draw(st.sampled_from([0, 0, 1])))
        self.after()

    @invariant()
    def holds(self):
        self.model_policy.check()
        assert len({decision.name for decision in self.doing}) == len(self.doing), "two things done to one model"

    def teardown(self):
        """When all answers have ended and every task is done, whoever is still waited for gets its turn."""
        while self.open or self.doing:
            for name in self.open:
                self.model_policy.closed(name, self.now_s)
            self.open = []
            doing, self.doing = self.doing, []
            for decision in doing:
                if isinstance(decision, Load):
                    self.model_policy.loaded(decision.name, self.needs[decision.name])
                else:
                    self.model_policy.left(decision.name)
            self.after()
            self.model_policy.check()
        self.now_s += RETRY_S
        asked = list(dict.fromkeys(name for name in self.waiting if not self.model_policy[name].sent_away))
        for name in self.waiting:
            self.model_policy.waited(name)
        self.waiting = []
        for name in asked:
            if self.model_policy[name].needs <= 10:
                self.model_policy.wait(name, self.now_s)
                for _ in range(10):
                    self.after()
                    for decision in self.doing:
                        if isinstance(decision, Load):
                            self.model_policy.loaded(decision.name, self.needs[decision.name])
                        else:
                            self.model_policy.left(decision.name)
                    self.doing = []
                assert self.model_policy[name].state == "ready"
                self.model_policy.waited(name)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
