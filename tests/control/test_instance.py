"""Expert maps of an instance: every change of its ranks is a whole new map that names the ranks that are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tripool.control.instance import Instance, map_file, read_instances, slabs_file
from tripool.experts import ExpertMap
from tripool.experts.exchange import SharedView
from tripool.experts.layout import Layout
from tripool.experts.slabs import attach_slabs

LAYOUT = Layout(ranks=3, layers=2, experts=8, top_k=2, hidden=64, slab_rows=4)


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance("decode-0", tmp_path, LAYOUT)


def current(folder: Path) -> ExpertMap:
    return ExpertMap.decode(map_file(folder, "decode-0").read_bytes())


def test_ranks_enter_and_leave(instance: Instance, tmp_path: Path) -> None:
    assert not map_file(tmp_path, "decode-0").exists(), "no rank, no map"
    epochs = []
    for rank, gone in ((1, {0, 2}), (0, {2}), (2, set())):
        assert instance.enter(rank)
        assert current(tmp_path).gone == gone
        epochs.append(current(tmp_path).epoch)
    whole = current(tmp_path)
    assert not instance.enter(2) and current(tmp_path) == whole, "nothing changed"
    assert instance.leave(0)
    epochs.append(current(tmp_path).epoch)
    assert (current(tmp_path).counts == 1).all() and current(tmp_path).gone == {0}
    assert not instance.leave(0)
    assert instance.enter(0)
    epochs.append(current(tmp_path).epoch)
    assert np.array_equal(current(tmp_path).table, whole.table), "a rank that returns gets its experts back"
    assert epochs == [1, 2, 3, 4, 5] and instance.epoch == 5


def test_after_the_last_rank_no_map_is_left(instance: Instance, tmp_path: Path) -> None:
    """The next rank must not ask ranks that are gone."""
    instance.enter(0)
    instance.leave(0)
    assert not map_file(tmp_path, "decode-0").exists()
    instance.enter(1)
    assert (current(tmp_path).epoch, current(tmp_path).gone) == (3, {0, 2})


def test_ranks_without_experts_hold_some_only_when_alone(tmp_path: Path) -> None:
    instance = Instance("decode-0", tmp_path, LAYOUT, attention_only=[0, 1])
    for rank in range(3):
        instance.enter(rank)
    assert (current(tmp_path).table[:, [0, 1]] == -1).all()
    instance.leave(2)
    assert (current(tmp_path).counts == 1).all() and current(tmp_path).gone == {2}


def test_experts_follow_the_load_while_all_ranks_are_there(instance: Instance, tmp_path: Path) -> None:
    for rank in range(3):
        instance.enter(rank)
    view, before = SharedView(*attach_slabs(slabs_file(tmp_path, "decode-0"))), current(tmp_path)
    assert not instance.balance(), "nothing was routed"
    view.routed(1)[:] += np.array([9000] + [10] * 7, np.uint64)
    assert instance.balance()
    assert current(tmp_path).epoch == before.epoch + 1 == instance.epoch
    while instance.balance():
        pass
    (status,) = read_instances(tmp_path)
    assert status.copies > 0 and status.replicas == 3 and status.imbalance < 1.1
    balanced = current(tmp_path)
    instance.leave(0)
    view.routed(1)[:] += np.array([10] * 7 + [9000], np.uint64)
    assert not instance.balance(), "a rank is missing"
    instance.enter(0)
    assert np.array_equal(current(tmp_path).table, balanced.table)


def test_status_shows_maps_and_loads(instance: Instance, tmp_path: Path) -> None:
    (empty,) = read_instances(tmp_path)
    assert (empty.name, empty.epoch, empty.replicas) == ("decode-0", 0, 0)
    assert [rank.present for rank in empty.ranks] == [False] * 3
    instance.enter(0)
    instance.enter(2)
    view = SharedView(*attach_slabs(slabs_file(tmp_path, "decode-0")))
    view.routed(0)[:] = 3
    view.routed(2)[:, 0] = 24
    for layer in range(LAYOUT.layers):
        view.assigned(layer)[:] = (20 + layer, 0, 28)
    (status,) = read_instances(tmp_path)
    assert (status.epoch, status.replicas) == (2, 1)
    assert [rank.present for rank in status.ranks] == [True, False, True]
    assert [rank.experts for rank in status.ranks] == [8, 0, 8]
    assert [rank.rows for rank in status.ranks] == [41, 0, 56]
    assert status.imbalance == pytest.approx((4 * 3 + 24) / 24)


def test_a_rank_of_another_host_counts_until_it_is_given_up(instance: Instance, tmp_path: Path) -> None:
    instance.enter(0)
    assert instance.remote(2, 77) and current(tmp_path).gone == {1}
    assert not instance.remote(2, 77), "told again"
    assert instance.leave(2) and not instance.remote(2, 77), "it may wait for answers that never come"
    assert instance.remote(2, 78) and current(tmp_path).gone == {1}
    assert instance.remote_ranks() == [2]
    assert instance.remote(2, 79), "another process: the one before is gone"
    assert instance.remote(2, 0) and current(tmp_path).gone == {1, 2}
    assert instance.remote_ranks() == [] and not instance.remote(2, 79)
    assert instance.outdated() == []


def test_counts_that_begin_anew_are_no_negative_loads(instance: Instance, tmp_path: Path) -> None:
    """Those of a host that was lost, and came again with new memory."""
    view = SharedView(*attach_slabs(slabs_file(tmp_path, "decode-0")))
    for rank in range(3):
        instance.enter(rank)
    for rows in (5000, 40, 9000):
        view.routed(2)[:] = rows
        instance.balance()
    assert (instance._routed == 5000 + 40 + 8960).all()
