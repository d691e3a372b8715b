"""The plain exchange: every row answered once, by any placement. Under faults: `test_exchange_faults.py`."""

from __future__ import annotations

import numpy as np
import pytest

from experts.fault_world import Exchanged, compute, layout, random_rows
from tripool.errors import ExchangeError
from tripool.experts.exchange import ExpertServer, Owner, SharedView, combine
from tripool.experts.layout import LANES, Bell, Layout, older


def shared_view(shape: Layout) -> SharedView:
    return SharedView(shape, np.zeros(shape.num_bytes, np.uint8))


def serve(server: ExpertServer) -> int:
    requests = list(server.requests())
    for request in requests:
        assert server.answer(request)
        server.ring(request)
    return len(requests)


@pytest.mark.parametrize("placement", [[0] * 6, [1] * 6, [0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 2]])
def test_any_placement_gives_the_same_rows(placement: list[int]) -> None:
    shape, rng = layout(), np.random.default_rng(3)
    view = shared_view(shape)
    owners = [Owner(view, rank, 0) for rank in range(shape.ranks)]
    servers = [ExpertServer(view, rank, compute) for rank in range(shape.ranks)]
    for _ in range(4):
        work = [Exchanged.draw(rng, shape) for _ in owners]
        for owner, one in zip(owners, work, strict=True):
            one.dispatch(owner, placement, 1)
            sent = []
            while (rank := owner.ring()) is not None:
                sent.append(rank)
            # Each rank at most once, however many of its experts were chosen.
            assert sorted(sent) == sorted({placement[e] for e in one.experts.ravel()})
        for server in servers:
            serve(server)
        for owner, one in zip(owners, work, strict=True):
            assert owner.poll()
            assert np.array_equal(owner.routed(), one.expected())


def test_the_sum_is_in_order_of_choice() -> None:
    routed = np.array([[[1e8], [1.0], [-1e8]]], np.float32)
    assert combine(routed, None).tolist() == [[0.0]]
    assert combine(routed[:, [0, 2, 1]], None).tolist() == [[1.0]]
    assert combine(routed[:, [0, 2, 1]], np.array([[2.0]], np.float32)).tolist() == [[3.0]]


def test_two_lanes_are_independent() -> None:
    shape, rng = layout(2), np.random.default_rng(5)
    view, table = shared_view(shape), [1] * 6
    lanes, server = [Owner(view, 0, lane) for lane in range(LANES)], ExpertServer(view, 1, compute)
    work = [Exchanged.draw(rng, shape) for _ in lanes]
    for owner, one in zip(lanes, work, strict=True):
        one.dispatch(owner, table, 1)
        owner.ring()
    assert serve(server) == 2
    for owner, one in zip(lanes, work, strict=True):
        assert owner.poll() and np.array_equal(owner.routed(), one.expected())


def test_a_rank_that_starts_again_goes_on_with_newer_sequences() -> None:
    shape, rng = layout(2), np.random.default_rng(6)
    view, table, one = shared_view(shape), [1] * 6, None
    for start in range(3):
        owner, server = Owner(view, 0, 0), ExpertServer(view, 1, compute)
        one = Exchanged(
            0, random_rows(rng, 2, shape), np.array([[0, 1], [2, 3]], np.int32), np.ones((2, 2), np.float32)
        )
        one.dispatch(owner, table, 1)
        owner.ring()
        assert view.dispatch_bell(1, 0, 0).read() == Bell(1, 4, start + 1)
        assert not owner.poll()
        assert serve(server) == 1 and serve(server) == 0
        assert owner.poll() and np.array_equal(owner.routed(), one.expected())


def test_sequences_begin_again_after_the_last() -> None:
    """One rank was asked before that, the other after it: a process that starts then repeats neither's sequence."""
    shape, rng = layout(3), np.random.default_rng(6)
    view = shared_view(shape)
    for rank, sequence in ((1, 2**32 - 2), (2, 3)):
        for bell in (view.dispatch_bell(rank, 0, 0), view.combine_bell(0, rank, 0)):
            bell.ring(Bell(1, 4, sequence))
    owner, servers = Owner(view, 0, 0), [ExpertServer(view, rank, compute) for rank in (1, 2)]
    for turn in range(6):
        one = Exchanged(
            0, random_rows(rng, 2, shape), np.array([[0, 1], [2, 3]], np.int32), np.ones((2, 2), np.float32)
        )
        one.dispatch(owner, [2] * 6, 1)
        assert owner.ring() == 2 and view.dispatch_bell(2, 0, 0).read().sequence == 4 + turn
        assert [serve(server) for server in servers] == [0, 1]
        assert owner.poll() and np.array_equal(owner.routed(), one.expected())


def test_epochs_and_bells() -> None:
    assert older(0, 1) and not older(1, 1) and older(0xFFFF, 0) and not older(0, 0xFFFF)
    bell = Bell(0xFFFF, 0xFFFE, 0xFFFFFFFD)
    assert Bell.unpack(bell.pack()) == bell


def test_impossible_layouts() -> None:
    with pytest.raises(ExchangeError, match="too many"):
        layout(slab_rows=40_000)
    with pytest.raises(ExchangeError, match="nothing"):
        layout(0)
    memory = np.zeros(layout().num_bytes, np.uint8)
    with pytest.raises(ExchangeError, match="version"):
        Layout.read(memory)
    memory[:56] = layout().header().view(np.uint8)
    assert Layout.read(memory) == layout()
    with pytest.raises(ExchangeError, match="size"):
        Layout.read(memory[:-4096])
