"""Ranks as processes that are killed or stopped in mid-step: no token changes, nobody waits, nothing is left held."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from experts.placements import KINDS, table_of
from experts.rank_process import (
    DEADLINE_S,
    FENCED,
    Instance,
    Job,
    RankProcess,
    answers,
    instance,
    layout_of,
    load,
    processes,
)
from tripool import SamplingParams
from tripool.engine.engine import Engine


def make_jobs(seed: int, count: int, vocab: int, tokens: int = 12) -> list[Job]:
    """Greedy and sampled, with and without log-probabilities, prompts from one token to two blocks."""
    random = Random(seed)
    return [
        (
            [random.randrange(6, vocab) for _ in range(random.choice((1, 5, 30, 130)))],
            SamplingParams(
                temperature=random.choice((0.0, 0.9)),
                seed=random.getrandbits(30),
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=random.choice((None, 3)),
            ),
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("tiny")


def until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + DEADLINE_S
    while not condition():
        assert monotonic() < deadline


class Victims:
    """Three ranks at work, of which one after the other is killed or stopped in the middle of a step."""

    def __init__(self, engine: Engine, ranks: Instance, seed: int) -> None:
        self.engine, self.ranks, self.random = engine, ranks, Random(seed)

    def round(self, number: int, *, stop: bool) -> None:
        ranks, lost = self.ranks, self.random.randrange(3)
        jobs = [make_jobs(1000 * number + rank, 2, 8000, 16) for rank in range(3)]
        moment = self.random.randrange(150)
        before = ranks.requests(lost)
        for rank, work in zip(ranks.ranks, jobs, strict=True):
            rank.ask("run", work)
        until(lambda: ranks.requests(lost) > before + moment or ranks.ranks[lost].has_result())
        if stop:
            self._stop(lost)
        else:
            ranks.ranks[lost].kill()
            ranks.lose(lost)
        for rank in {0, 1, 2} - {lost}:
            assert ranks.ranks[rank].result() == answers(self.engine, jobs[rank])
        if stop:
            # It was waiting for answers, which no rank gives it any more; or it was at its end.
            assert ranks.ranks[lost].result() in (FENCED, answers(self.engine, jobs[lost]))
            ranks.ranks[lost].kill()
        again = RankProcess("tiny")
        again.wait_until_ready()
        table = table_of(self.random.choice(KINDS), ranks.view.layout, replicas=number % 2 == 0, seed=number)
        ranks.enter(lost, again, table)
        again.ask("run", jobs[lost])
        assert again.result() == answers(self.engine, jobs[lost])
        self._check_nothing_left()

    def _stop(self, lost: int) -> None:
        """The others may be done before they notice."""
        ranks = self.ranks
        ranks.ranks[lost].signal(signal.SIGSTOP)
        others = [ranks.ranks[rank] for rank in {0, 1, 2} - {lost}]
        until(lambda: any(rank.ask("silence")[lost] > 0.05 or rank.has_result() for rank in others))
        ranks.lose(lost)
        until(lambda: all(rank.ask("silence")[lost] == 0.0 for rank in others))
        ranks.ranks[lost].signal(signal.SIGCONT)

    def _check_nothing_left(self) -> None:
        """The new process has answered what the old one left open, so every slab may be written again."""
        until(lambda: not self.ranks.unanswered())
        assert [rank.ask("blocks") for rank in self.ranks.ranks] == [0, 0, 0]
        assert [path.name for path in self.ranks.path.parent.iterdir()] == [self.ranks.path.name]


def hunt(engine: Engine, folder: Path, seed: int, rounds: int) -> None:
    folder = folder / "shared"
    folder.mkdir()
    with processes("tiny", 3) as started, instance(started, layout_of(engine, 3, 64), folder) as ranks:
        victims = Victims(engine, ranks, seed)
        try:
            for number in range(rounds):
                victims.round(number, stop=number % 6 == 5)
        finally:
            for rank in ranks.ranks:
                rank.kill()


def test_killed_and_stopped_ranks_change_no_token_of_the_others(engine: Engine, tmp_path: Path) -> None:
    hunt(engine, tmp_path, 0, 30)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_killed_and_stopped_ranks_change_no_token(engine: Engine, seed: int, tmp_path: Path) -> None:
    """1,000 kills and 200 stops."""
    hunt(engine, tmp_path, seed, 120)
