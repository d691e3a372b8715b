"""One expert has thirty times the mean and passes its load on, while replicas follow: no row lost, no bit changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experts.mixed import mixed_answers
from experts.rank_process import Instance, heat, instance, layout_of, load, processes
from oracle.deepseek_cases import V3
from oracle.folders import save_case
from tripool.experts.balancer import Balancer

EXPERTS, TOP_K, RANKS, LONGEST = 64, 2, 4, 12
CASE = replace(
    V3[0],
    name="v3-hot",
    settings=V3[0].settings
    | {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "n_group": 1, "topk_group": 1},
)
HOT = 2.0
"""More than any score: every row chooses the expert."""


def biases(first: int, second: int) -> list[list[float]]:
    """The first expert is hot, then both by half, then the second."""
    rows = np.zeros((3, EXPERTS))
    rows[0, first] = rows[2, second] = HOT
    rows[1, [first, second]] = 0.3
    return rows.tolist()


def routed(ranks: Instance) -> np.ndarray:
    return sum(ranks.view.routed(rank).astype(np.int64) for rank in range(len(ranks.ranks)))


def serve_while_moving(model: str, ranks: Instance, balancer: Balancer, numbers: range, bias: list[float]) -> float:
    """How uneven the routing was: rows of the hottest expert over the mean, of the layer where that is most."""
    engine = load(model)
    heat(engine, bias)
    shares = [list(numbers[rank :: len(ranks.ranks)]) for rank in range(len(ranks.ranks))]
    expected = [mixed_answers(engine, share, LONGEST, rank % 2 == 1) for rank, share in enumerate(shares)]
    before = routed(ranks)
    for rank, (process, share) in enumerate(zip(ranks.ranks, shares, strict=True)):
        process.ask("heat", bias)
        process.ask("mixed", share, LONGEST, rank % 2 == 1)
    while not all(process.has_result() for process in ranks.ranks):
        moved = balancer.step(routed(ranks), ranks.map)
        if moved is not None:
            ranks.install(replace(moved, epoch=ranks.map.epoch + 1))
    assert [process.result()[0] for process in ranks.ranks] == expected
    rows = routed(ranks) - before
    assert not (rows.sum(axis=1) % TOP_K).any() and ranks.unanswered() == []
    return float((rows.max(axis=1) / rows.mean(axis=1)).max())


def follow(folder: Path, count: int, hot: list[tuple[int, int]]) -> None:
    model = str(save_case(CASE, folder / "model"))
    layout = layout_of(load(model), RANKS, 64)
    with processes(model, RANKS) as started, instance(started, layout, folder) as ranks:
        balancer, skews = Balancer(ranks.map, TOP_K), []
        for turn, (old, new) in enumerate(hot):
            for phase, bias in enumerate(biases(old, new)):
                begin = count * (3 * turn + phase)
                skews.append(serve_while_moving(model, ranks, balancer, range(begin, begin + count), bias))
        assert skews[0] > 30.0 and skews[-1] > 30.0
        assert balancer.num_copies > 0, "no expert moved"


def test_moves_under_load_change_nothing(tmp_path: Path) -> None:
    follow(tmp_path, 16, [(3, 40)])


@pytest.mark.prove
def test_a_drift_over_many_experts_changes_nothing(tmp_path: Path) -> None:
    follow(tmp_path, 100, [(3, 40), (40, 17), (17, 62), (62, 5)])
