"""Parcels: slots have owners, equal blocks are packed once, and a receiver notices what is not what was packed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.fabric.arena import Arena, FileMaps
from tripool.fabric.kv_transfer import KvReceiver, KvSender, Lease

SLOT = 64


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[KvSender]:
    made = KvSender(Arena(tmp_path / "prefill-0.1.kv", SLOT, 6))
    yield made
    made.close()
    assert not (tmp_path / "prefill-0.1.kv").exists()


def pack(sender: KvSender, name: str, keys: list[bytes | None]) -> Lease | None:
    lease = sender.lease(name, 1, 0, keys, num_tokens=9, deadline_s=1.0)
    while lease is not None and not lease.packed:
        sender.fill(lease, lambda into: into.__setitem__(slice(None), f"{name:>{SLOT}}".encode()))
    sender.check()
    return lease


def test_what_is_packed_is_what_is_read(sender: KvSender, tmp_path: Path) -> None:
    lease = pack(sender, "a", [b"k", None])
    assert lease is not None
    descriptor, receiver, into = sender.descriptor(lease), KvReceiver(FileMaps(tmp_path)), bytearray(SLOT)
    for index in range(2):
        assert receiver.read(descriptor, index, memoryview(into))
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
    assert not KvReceiver(FileMaps(tmp_path)).read(descriptor, 0, memoryview(bytearray(SLOT)))


def test_an_arena_that_is_gone_and_a_path_for_a_name_are_misses(sender: KvSender, tmp_path: Path) -> None:
    lease = pack(sender, "a", [None])
    assert lease is not None
    descriptor = sender.descriptor(lease)
    (tmp_path / "inner").mkdir()
    into = memoryview(bytearray(SLOT))
    assert not KvReceiver(FileMaps(tmp_path / "inner")).read(descriptor, 0, into)
    sideways = type(descriptor)("../" + descriptor.arena, 1, (0,), descriptor.checksums, SLOT, 9)
    assert not KvReceiver(FileMaps(tmp_path / "inner")).read(sideways, 0, into)
    beyond = type(descriptor)(descriptor.arena, 1, (SLOT * 6,), descriptor.checksums, SLOT, 9)
    assert not KvReceiver(FileMaps(tmp_path)).read(beyond, 0, into)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([None, b"a", b"b", b"c"]), max_size=4)), max_size=40))
def test_slots_are_never_lost(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, list[bytes | None]]]
) -> None:
    sender = KvSender(Arena(tmp_path_factory.mktemp("run") / "arena", SLOT, 6))
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
