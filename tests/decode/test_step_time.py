"""The learned time of a step: it finds the true costs, shrugs at hiccups, follows the machine, and is never absurd."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.decode import StepFacts, StepTime

COSTS = (0.005, 4e-4, 2e-4, 1e-7, 5e-5, 2e-9)


def true_s(facts: StepFacts, costs: tuple[float, ...] = COSTS) -> float:
    counts = (1, facts.rows, facts.drafts, facts.context_tokens, facts.prompt_tokens, facts.prompt_reads)
    return sum(cost * count for cost, count in zip(costs, counts, strict=True))


def walk(random: Random, count: int) -> list[StepFacts]:
    """Steps as they come: the batch changes slowly, prompts come and go."""
    rows, steps = 5, []
    for _ in range(count):
        rows = max(1, min(40, rows + random.choice((-1, 0, 1))))
        prompt = random.choice((0, 0, 0, 64, 200))
        context = sum(random.randrange(100, 1500) for _ in range(rows))
        steps.append(StepFacts(rows, random.randrange(rows + 1), context, prompt, prompt * random.randrange(20, 900)))
    return steps


def test_it_finds_what_each_part_of_a_step_costs() -> None:
    times, random = StepTime(), Random(1)
    for facts in walk(random, 600):
        times.learn(facts, true_s(facts))
    learned = (times.fixed_s, times.row_s, times.draft_s, times.context_token_s, times.prompt_token_s)
    assert learned == pytest.approx(COSTS[:5], rel=0.01)
    assert times.prompt_read_s == pytest.approx(COSTS[5], rel=0.05)
    assert times.error_s < 1e-5


def test_a_few_steps_are_enough_to_be_useful() -> None:
    times, random = StepTime(), Random(2)
    steps = walk(random, 80)
    for facts in steps[:60]:
        times.learn(facts, true_s(facts))
    for facts in steps[60:]:
        assert times.predict_s(facts) == pytest.approx(true_s(facts), rel=0.05)


def test_hiccups_hardly_count() -> None:
    """One step in fifty takes ten times as long: the rest are still predicted."""
    times, random = StepTime(), Random(3)
    errors = []
    for number, facts in enumerate(walk(random, 1500)):
        took_s = true_s(facts) * random.uniform(0.95, 1.05)
        if number > 500:
            errors.append(abs(times.predict_s(facts) / true_s(facts) - 1))
        times.learn(facts, took_s * 10 if number % 50 == 49 else took_s)
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.3


def test_a_machine_that_gets_slower_for_good_is_noticed() -> None:
    times, random = StepTime(), Random(4)
    slower = tuple(2.5 * cost for cost in COSTS)
    steps = walk(random, 900)
    for facts in steps[:500]:
        times.learn(facts, true_s(facts) * random.uniform(0.98, 1.02))
    for facts in steps[500:800]:
        times.learn(facts, true_s(facts, slower) * random.uniform(0.98, 1.02))
    for facts in steps[800:]:
        assert times.predict_s(facts) == pytest.approx(true_s(facts, slower), rel=0.15)


def test_a_long_calm_does_not_forget_what_rows_cost() -> None:
    """Hundreds of steps with one and the same batch say nothing new about rows; what is known of them stays."""
    times, random = StepTime(), Random(5)
    for facts in walk(random, 300):
        times.learn(facts, true_s(facts))
    for _ in range(3000):
        facts = StepFacts(8, 0, 4000)
        times.learn(facts, true_s(facts) * random.uniform(0.97, 1.03))
    large = StepFacts(24, 0, 12_000)
    assert times.predict_s(large) == pytest.approx(true_s(large), rel=0.25)


def test_before_anything_is_learned_nothing_is_claimed() -> None:
    times = StepTime()
    assert times.predict_s(StepFacts(10, 0, 1000, 10)) == 0.0
    assert (times.error_s, times.most_rows, times.most_prompt_tokens) == (0.0, 0, 0)


steps = st.tuples(
    st.integers(0, 64), st.integers(0, 64), st.integers(0, 10**6), st.integers(0, 512), st.integers(0, 10**8)
).map(lambda counts: StepFacts(*counts))
times_s = st.floats(0.0, 100.0) | st.floats(0.0, 0.01)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(steps, times_s), min_size=1, max_size=60), steps, steps)
def test_whatever_it_is_told_more_work_never_takes_less_time(
    told: list[tuple[StepFacts, float]], small: StepFacts, more: StepFacts
) -> None:
    times = StepTime()
    for facts, took_s in told:
        times.learn(facts, took_s)
        times.check()
    both = StepFacts(
        small.rows + more.rows,
        small.drafts + more.drafts,
        small.context_tokens + more.context_tokens,
        small.prompt_tokens + more.prompt_tokens,
        small.prompt_reads + more.prompt_reads,
    )
    assert 0 <= times.predict_s(small) <= times.predict_s(both) < float("inf")


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 80), st.integers(1, 100_000))
def test_one_row_alone_is_predicted_like_any_step(seed: int, count: int, context: int) -> None:
    """To the last bit: it is the same sum with its zeros left out."""
    times = StepTime()
    for facts in walk(Random(seed), count):
        expected_s = times.predict_s(facts)
        assert times.learn(facts, true_s(facts)) == expected_s
    assert times.alone_s(context) == times.predict_s(StepFacts(1, 0, context))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50_000), st.floats(1e-6, 2.0)), min_size=1, max_size=80))
def test_steps_of_rows_alone_are_learned_as_any_others(steps: list[tuple[int, int, float]]) -> None:
    """Bit by bit: the sums leave out only what is zero."""
    fast, plain = StepTime(), StepTime()
    plain._has_other = True
    for rows, context, step_s in steps:
        facts = StepFacts(rows, 0, context)
        assert fast.learn(facts, step_s) == plain.learn(facts, step_s)
    assert (fast._costs, fast._gram, fast._moments) == (plain._costs, plain._gram, plain._moments)
    mixed = StepFacts(3, 1, 900, 64, 4000)
    fast.learn(mixed, 0.02)
    plain.learn(mixed, 0.02)
    assert fast._costs == plain._costs
