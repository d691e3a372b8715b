"""Ranks as processes: every token and log-probability is that of one process, also when ranks die or stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from time import monotonic

import pytest

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
from oracle.deepseek_cases import V2, V3
from oracle.folders import save_case
from oracle.gqa_cases import QWEN3_MOE
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


@pytest.fixture(scope="module")
def four() -> Iterator[list[RankProcess]]:
    with processes("tiny", 4) as started:
        yield started


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_give_the_tokens_of_one_process(
    engine: Engine, four: list[RankProcess], count: int, tmp_path: Path
) -> None:
    """Uneven load: the last rank has none, and answers all the same."""
    loads = [4, 1, 2, 0][:count] if count > 1 else [4]
    if count > 1:
        loads[-1] = 0
    jobs = [make_jobs(10 * count + rank, n, 8000) for rank, n in enumerate(loads)]
    with instance(four[:count], layout_of(engine, count, 64), tmp_path) as ranks:
        for rank, work in zip(ranks.ranks, jobs, strict=True):
            rank.ask("run", work)
        for rank, work in zip(ranks.ranks, jobs, strict=True):
            assert rank.result() == answers(engine, work)
        for rank in ranks.ranks:
            rank.ask("close")


@pytest.mark.parametrize("case", [V3[0], V2[0], QWEN3_MOE[0]], ids=lambda case: case.name)
def test_other_families(case, tmp_path: Path) -> None:
    save_case(case, tmp_path / "model")
    one, count = load(str(tmp_path / "model")), 2
    jobs = [make_jobs(rank, 3, case.settings["vocab_size"], 6) for rank in range(count)]
    with (
        processes(str(tmp_path / "model"), count) as started,
        instance(started, layout_of(one, count, 16), tmp_path) as ranks,
    ):
        for rank, work in zip(ranks.ranks, jobs, strict=True):
            rank.ask("run", work)
        for rank, work in zip(ranks.ranks, jobs, strict=True):
            assert rank.result() == answers(one, work)


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
        ranks.enter(lost, again)
        again.ask("run", jobs[lost])
        assert again.result() == answers(self.engine, jobs[lost])

    def _stop(self, lost: int) -> None:
        """The others may be done before they notice."""
        ranks = self.ranks
        ranks.ranks[lost].signal(signal.SIGSTOP)
        others = [ranks.ranks[rank] for rank in {0, 1, 2} - {lost}]
        until(lambda: any(rank.ask("silence")[lost] > 0.05 or rank.has_result() for rank in others))
        ranks.lose(lost)
        until(lambda: all(rank.ask("silence")[lost] == 0.0 for rank in others))
        ranks.ranks[lost].signal(signal.SIGCONT)


def hunt(engine: Engine, folder: Path, seed: int, rounds: int) -> None:
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
    hunt(engine, tmp_path, seed, 120)
