"""Ranks share the phases of a step, in plain Python: any order of claims, deaths and late ranks gives one result."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tripool.errors import ExchangeError
from tripool.experts.prompt_layout import OWNER, PromptLayout, unit_rows
from tripool.experts.prompt_split import Claimer, PhaseOwner, PromptView, Unit
from tripool.experts.slabs import attach_prompts, create_slabs

ROWS, HEADS, LAYERS = 24, 3, 3
MODULUS = np.float32(1009)


def layout(ranks: int) -> PromptLayout:
    return PromptLayout(
        ranks=ranks, rows=ROWS, context=8, hidden=HEADS, query_width=HEADS, kv_width=2, attended_width=HEADS
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [1, 7, 64, 465, 512])
def test_units_cover_all_rows_in_order(rows: int, ranks: int) -> None:
    units = [unit_rows(rows, ranks, unit) for unit in range(2 * ranks)]
    assert [row for unit in units for row in unit] == list(range(rows))
    assert max(map(len, units)) <= rows * 3 // 4 // ranks + ranks


def rows_of(x: np.ndarray, attended: np.ndarray) -> np.ndarray:
    return (3 * x + attended) % MODULUS  # integers: exact in any order


def head_of(x: np.ndarray) -> np.ndarray:
    """Needs all rows of a head."""
    return np.cumsum(x) % MODULUS


def alone(x: np.ndarray) -> np.ndarray:
    for layer in range(LAYERS + 1):
        if layer:
            x = rows_of(x, np.stack([head_of(x[:, head]) for head in range(HEADS)], axis=1))
    return x


class Rank:
    """Computes a toy network: between two attentions every row by itself, in an attention every head by itself."""

    def __init__(self, view: PromptView, rank: int, start: np.ndarray) -> None:
        self.rank, self._view, self._start = rank, view, start
        self.claimer = Claimer(view, rank, 0)

    def compute(self, unit: Unit) -> None:
        view, said = self._view, self._view.owner(0)[0]
        stream, layer = view.stream(self.rank, 0), unit.layer
        if unit.has_heads:
            view.attended(self.rank, 0)[:, unit.number] = head_of(self._state(said, layer)[:, unit.number])
            return
        rows = list(unit_rows(ROWS, view.layout.ranks, unit.number))
        if layer == 0:
            stream[0, rows] = self._start[rows]
            return
        before = view.stream(int(said["row_winner"][(layer - 1) % 2][unit.number]), 0)[(layer - 1) % 2, rows]
        heads = [view.attended(int(said["head_winner"][head]), 0)[rows, head] for head in range(HEADS)]
        stream[layer % 2, rows] = rows_of(before, np.stack(heads, axis=1))

    def _state(self, said: np.ndarray, layer: int) -> np.ndarray:
        parts = [
            self._view.stream(int(said["row_winner"][layer % 2][unit]), 0)[
                layer % 2, list(unit_rows(ROWS, self._view.layout.ranks, unit))
            ]
            for unit in range(2 * self._view.layout.ranks)
        ]
        return np.concatenate(parts)


def run_phase(random: Random, owner: PhaseOwner, ranks: list[Rank], late: list[tuple[Rank, Unit]], units: int) -> None:
    """Ranks claim in any order. Some stop in the middle of a unit, and some of those finish it later, at any moment."""
    owner.open(units)
    computed = set()
    while True:
        for rank, unit in [one for one in late if random.random() < 0.1]:
            rank.compute(unit)
            rank.claimer.finish(unit)
            late.remove((rank, unit))
        awake = [rank for rank in ranks if rank not in [stopped for stopped, _ in late]]
        rank = random.choice(awake)
        unit = rank.claimer.claim()
        if unit is not None and rank.rank and random.random() < 0.2:
            late.append((rank, unit))
        elif unit is not None:
            rank.compute(unit)
            rank.claimer.finish(unit)
        elif random.random() < 0.5:
            break
    for unit in owner.missing():
        ranks[0].compute(unit)
        computed.add(unit.number)
    owner.settle(computed)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_that_stop_anywhere_change_nothing(num_ranks: int) -> None:
    shape = layout(num_ranks)
    for seed in range(60):
        random = Random(seed)
        view = PromptView(shape, np.zeros(shape.num_bytes, np.uint8))
        late: list[tuple[Rank, Unit]] = []
        owner = PhaseOwner(view, 0)
        for step in range(2):  # ranks that stopped in the first step may continue in the second
            start = np.random.default_rng(2 * seed + step).integers(1009, size=(ROWS, HEADS)).astype(np.float32)
            ranks = [Rank(view, rank, start) for rank in range(num_ranks)]
            late = [(ranks[rank.rank], unit) for rank, unit in late]
            owner.begin()
            for index in range(2 * LAYERS + 1):
                run_phase(random, owner, ranks, late, HEADS if index % 2 else 2 * num_ranks)
            owner.close()
            assert ranks[-1].claimer.claim() is None, "the step is over"
            result = ranks[0]._state(view.owner(0)[0], LAYERS)
            assert np.array_equal(result, alone(start)), seed


def test_the_memory_says_what_it_is(tmp_path) -> None:
    shape = layout(3)
    create_slabs(tmp_path / "prompts", shape)
    found, memory = attach_prompts(tmp_path / "prompts")
    assert found == shape and len(memory) == shape.num_bytes
    memory[0] ^= 1
    with pytest.raises(ExchangeError, match="no prompts of this version"):
        PromptLayout.read(memory)
    assert OWNER.itemsize == 4032, "as in prompt_slabs.h"
