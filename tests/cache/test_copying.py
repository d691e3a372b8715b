"""Copy and checksum in one pass: what was stored is what was hashed, and XXH3 is what everybody else calls so."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from tripool.cache.copying import checksum, copy, library, plain_copy, wake_helper

SIZES = (241, 255, 256, 1023, 1024, 1025, 1087, 1088, 2048, 4095, 4096, 4097, 65_537, 2**18, 2**20 + 63)


def blocks(size: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(size).integers(0, 256, size + 64, np.uint8)
    return source[shift : shift + size], np.full(size + 128, 0xAA, np.uint8)


@pytest.mark.skipif(library() is None, reason="not compiled")
@pytest.mark.parametrize("which", [0, 1, 2], ids=["plain", "avx2", "avx512"])
@pytest.mark.parametrize("size", SIZES)
def test_each_version_copies_and_hashes(which: int, size: int) -> None:
    compiled = library()
    assert compiled is not None
    for shift in (0, 1, 17):
        source, room = blocks(4 * size + 5, shift)
        target, hashes = room[shift : shift + len(source)], (ctypes.c_uint64 * 4)()
        done = compiled.tripool_copy_by(which, source.ctypes.data, target.ctypes.data, size, len(source), hashes)
        if not done:
            pytest.skip("not on this CPU")
        assert np.array_equal(source, target)
        assert (room[:shift] == 0xAA).all() and (room[shift + len(source) :] == 0xAA).all()
        parts = [source[:size], source[size : 2 * size], source[2 * size : 3 * size], source[3 * size :]]
        assert list(hashes) == [xxhash.xxh3_64_intdigest(part.tobytes()) for part in parts]


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("size", [0, 1, 240, *SIZES, 65_535, 65_536, 3 * 2**20])
def test_both_ways_say_the_same(size: int, helped: bool) -> None:
    source, room = blocks(size)
    expected = plain_copy(source, room[:size])
    assert checksum(source.data) == expected
    assert np.array_equal(source, room[:size])
    for _ in range(50 if helped else 1):
        room[:] = 0
        if helped:
            wake_helper(2**20)
        assert copy(source, room[:size]) == expected
        assert np.array_equal(source, room[:size])


@pytest.mark.skipif(library() is None, reason="not compiled")
@pytest.mark.parametrize("size", range(9, 129))
def test_few_bytes_have_their_usual_hash(size: int) -> None:
    compiled, data = library(), np.random.default_rng(size).bytes(size)
    assert compiled is not None and compiled.tripool_hash(data, size) == xxhash.xxh3_64_intdigest(data)


def test_a_small_block_is_plainly_hashed_and_a_large_one_by_quarters() -> None:
    source, room = blocks(65_535)
    assert copy(source, room[:65_535]) == xxhash.xxh3_64_intdigest(source.tobytes())
    source, room = blocks(100_000)
    parts = [source[:24_576], source[24_576:49_152], source[49_152:73_728], source[73_728:]]
    digests = [xxhash.xxh3_64_digest(part.tobytes())[::-1] for part in parts]
    assert copy(source, room[:100_000]) == xxhash.xxh3_64_intdigest(b"".join(digests))


def test_every_changed_byte_changes_the_checksum() -> None:
    source, room = blocks(70_000)
    before = copy(source, room[:70_000])
    for place in (0, 1, 32_767, 32_768, 36_863, 36_864, 69_999):
        source[place] ^= 1
        assert copy(source, room[:70_000]) != before
        source[place] ^= 1


def test_several_threads_copy_at_once() -> None:
    sources = [blocks(2**20 + shift) for shift in range(4)]
    expected = [plain_copy(source, room[: len(source)]) for source, room in sources]

    def run(number: int) -> set[int]:
        source, room = sources[number]
        found = set()
        for _ in range(100):
            wake_helper(2**20)
            found.add(copy(source, room[: len(source)]))
        return found

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4))) == [{one} for one in expected]
