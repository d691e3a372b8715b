"""Random traffic for the simulation: small pools, shared beginnings, follow-up turns, cancels at any point."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, Slo

from .scheduler_model import VOCAB
from .scheduler_sim import Simulation

NAMESPACES = ("", "a", "b")
END_ID = 0


def random_config(random: Random) -> tuple[SchedulerConfig, int]:
    """Often far too small for its traffic, so that preemption is the rule; also the model's context."""
    max_running = random.choice((1, 2, 3, 4, 6, 6))
    config = SchedulerConfig(
        num_blocks=random.randint(2, 12),
        block_tokens=random.choice((1, 2, 4)),
        max_running=max_running,
        step_tokens=max_running + random.choice((1, 2, 5, 40)),
        prefix_reuse=random.random() < 0.85,
    )
    return config, random.choice((8, 20, 48, 48))


def random_request(random: Random, number: int, sim: Simulation) -> Request:
    """New text, a beginning others use too, or the next turn of an earlier conversation. Always fits."""
    longest = sim.scheduler.context_tokens - 1
    kind = random.random()
    if kind < 0.35 and sim.shadows:
        earlier = random.choice(list(sim.shadows.values()))
        base = earlier.tokens[: earlier.num_known]
    elif kind < 0.8:
        base = [1, 2, 3, 4] * 6
        base = base[: random.randrange(len(base))]
    else:
        base = []
    tail = [random.randrange(VOCAB) for _ in range(random.randint(0, 5))]
    prompt = ([*base, *tail] or [1])[:longest]
    max_tokens = random.choice((None, None, 1, random.randint(2, 20)))
    params = SamplingParams(
        n=random.choice((1, 1, 1, 2, 4)),
        max_tokens=max_tokens,
        min_tokens=random.randint(0, max_tokens or 3),
        stop_token_ids=random.choice(((), (), (), (), (1,), (2, 3))),
        ignore_eos=random.random() < 0.8,
    )
    return Request(
        id=f"r{number}",
        prompt_ids=tuple(prompt),
        params=params,
        seed=random.randrange(3),
        end_ids=frozenset({END_ID}),
        namespace=random.choice(NAMESPACES),
    )


def random_owner(random: Random, number: int) -> Slo:
    """Whose request it is: few tenants, and often another prompt of a request that is there."""
    tenant = random.choice(("", "", "t", "u"))
    weight = {"t": 1.0, "u": 3.0}.get(tenant, 1.0)
    job = f"j{number - random.choice((0, 0, 0, 1, 2))}"
    return Slo(tenant=tenant, weight=weight, job=job, background=Random(job).random() < 0.4)


def explore(seed: int, num_events: int = 60, *, shared: bool = False) -> Simulation:
    """One random life of a scheduler, from empty to idle. Raises AssertionError at the first thing that is wrong.

    `shared`: its requests are of different clients.
    """
    random = Random(seed)
    quality = Random(f"drafts {seed}").choice((None, 0.0, 0.5, 0.9, 1.0))
    sim = Simulation(*random_config(random), quality)
    arrival = random.choice((0.15, 0.3, 0.5))
    for number in range(num_events):
        roll = random.random()
        if roll < arrival:
            request = random_request(random, number, sim)
            sim.add(replace(request, slo=random_owner(random, number)) if shared else request)
        elif roll < arrival + 0.06 and sim.shadows:
            sim.cancel(random.choice(list(sim.shadows.values())).request.id)
        elif sim.in_flight is None:
            sim.begin()
        else:
            sim.end()
    sim.drain()
    return sim
