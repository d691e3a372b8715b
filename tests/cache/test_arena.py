"""The shared file: private, found again after a restart, and honest about what is torn."""

from __future__ import annotations

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
from tripool.cache.records import Record, State
from tripool.errors import ArenaError
from tripool.messages import Life

COMMITTED = Record(State.COMMITTED, b"k" * 16, b"n" * 16, 7, 3, None, 2**64 - 1, 99, 5)
RESERVED = Record(State.RESERVED, b"K" * 16, b"N" * 16, 2**62, 0, Life("é" * (MAX_WORKER_NAME_BYTES // 2), -3))


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


def test_hints_are_right_or_absent(folder: Path) -> None:
    """Random lives of slots: a hint names the slot that holds the key, and is seldom missing."""
    dice = random.Random(5)
    arena = Arena.create(folder / "a.arena", 100, 50)
    peer = Arena.attach(folder / "a.arena")
    held: dict[int, bytes] = {}
    num_missing = num_asked = 0
    for turn in range(3000):
        slot, key = dice.randrange(50), dice.randbytes(16)
        if turn % 3:
            held[slot] = key
            arena.write_header(slot, replace(COMMITTED, key=key, num_bytes=slot))
        else:
            held.pop(slot, None)
            arena.write_header(slot, Record() if turn % 2 else replace(RESERVED, key=key))
        assert peer.hint(dice.randbytes(16)) is None and peer.hint(key) == ((slot, slot) if slot in held else None)
        for slot, key in held.items():
            hint = peer.hint(key)
            assert hint in (None, (slot, slot))
            num_missing, num_asked = num_missing + (hint is None), num_asked + 1
    assert num_missing < 0.05 * num_asked
    arena.remove()
