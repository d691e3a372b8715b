"""The shared file: private, found again after a restart, and honest about what is torn."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.cache import arena as arena_module
from tripool.cache.arena import MAX_WORKER_NAME_BYTES, Arena
from tripool.cache.copying import plain_copy
from tripool.cache.records import Block, Record, State
from tripool.cache.shared_reads import SharedBlocks
from tripool.errors import ArenaError
from tripool.messages import WorkerId

COMMITTED = Record(State.COMMITTED, b"k" * 16, b"n" * 16, 7, 3, None, 2**64 - 1, 99, 5)
RESERVED = Record(State.RESERVED, b"K" * 16, b"N" * 16, 2**62, 0, WorkerId("é" * (MAX_WORKER_NAME_BYTES // 2), -3))


@pytest.mark.parametrize("num_bytes", [1, 100, 4096, 2**18, 2**18 + 1, 700_001])
def test_what_was_written_is_read_and_its_neighbours_stay(folder: Path, num_bytes: int) -> None:
    arena = Arena.create(folder / "a.arena", num_bytes, 3)
    peer = Arena.attach(folder / "a.arena")
    blocks = [np.random.default_rng(n).integers(0, 256, num_bytes, np.uint8) for n in range(3)]
    expected = [plain_copy(block, np.empty_like(block)) for block in blocks]
    assert [peer.write(slot, blocks[slot]) for slot in (1, 0, 2)] == [expected[slot] for slot in (1, 0, 2)]
    for slot in range(3):
        into = bytearray(num_bytes)
        assert arena.read(slot, into) == expected[slot]
        assert into == blocks[slot].tobytes()
    assert arena.records() == [Record()] * 3, "blocks overlap headers"
    arena.remove()


def test_a_lazy_arena_takes_memory_slot_by_slot_and_readers_cannot_write(folder: Path) -> None:
    arena = Arena.create(folder / "a.kv", 2**20, 64, lazy=True)
    taken = (folder / "a.kv").stat().st_blocks
    assert arena.back(2) and arena.back(1)
    assert (folder / "a.kv").stat().st_blocks - taken == 3 * 2**20 // 512
    arena.view(2, 3)[:] = 7
    seen = Arena.attach(folder / "a.kv", read_only=True).view(2, 3)
    assert seen.tolist() == [7, 7, 7] and not seen.flags.writeable
    arena.remove()


def test_a_lazy_arena_says_when_memory_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(folder / "a.kv", 100, 4, lazy=True)

    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert not arena.back(0)
    assert arena.back(0)
    arena.remove()


def test_headers_survive_and_say_the_same(folder: Path) -> None:
    arena = Arena.create(folder / "a.arena", 100, 3)
    arena.write_header(0, COMMITTED)
    arena.write_header(1, RESERVED)
    fcntl.flock(arena._fd, fcntl.LOCK_UN)  # as the end of the process would: the lock is gone, the file is not
    again = Arena.reopen(folder / "a.arena", 100, 3)
    assert again is not None and again.nonce == arena.nonce
    assert again.records() == [COMMITTED, RESERVED, Record()]
    assert again.holds(0, b"k" * 16) and not again.holds(0, b"x" * 16) and not again.holds(1, b"K" * 16)
    again.remove()


@given(cut=st.integers(0, 127), noise=st.binary(min_size=128, max_size=128))
def test_a_torn_header_is_a_free_slot(cut: int, noise: bytes) -> None:
    path = Path(f"/dev/shm/tripool-torn-{os.getpid()}")
    path.unlink(missing_ok=True)
    arena = Arena.create(path, 100, 1)
    arena.write_header(0, COMMITTED)
    at = arena_module.PAGE
    whole = arena._map[at : at + 128]
    arena._map[at : at + 128] = whole[:cut] + noise[cut:]
    expected = [COMMITTED] if arena._map[at : at + 128] == whole else [Record()]
    assert arena.records() == expected
    arena.remove()


def test_doomed_and_free_look_alike(folder: Path) -> None:
    arena = Arena.create(folder / "a.arena", 100, 1)
    arena.write_header(0, COMMITTED)
    arena.write_header(0, Record(State.DOOMED, b"k" * 16, b"n" * 16))
    assert arena.records() == [Record()] and not arena.holds(0, b"k" * 16)
    arena.remove()


def test_only_its_user_may_touch_it_and_only_one_member_owns_it(folder: Path) -> None:
    path = folder / "a.arena"
    arena = Arena.create(path, 100, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ArenaError, match="already"):
        Arena.create(path, 100, 1)
    with pytest.raises(ArenaError, match="in use"):
        Arena.reopen(path, 100, 1)
    path.chmod(0o644)
    with pytest.raises(ArenaError, match="private"):
        Arena.attach(path)
    arena.remove()
    assert not path.exists() and Arena.reopen(path, 100, 1) is None


def test_one_of_another_shape_is_made_anew(folder: Path) -> None:
    path = folder / "a.arena"
    fcntl.flock(Arena.create(path, 100, 2)._fd, fcntl.LOCK_UN)
    assert Arena.reopen(path, 100, 3) is None and not path.exists()
    path.write_bytes(b"half an aren")
    path.chmod(0o600)
    with pytest.raises(ArenaError, match="no arena"):
        Arena.attach(path)
    assert Arena.reopen(path, 100, 3) is None and not path.exists()


def test_memory_that_is_not_there_is_missed_at_once(folder: Path) -> None:
    with pytest.raises(ArenaError, match="no room"):
        Arena.create(folder / "a.arena", 2**40, 2**10)
    assert not (folder / "a.arena").exists()


def test_what_is_found_without_asking_is_right_or_absent(folder: Path) -> None:
    """Random lives of slots: who sits down gets the slot that holds the key, and is seldom sent to ask."""
    rng = random.Random(5)
    arena = Arena.create(folder / "a.arena", 100, 50)
    peer = Arena.attach(folder / "a.arena")
    held: dict[int, Record] = {}
    num_missing = num_asked = 0

    def seen(key: bytes, namespace: bytes = COMMITTED.namespace) -> tuple[Block, int] | None:
        found = peer.acquire(key, namespace, 3)
        if found is not None:
            assert arena.is_read(found[0].slot)
            peer.release(found[0].slot, 3)
        for acquire in (SharedBlocks.acquire, SharedBlocks.acquire_plain):
            both = acquire(peer, [key, key], namespace, 3)
            assert (both is None) == (found is None), "compiled or not, one or two: the same"
            if both is not None and found is not None:
                assert list(both) == [found[0]] * 2 and both.uses == [(found[0].slot, found[1])] * 2
                both.release(3)
        assert not any(arena.is_read(slot) for slot in range(50)), "nobody sits there any more"
        return found

    for turn in range(1500):
        slot, key = rng.randrange(50), rng.randbytes(16)
        if turn % 3:
            held[slot] = replace(COMMITTED, key=key, num_bytes=slot, checksum=turn, ticket=turn)
            arena.write_header(slot, held[slot])
        else:
            held.pop(slot, None)
            arena.write_header(slot, Record() if turn % 2 else replace(RESERVED, key=key))
        assert seen(rng.randbytes(16)) is None and seen(key, b"x" * 16) is None
        for slot, record in held.items() if turn % 10 == 0 else ():
            found, num_asked = seen(record.key), num_asked + 1
            assert found in (None, (Block(slot, record.checksum, record.num_bytes, record.form), record.ticket))
            num_missing += found is None
    assert num_missing < 0.01 * num_asked
    arena.remove()


def test_a_slot_that_is_read_is_not_taken_and_one_that_is_taken_is_not_read(folder: Path) -> None:
    arena = Arena.create(folder / "a.arena", 100, 2)
    peer = Arena.attach(folder / "a.arena")
    wanted = COMMITTED.key, COMMITTED.namespace
    arena.write_header(1, COMMITTED)
    assert (
        peer.acquire(*wanted, 0) is not None
        and peer.acquire(*wanted, 0) is not None
        and peer.acquire(*wanted, 63) is not None
    )
    for reader_slot in (0, 63, 0):
        assert not arena.close_if_unread(1) and arena.records()[1] == COMMITTED, "open again"
        peer.release(1, reader_slot)
    assert arena.close_if_unread(1)
    assert peer.acquire(*wanted, 0) is None and not arena.is_read(1), "closed: ask"
    arena.write_header(1, COMMITTED)
    assert peer.acquire(*wanted, 5) is not None and peer.acquire(*wanted, 6) is not None
    arena.clear(slice(5, 6))
    assert arena.is_read(1), "the other one still reads"
    arena.evict_readers(1)
    assert arena.close_if_unread(1)
    peer.release(1, 6)
    assert not arena.is_read(1), "who was turned out leaves nothing behind when it rises"
    arena.remove()


def test_a_torn_header_is_never_read_without_asking(folder: Path) -> None:
    arena = Arena.create(folder / "a.arena", 100, 1)
    arena.write_header(0, COMMITTED)
    at = arena_module.PAGE
    whole = arena._map[at : at + 128]
    for place in range(16, 128):  # not the key itself: under another one nobody looks
        arena._map[at + place] ^= 1
        assert arena.acquire(COMMITTED.key, COMMITTED.namespace, 0) is None and not arena.is_read(0)
        assert SharedBlocks.acquire(arena, [COMMITTED.key], COMMITTED.namespace, 0) is None and not arena.is_read(0)
        arena._map[at : at + 128] = whole
    assert arena.acquire(COMMITTED.key, COMMITTED.namespace, 0) is not None
    arena.remove()


@pytest.mark.parametrize("size", [1000, 2**16, 2**17 + 5])
def test_blocks_are_read_as_one_by_one_until_one_is_not_right(folder: Path, size: int) -> None:
    rng = np.random.default_rng(size)
    arena = Arena.create(folder / "a.arena", 2**18, 6)
    keys, contents = [bytes([number] * 16) for number in range(6)], rng.integers(0, 256, (6, size), np.uint8)
    for slot, (key, content) in enumerate(zip(keys, contents, strict=True)):
        said = {"key": key, "ticket": slot + 1, "num_bytes": size, "checksum": arena.write(slot, content)}
        arena.write_header(slot, replace(COMMITTED, **said))
    found = SharedBlocks.acquire(arena, keys, COMMITTED.namespace, 0)
    assert found is not None and len(found) == 6

    def read(start: int, count: int, target_bytes: int = size) -> tuple[int, list[int]]:
        ways = []
        for way in (found.read, found.read_plain):
            into = np.full((count, target_bytes), 7, np.uint8)
            num_good = way(start, list(into))
            assert all(
                np.array_equal(got, wanted) for got, wanted in zip(into[:num_good], contents[start:], strict=False)
            )
            ways.append((num_good, found.bad.copy()))
            found.bad.clear()
        assert ways[0] == ways[1], "compiled or not"
        return ways[0]

    assert read(0, 6) == (6, []) and read(2, 3) == (3, []) and read(5, 4) == (1, []) and read(0, 0) == (0, [])
    assert read(0, 2, size - 1) == (0, []), "not a block's size"
    arena.view(4, size)[size - 1] ^= 1
    assert read(0, 6) == (4, [4]) and read(5, 1) == (1, [])
    arena.write_header(3, Record())
    assert read(0, 6) == (3, []), "its slot is another's now"
    found.release(0)
    assert not any(arena.is_read(slot) for slot in range(6))
    arena.remove()
