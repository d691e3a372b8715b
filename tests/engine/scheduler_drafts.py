"""Drafts in the simulation: a guesser of a given quality, and what must hold of the rows that its guesses get.

A draft's row reads and writes the made-up memory like any other. If it was wrong, what it wrote is foreign KV until the
true token's row overwrites it, and whoever reads it before that gives a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from tripool.sequence import Seq, Task

from .scheduler_model import VOCAB, Shadow, enders

if TYPE_CHECKING:
    from .scheduler_sim import Simulation


def guess(shadow: Shadow, quality: float) -> int | None:
    """Right with probability `quality`, sometimes nothing at all; always the same for the same place in an answer."""
    place = (shadow.request.id, shadow.request.seed, shadow.choice, shadow.num_events)
    rng = crc32(repr(place).encode()) % 1000
    if rng % 10 == 0:
        return None
    return shadow.next_token if rng < 1000 * quality else (shadow.next_token + 1 + rng % (VOCAB - 1)) % VOCAB


def propose(sim: Simulation, settled: Sequence[Seq]) -> None:
    """A guess for each sequence that has just got a token, as an engine makes them; not for those that are ending."""
    for seq in settled:
        shadow = sim.shadows[seq]
        assert seq.draft is None, "a draft outlived its step"
        assert seq.wants_draft == shadow.wants_draft, "a draft is wanted when no step can use it, or the reverse"
        token = guess(shadow, sim.draft_quality) if sim.draft_quality is not None and shadow.wants_draft else None
        if token is not None:
            sim.scheduler.propose(seq, token)
            shadow.draft = None if token in enders(shadow.request) else token


def check_planned(sim: Simulation, tasks: Sequence[Task]) -> None:
    """A draft runs whenever there is room for it that nobody has to give up, and prompts keep a row."""
    size, limit = sim.config.block_tokens, sim.config.step_tokens
    answering = [task for task in tasks if sim.shadows[task.seq].answering]
    assert sum(task.num_rows for task in answering) < limit, "drafts leave prompts no row"
    crowded = 2 * (len(answering) + len(sim.preempted)) >= limit - 1
    for task in tasks:
        wanted = sim.shadows[task.seq].draft
        assert task.draft is None or task.draft == wanted, "not the draft that was proposed"
        if wanted is not None and task.draft is None:
            room = len(task.work.table) * size > task.work.stop or sim.scheduler.pool.num_free > 0
            assert crowded or not room, "a draft was left out although there is room"
            sim.seen["draft without room"] += 1
        sim.seen["drafted"] += task.draft is not None


def check_followers(sim: Simulation, tasks: Sequence[Task]) -> list[Task]:
    """After `settle`: exactly the right drafts become tasks of their own, and the counts say so."""
    followers = []
    for task in tasks:
        shadow = sim.shadows[task.seq]
        right = task.draft is not None and not shadow.over and task.draft == shadow.tokens[task.work.stop]
        follower = sim.scheduler.verify(task)
        assert right or follower is None, "a wrong draft was accepted"
        assert not right or follower is not None, "a right draft was thrown away"
        sim.seen["rejected"] += task.draft is not None and not shadow.over and not right
        if follower is not None:
            shadow.num_accepted += 1
            sim.seen["accepted"] += 1
            followers.append(follower)
    assert sim.scheduler.num_drafted == sum(s.num_drafted for s in sim.shadows.values()), "drafts miscounted"
    assert sim.scheduler.num_accepted == sum(s.num_accepted for s in sim.shadows.values()), "drafts miscounted"
    return followers
