"""Parcels: slots have owners, equal blocks are packed once, and a receiver notices what is not what was packed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.fabric.arena import Arena
from tripool.fabric.parcels import Inbox, Lease, Outbox

SLOT = 64


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    made = Outbox(Arena(tmp_path / "prefill-0.1.parcels", SLOT, 6))
    yield made
    made.close()
    assert not (tmp_path / "prefill-0.1.parcels").exists()


def pack(outbox: Outbox, name: str, keys: list[bytes | None]) -> Lease | None:
    lease = outbox.lease(name, 1, 0, keys, num_tokens=9, deadline_s=1.0)
    while lease is not None and not lease.packed:
        outbox.fill(lease, lambda into: into.__setitem__(slice(None), f"{name:>{SLOT}}".encode()))
    outbox.check()
    return lease


def test_what_is_packed_is_what_is_read(outbox: Outbox, tmp_path: Path) -> None:
    lease = pack(outbox, "a", [b"k", None])
    assert lease is not None
    parcel, inbox, into = outbox.parcel(lease), Inbox(tmp_path), bytearray(SLOT)
    for index in range(2):
        assert inbox.read(parcel, index, memoryview(into))
        assert into.decode().strip() == "a"
    inbox.close()


def test_equal_keys_are_packed_once_and_go_with_their_last_owner(outbox: Outbox) -> None:
    first, second = pack(outbox, "a", [b"x", b"y", None]), pack(outbox, "b", [b"x", b"y", None])
    assert first is not None and second is not None
    assert outbox.num_held == 4
    assert first.slots[:2] == second.slots[:2]
    outbox.release(first.number)
    outbox.check()
    assert outbox.num_held == 3
    outbox.release(second.number)
    outbox.release(second.number)  # said twice
    outbox.check()
    assert outbox.num_held == 0


def test_full_is_no_error_and_takes_nothing(outbox: Outbox) -> None:
    assert pack(outbox, "a", [None] * 5) is not None
    assert pack(outbox, "b", [None] * 2) is None
    assert outbox.num_held == 5
    outbox.drop(lambda lease: lease.request_id == "a")
    assert pack(outbox, "b", [None] * 2) is not None


def test_a_slot_that_was_given_to_another_is_noticed(outbox: Outbox, tmp_path: Path) -> None:
    lease = pack(outbox, "a", [None])
    assert lease is not None
    parcel = outbox.parcel(lease)
    outbox.release(lease.number)
    pack(outbox, "b", [None])
    assert not Inbox(tmp_path).read(parcel, 0, memoryview(bytearray(SLOT)))


def test_an_arena_that_is_gone_and_a_path_for_a_name_are_misses(outbox: Outbox, tmp_path: Path) -> None:
    lease = pack(outbox, "a", [None])
    assert lease is not None
    parcel = outbox.parcel(lease)
    (tmp_path / "inner").mkdir()
    into = memoryview(bytearray(SLOT))
    assert not Inbox(tmp_path / "inner").read(parcel, 0, into)
    sideways = type(parcel)("../" + parcel.arena, 1, (0,), parcel.checksums, SLOT, 9)
    assert not Inbox(tmp_path / "inner").read(sideways, 0, into)
    beyond = type(parcel)(parcel.arena, 1, (SLOT * 6,), parcel.checksums, SLOT, 9)
    assert not Inbox(tmp_path).read(beyond, 0, into)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([None, b"a", b"b", b"c"]), max_size=4)), max_size=40))
def test_slots_are_never_lost(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, list[bytes | None]]]
) -> None:
    outbox = Outbox(Arena(tmp_path_factory.mktemp("run") / "arena", SLOT, 6))
    for release, keys in steps:
        if release and outbox.leases:
            outbox.release(min(outbox.leases))
        else:
            pack(outbox, "x", [key if i == keys.index(key) else None for i, key in enumerate(keys)])
        outbox.check()
    outbox.drop(lambda lease: True)
    outbox.check()
    assert outbox.num_held == 0
    outbox.close()
