"""KV transfer: slots have owners, equal blocks are copied once, and a receiver notices what is not what was sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.fabric.kv_transfer import KvReceiver, KvSender, Lease, Transfer
from tripool.fabric.shared_memory import BlockTable, SharedMemoryTransfer
from tripool.messages import KvDescriptor, WorkerId
from tripool.simulate.hosts import Hosts
from tripool.simulate.memory import Memory, SimTransfer
from tripool.simulate.supernode.process import ModelledTransfer

SLOT = 64
SHAPE = {"block_tokens": 8, "block_bytes": SLOT, "num_slots": 6}
WORKER = WorkerId("prefill-0", 1)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[KvSender]:
    made = SharedMemoryTransfer(tmp_path, WORKER, **SHAPE).sender()
    yield made
    made.close()
    assert not (tmp_path / "prefill-0.1.kv").exists()


def receiver_of(folder: Path) -> KvReceiver:
    return SharedMemoryTransfer(folder, WORKER, **SHAPE).receiver()


def pack(sender: KvSender, name: str, keys: list[bytes | None]) -> Lease | None:
    lease = sender.lease(name, 1, 0, keys, num_tokens=9, deadline_s=1.0)
    while lease is not None and not lease.packed:
        sender.fill(lease, lambda into: into.__setitem__(slice(None), f"{name:>{SLOT}}".encode()))
    sender.check()
    return lease


def test_what_is_packed_is_what_is_read(sender: KvSender, tmp_path: Path) -> None:
    lease = pack(sender, "a", [b"k", None])
    assert lease is not None
    descriptor, receiver, into = sender.descriptor(lease), receiver_of(tmp_path), bytearray(SLOT)
    kv = receiver.open(descriptor, 9)
    assert kv is not None and kv.arrived and kv.num_blocks == 2
    assert receiver.open(descriptor, 17) is None, "of more tokens"
    for index in range(2):
        assert kv.read(index, memoryview(into))
        assert into.decode().strip() == "a"
    receiver.close()


def test_equal_keys_are_packed_once_and_go_with_their_last_owner(sender: KvSender) -> None:
    first, second = pack(sender, "a", [b"x", b"y", None]), pack(sender, "b", [b"x", b"y", None])
    assert first is not None and second is not None
    assert sender.num_held == 4
    assert first.slots[:2] == second.slots[:2]
    sender.release(first.number)
    sender.check()
    assert sender.num_held == 3
    sender.release(second.number)
    sender.release(second.number)  # said twice
    sender.check()
    assert sender.num_held == 0


def test_full_is_no_error_and_takes_nothing(sender: KvSender) -> None:
    assert pack(sender, "a", [None] * 5) is not None
    assert pack(sender, "b", [None] * 2) is None
    assert sender.num_held == 5
    sender.drop(lambda lease: lease.request_id == "a")
    assert pack(sender, "b", [None] * 2) is not None


def test_a_slot_that_was_given_to_another_is_noticed(sender: KvSender, tmp_path: Path) -> None:
    lease = pack(sender, "a", [None])
    assert lease is not None
    descriptor = sender.descriptor(lease)
    sender.release(lease.number)
    pack(sender, "b", [None])
    kv = receiver_of(tmp_path).open(descriptor, 8)
    assert kv is not None and not kv.read(0, memoryview(bytearray(SLOT)))


def test_an_arena_that_is_gone_and_a_path_for_a_name_are_misses(sender: KvSender, tmp_path: Path) -> None:
    lease = pack(sender, "a", [None])
    assert lease is not None
    table = BlockTable.of(sender.descriptor(lease))
    assert table is not None
    (tmp_path / "inner").mkdir()
    into = memoryview(bytearray(SLOT))
    inner = receiver_of(tmp_path / "inner").open(table.descriptor(), 8)
    assert inner is not None and not inner.read(0, into)
    sideways = BlockTable("../" + table.arena, SLOT, (0,), table.checksums)
    assert receiver_of(tmp_path / "inner").open(sideways.descriptor(), 8) is None
    beyond = receiver_of(tmp_path).open(BlockTable(table.arena, SLOT, (6,), table.checksums).descriptor(), 8)
    assert beyond is not None and not beyond.read(0, into)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([None, b"a", b"b", b"c"]), max_size=4)), max_size=40))
def test_slots_are_never_lost(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, list[bytes | None]]]
) -> None:
    sender = SharedMemoryTransfer(tmp_path_factory.mktemp("run"), WORKER, **SHAPE).sender()
    for release, keys in steps:
        if release and sender.leases:
            sender.release(min(sender.leases))
        else:
            pack(sender, "x", [key if i == keys.index(key) else None for i, key in enumerate(keys)])
        sender.check()
    sender.drop(lambda lease: True)
    sender.check()
    assert sender.num_held == 0
    sender.close()


# ---- every implementation of `Transfer` ------------------------------------------------------------------------------


class Site:
    """A link that takes a second, of a sender that is trusted."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(token_bytes=8)
        self.timeline = SimpleNamespace(now_fs=0, at=lambda *event: None)

    def transfer(self, source: WorkerId, number: int, num_bytes: int) -> int:
        assert (source, num_bytes) == (WORKER, 12 * 8)
        return 10**15

    def trusts(self, worker_id: WorkerId) -> bool:
        return worker_id == WORKER


def shared_memory(folder: Path, site: Any) -> Transfer:
    return SharedMemoryTransfer(folder, WORKER, **SHAPE)


def simulated(folder: Path, site: Any) -> Transfer:
    process: Any = SimpleNamespace(pause=lambda doing: None)
    return SimTransfer(Memory(), process, WORKER, Hosts(), **SHAPE)


def modelled(folder: Path, site: Any) -> Transfer:
    engine: Any = SimpleNamespace(num_blocks=4, block_tokens=8)
    return ModelledTransfer(site, WORKER, 0, engine, lambda: None)


@pytest.mark.parametrize("make", [shared_memory, simulated, modelled])
def test_both_ends_of_a_transfer(make: Any, tmp_path: Path) -> None:
    site = Site()
    transfer: Transfer = make(tmp_path, site)
    can, sender, receiver = transfer.capabilities, transfer.sender(), transfer.receiver()
    lease = sender.lease("r", 1, 0, [b"k", None], num_tokens=12, deadline_s=1.0)
    assert lease is not None
    while not lease.packed:
        sender.fill(lease, lambda view: view.__setitem__(slice(None), bytes([7]) * len(view)))
    descriptor = sender.descriptor(lease)
    assert descriptor.kind == can.kind
    assert receiver.open(KvDescriptor("another", descriptor.payload), 12) is None
    kv = receiver.open(descriptor, 12)
    assert kv is not None and kv.num_blocks == 2 and kv.num_shared(kv) == 2
    kv.begin()
    assert kv.arrived == can.in_place
    site.timeline.now_fs = 10**15
    into = bytearray(sender.memory.slot_bytes)
    assert kv.arrived and all(kv.read(index, memoryview(into)) for index in range(2))
    assert set(into) == {7} or not can.in_place, "modelled KV has no bytes"
    kv.close()
    sender.release(lease.number)
    sender.check()
    assert sender.num_held == 0
    receiver.close()
    sender.close()
