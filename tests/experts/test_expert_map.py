"""The expert map: every expert answered for, evenly over sources, through the deaths of ranks and over the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.errors import ExpertMapError
from tripool.experts import ExpertMap, balance, rank_loads
from tripool.experts.placement import EMPTY


@st.composite
def maps(draw: st.DrawFn) -> ExpertMap:
    ranks, layers = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    slots = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).filter(any))
    experts = draw(st.integers(1, sum(slots)))
    loads = np.random.default_rng(draw(st.integers(0, 999))).random((layers, experts))
    return ExpertMap(draw(st.integers(0, 2**40)), experts, balance(loads, ranks, 1, slots))


def test_contiguous_placement() -> None:
    held = ExpertMap.contiguous(2, 8, 3, attention_only=[1])
    assert held.table[1].tolist() == [[0, 1, 2, 3], [EMPTY] * 4, [4, 5, 6, 7]]
    assert held.epoch == 0
    assert ExpertMap.contiguous(1, 5, 4).counts.tolist() == [[1] * 5]
    assert ExpertMap.contiguous(1, 2, 4).counts.tolist() == [[1] * 2]  # more ranks than experts
    with pytest.raises(ExpertMapError):
        ExpertMap.contiguous(1, 8, 1, attention_only=[0])


@given(maps())
@settings(max_examples=60)
def test_holders_are_the_ranks_with_a_replica(held: ExpertMap) -> None:
    holders = held.holders
    for layer in range(held.layers):
        for expert in range(held.experts):
            replicas = held.replicas(layer, expert)
            assert all(held.table[layer, rank, slot] == expert for rank, slot in replicas)
            padding = [EMPTY] * (holders.shape[2] - len(replicas))
            assert holders[layer, expert].tolist() == [rank for rank, _ in replicas] + padding
            assert len(replicas) == held.counts[layer, expert]


@given(maps(), st.data())
@settings(max_examples=100)
def test_ranks_die_one_after_the_other_and_every_expert_stays_held(held: ExpertMap, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(held.ranks)))
    for rank in order[:-1]:
        before, held = held, held.without(rank)
        held.check()
        assert held.epoch == before.epoch + 1
        assert rank in held.gone and (held.table[:, rank] == EMPTY).all()
        kept = before.table[:, [other for other in range(held.ranks) if other != rank]]
        now = held.table[:, [other for other in range(held.ranks) if other != rank], : kept.shape[2]]
        assert (now[kept != EMPTY] == kept[kept != EMPTY]).all()  # what lives keeps its slot
    with pytest.raises(ExpertMapError, match="no rank is left"):
        held.without(order[-1])


def test_orphans_go_to_the_least_loaded_and_not_to_attention_only_ranks() -> None:
    held = ExpertMap.contiguous(3, 12, 5, attention_only=[4])
    loads = np.ones((3, 12))
    loads[:, 3] = 3.0  # on rank 1
    after = held.without(0, loads)
    assert np.sort(rank_loads(after.table, loads)).tolist() == [[0.0, 0.0, 4.0, 5.0, 5.0]] * 3
    assert (after.table[:, 4] == EMPTY).all()
    level = ExpertMap.contiguous(4, 12, 4).without(2)
    assert rank_loads(level.table, np.ones((4, 12)))[:, [0, 1, 3]].tolist() == [[4.0] * 3] * 4
    only = ExpertMap.contiguous(1, 4, 2, attention_only=[1]).without(0)
    assert only.counts.tolist() == [[1] * 4] and (only.table[0, 0] == EMPTY).all()


def test_a_replica_answers_before_an_orphan_is_mapped() -> None:
    held = ExpertMap(4, 2, np.array([[[0, EMPTY], [0, 1], [1, EMPTY]]], np.int32))
    after = held.without(0)
    assert after.table.tolist() == [[[EMPTY, EMPTY], [0, 1], [1, EMPTY]]]
    assert after.holders[0].tolist() == [[1, -1], [1, 2]]


def test_a_rank_that_returns_holds_nothing_yet() -> None:
    held = ExpertMap.contiguous(1, 4, 2).without(1)
    back = held.returned(1)
    assert (back.epoch, back.gone, back.table.tolist()) == (2, frozenset(), held.table.tolist())


@given(maps())
@settings(max_examples=50)
def test_the_wire_keeps_the_map(held: ExpertMap) -> None:
    assert ExpertMap.decode(held.encode()) == held
    died = held.without(0)
    assert ExpertMap.decode(died.encode()) == died != held


@given(maps(), st.data())
@settings(max_examples=150)
def test_damaged_bytes_are_an_error_or_a_valid_map(held: ExpertMap, data: st.DataObject) -> None:
    wire = bytearray(held.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        ExpertMap.decode(bytes(wire[: data.draw(st.integers(0, len(wire)))])).check()
    except ExpertMapError:
        return


def test_maps_that_lie_about_their_size_are_refused() -> None:
    table = np.zeros((1, 1, 1), "<i4").tobytes()
    for wire in (
        [0, 10**12, [1, 1, 1], [], table],
        [0, 1, [1, 1, 2], [], table],
        [0, 1, [-1, -1, 1], [], table],
        [0, 1, [1, 1, 1], [7], table],
        [0, 1, [1, 1, 1], [0], table],
        [-1, 1, [1, 1, 1], [], table],
        [0, 1, [1, 1, 1], [], table, 0],
        {"epoch": 0},
    ):
        with pytest.raises(ExpertMapError):
            ExpertMap.decode(msgspec.msgpack.encode(wire))


def test_the_map_cannot_be_changed() -> None:
    held = ExpertMap.contiguous(1, 4, 2)
    with pytest.raises(ValueError, match="read-only"):
        held.table[0, 0, 0] = 1
    assert held == ExpertMap.contiguous(1, 4, 2) and hash(held) == hash(ExpertMap.contiguous(1, 4, 2))


@pytest.mark.parametrize("table", [[[[0, 0], [1, EMPTY]]], [[[0], [2]]], [[[0], [EMPTY]]], [[[0], [-2]]]])
def test_inconsistent_maps_are_refused(table: list[list[list[int]]]) -> None:
    with pytest.raises(ExpertMapError):
        ExpertMap(0, 2, np.array(table, np.int32))
