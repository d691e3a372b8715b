"""Any number of ranks, any placement, any replicas: every token and log-probability is that of one process.

Mixed requests over processes: drafts, grammars, several choices, hits in the prefix cache, scores of prompts; with
each map every second rank has so little KV that it must preempt, with the next map the others. What goes through
HTTP and split pools is in `split/test_ranks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from experts.mixed import TINY, Answers, mixed_answers
from experts.placements import KINDS, map_of
from experts.rank_process import Instance, RankProcess, expert_layers, instance, layout_of, load, processes
from oracle.deepseek_cases import V2, V3
from oracle.folders import save_case
from oracle.gqa_cases import QWEN3_MOE
from tripool.experts.layout import Layout

CASES = {case.name: case for case in (V3[0], V2[0], QWEN3_MOE[0])}
ALL = [(kind, replicas) for kind, replicas in product(KINDS, (False, True))]
LONGEST = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {TINY: TINY} | {name: str(save_case(case, folder / name)) for name, case in CASES.items()}


@cache
def alone(model: str, number: int, longest: int) -> Answers:
    return mixed_answers(load(model), [number], longest)


def shared_out(numbers: Sequence[int], ranks: int) -> list[list[int]]:
    """Unevenly: of several ranks the last has no request of its own, and answers all the same."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index, number in enumerate(numbers):
        shares[index % max(1, ranks - 1)].append(number)
    return shares


def check(model: str, ranks: Instance, numbers: Sequence[int], turn: int = 0, longest: int = LONGEST) -> Counter[str]:
    """How often what the requests are made for has happened."""
    happened = Counter[str]()
    shares = shared_out(numbers, len(ranks.ranks))
    for number, (rank, share) in enumerate(zip(ranks.ranks, shares, strict=True)):
        rank.ask("mixed", share, longest, (number + turn) % 2 == 1)
    for rank, share in zip(ranks.ranks, shares, strict=True):
        expected = {key: answer for number in share for key, answer in alone(model, number, longest).items()}
        told, counts = rank.result()
        assert told == expected
        happened += counts
    assert ranks.unanswered() == []
    return happened


def check_maps(
    model: str,
    started: list[RankProcess],
    folder: Path,
    maps: Sequence[tuple[str, bool]],
    numbers: Sequence[Sequence[int]],
) -> Counter[str]:
    happened = Counter[str]()
    layout: Layout = layout_of(load(model), len(started), 64)
    with instance(started, layout, folder) as ranks:
        for epoch, ((kind, replicas), some) in enumerate(zip(maps, numbers, strict=True), 2):
            ranks.install(map_of(kind, layout, replicas=replicas, seed=epoch, epoch=epoch))
            happened += check(model, ranks, some, epoch)
        for rank in ranks.ranks:
            rank.ask("close")
    return happened


def all_kinds(model: str) -> set[str]:
    """Drafts need an MTP layer; one with random weights guesses nothing."""
    drafts = {"drafts"} if load(model).executor.runner.model.mtp is not None else set()
    return {"preemptions", "hits", "scores", "prompt_scores"} | drafts | ({"accepted"} if model == TINY else set())


@pytest.fixture(scope="module")
def four() -> list[RankProcess]:
    with processes(TINY, 4) as started:
        yield started


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_give_the_answers_of_one_process(four: list[RankProcess], count: int, tmp_path: Path) -> None:
    maps = [ALL[(count + turn) % len(ALL)] for turn in (0, 3)]
    numbers = [range(13 * (count % 2), 13 * (count % 2) + 7), range(7, 13)]
    check_maps(TINY, four[:count], tmp_path, maps, numbers)


@pytest.mark.parametrize("case", CASES)
def test_other_families(case: str, folders: dict[str, str], tmp_path: Path) -> None:
    with processes(folders[case], 2) as started:
        check_maps(folders[case], started, tmp_path, [("at random", True)], [range(6)])


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("model", [TINY, *CASES])
def test_every_placement_over_three_hundred_requests(
    model: str, ranks: int, folders: dict[str, str], tmp_path: Path
) -> None:
    with processes(folders[model], ranks) as started:
        happened = check_maps(folders[model], started, tmp_path, ALL, [range(300)] * len(ALL))
    assert all_kinds(folders[model]) <= set(happened), happened


@pytest.mark.prove
def test_one_expert_per_rank(tmp_path: Path) -> None:
    ranks = expert_layers(load(TINY))[0].struct.experts
    assert ranks == 32
    with processes(TINY, ranks) as started:
        happened = check_maps(TINY, started, tmp_path, [("in order", False)], [range(300)])
    assert all_kinds(TINY) <= set(happened), happened
