"""The colocated scheduler under random traffic: nothing lost, leaked, starved, mixed up or computed twice.

All the claims are in `scheduler_sim`; here are the lives it is put through.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, Slo

from .scheduler_model import VOCAB
from .scheduler_sim import Simulation
from .scheduler_traffic import END_ID, NAMESPACES, explore

tokens = st.integers(0, VOCAB - 1)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    max_running = draw(st.sampled_from([1, 2, 3, 4, 6]))
    return SchedulerConfig(
        num_blocks=draw(st.integers(2, 9)),
        block_tokens=draw(st.sampled_from([1, 2, 3, 4])),
        max_running=max_running,
        step_tokens=max_running + draw(st.integers(1, 12)),
        prefix_reuse=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.none() | st.integers(1, 4) | st.integers(5, 30))
    return SamplingParams(
        n=draw(st.sampled_from([1, 2, 4])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 4, 4))),
        stop_token_ids=draw(st.sampled_from([(), (), (), (1,), (2, 3)])),
        ignore_eos=draw(st.sampled_from([True, True, False])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses every arrival, cancel and half step, and shrinks what breaks."""

    @initialize(
        config=configs(),
        context_tokens=st.sampled_from([2, 7, 16, 48, 48]),
        shared=st.lists(tokens, min_size=16, max_size=24),
        draft_quality=st.sampled_from([None, 0.0, 0.5, 0.9, 1.0]),
    )
    def start(
        self, config: SchedulerConfig, context_tokens: int, shared: list[int], draft_quality: float | None
    ) -> None:
        self.sim = self.new_simulation(config, context_tokens, draft_quality)
        self.shared = shared
        self.num_requests = 0

    def new_simulation(self, config: SchedulerConfig, context_tokens: int, draft_quality: float | None) -> Simulation:
        return Simulation(config, context_tokens, draft_quality)

    def slo(self) -> Slo:
        """Of the next request."""
        return Slo()

    @rule(
        num_shared=st.sampled_from([0, 4, 7, 12, 24]),
        tail=st.lists(tokens, max_size=6),
        namespace=st.sampled_from(["", "", "", *NAMESPACES]),
        params=sampling(),
        seed=st.integers(0, 2),
    )
    def arrive(self, num_shared: int, tail: list[int], namespace: str, params: SamplingParams, seed: int) -> None:
        self.send(self.shared[:num_shared] + tail or [1], namespace, params, seed)

    @rule(count=st.integers(2, 5), num_shared=st.integers(0, 6))
    def crowd(self, count: int, num_shared: int) -> None:
        """Long answers side by side: more than a small pool holds, so somebody will have to give way."""
        for number in range(count):
            params = SamplingParams(ignore_eos=True, max_tokens=10 + number)
            self.send([*self.shared[:num_shared], number], "", params)

    @precondition(lambda self: self.sim.shadows)
    @rule(
        which=st.integers(0, 100),
        tail=st.lists(tokens, max_size=3),
        other_namespace=st.sampled_from([False, False, True]),
    )
    def next_turn(self, which: int, tail: list[int], other_namespace: bool) -> None:
        """A prompt that holds an earlier prompt and what was answered so far."""
        earlier = list(self.sim.shadows.values())[which % len(self.sim.shadows)]
        prompt = earlier.tokens[: earlier.num_known] + tail
        namespace = "c" if other_namespace else earlier.request.namespace
        self.send(prompt, namespace, SamplingParams(max_tokens=5))

    def send(self, prompt: list[int], namespace: str, params: SamplingParams, seed: int = 0) -> None:
        self.num_requests += 1
        request = Request(
            id=f"r{self.num_requests}",
            prompt_ids=tuple(prompt[: self.sim.scheduler.context_tokens - 1]),
            params=params,
            seed=seed,
            end_ids=frozenset({END_ID}),
            namespace=namespace,
            slo=self.slo(),
        )
        self.sim.add(request)

    @precondition(lambda self: self.num_requests)
    @rule(which=st.integers(0, 100), any_state=st.sampled_from([False, False, True]))
    def cancel(self, which: int, any_state: bool) -> None:
        """Waiting, running, in flight, finished or already cancelled: all the same to the caller."""
        ids = [s.request.id for s in self.sim.shadows.values() if any_state or not s.over] or ["never seen"]
        self.sim.cancel(ids[which % len(ids)])

    @rule()
    def half_step(self) -> None:
        """What comes before the next one meets a step that runs."""
        if self.sim.in_flight is None:
            self.sim.begin()
        else:
            self.sim.end()

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        if self.sim.in_flight is not None:
            self.sim.end()
        for _ in range(count):
            self.sim.begin()
            self.sim.end()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()


def run_machine(max_examples: int, steps: int, machine: type[SchedulerMachine] = SchedulerMachine) -> None:
    options = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine, settings=options)


def test_any_history_keeps_every_promise() -> None:
    run_machine(max_examples=50, steps=40)


def test_random_lives_keep_every_promise() -> None:
    seen: Counter[str] = Counter()
    for seed in range(250):
        seen += explore(seed).seen
    # The checks are worth what the traffic makes happen.
    for event in (
        "hit",
        "hit inside the answer",
        "preempted",
        "preempted with an answer",
        "cancelled",
        "cancelled while it ran",
        "replay of many rows",
        "waited for its leader",
        "held back",
        "drafted",
        "accepted",
        "rejected",
        "draft without room",
        "preempted with a draft",
    ):
        assert seen[event] >= 50, f"{event}: only {seen[event]} times"


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(5):
        assert explore(seed).trace == explore(seed).trace


@pytest.mark.prove
def test_any_history_keeps_every_promise_at_length() -> None:
    run_machine(max_examples=1500, steps=80)


@pytest.mark.prove
@pytest.mark.parametrize("batch", range(10))
def test_thousands_of_random_lives_keep_every_promise(batch: int) -> None:
    for seed in range(1000 * batch, 1000 * batch + 1000):
        explore(1_000_000 + seed, num_events=150)
