"""Ranks as processes: every token and log-probability is that of one process, also when ranks die or stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from experts.rank_process import DEADLINE_S, Instance, Job, RankProcess, answers, instance, layout_of, load, processes
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


def until(condition) -> None:
    deadline = monotonic() + DEADLINE_S
    while not condition():
        assert monotonic() < deadline


def start(ranks: Instance, seed: int) -> list[list[Job]]:
    jobs = [make_jobs(seed + rank, 3, 8000, 24) for rank in range(len(ranks.ranks))]
    for rank, work in zip(ranks.ranks, jobs, strict=True):
        rank.ask("run", work)
    return jobs


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_rank_changes_no_token_of_the_others(engine: Engine, seed: int, tmp_path: Path) -> None:
    with processes("tiny", 3) as started, instance(started, layout_of(engine, 3, 64), tmp_path) as ranks:
        jobs, moment, lost = start(ranks, 100 * seed), Random(seed).randrange(20, 200), seed % 3
        until(lambda: ranks.requests(lost) > moment)
        ranks.ranks[lost].kill()
        ranks.lose(lost)
        for rank in {0, 1, 2} - {lost}:
            assert ranks.ranks[rank].result() == answers(engine, jobs[rank])
        with processes("tiny", 1) as (again,):
            ranks.enter(lost, again)
            again.ask("run", jobs[lost])
            assert again.result() == answers(engine, jobs[lost])


def test_a_stopped_rank_is_replaced_and_fenced(engine: Engine, tmp_path: Path) -> None:
    with processes("tiny", 3) as started, instance(started, layout_of(engine, 3, 64), tmp_path) as ranks:
        jobs, lost = start(ranks, 7), 1
        until(lambda: ranks.requests(lost) > 50)
        ranks.ranks[lost].signal(signal.SIGSTOP)
        until(lambda: ranks.ranks[0].ask("silence")[lost] > 0.1)
        ranks.lose(lost)
        for rank in (0, 2):
            until(lambda rank=rank: ranks.ranks[rank].ask("silence")[lost] == 0.0)
        ranks.ranks[lost].signal(signal.SIGCONT)
        for rank in (0, 2):
            assert ranks.ranks[rank].result() == answers(engine, jobs[rank])
        assert ranks.ranks[lost].result() == "internal_error"  # its engine gives all its requests up
