"""The disk tier's files: what was acknowledged is found again, and nothing torn or damaged is taken for whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tripool.cache.disk_records import PAGE, Write, footprint
from tripool.cache.disk_store import DiskStore
from tripool.cache.disk_tier import DiskTier
from tripool.cache.records import Record, State
from tripool.errors import DiskError

BLOCK_BYTES = 9000  # neither a whole number of pages nor less than one
SEGMENTS, SEGMENT_BYTES = 4, PAGE + 3 * footprint(BLOCK_BYTES)
MINE, THEIRS = b"m" * 16, b"t" * 16
PRINT = b"f" * 16
SUITE = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def content(number: int, num_bytes: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(8, "big")) * (num_bytes // 16 + 1)


class Disk:
    """A store and its books, over one folder, life after life."""

    def __init__(self, folder: Path, fingerprint: bytes = PRINT, num_segments: int = SEGMENTS) -> None:
        self.tier = DiskTier(num_segments, SEGMENT_BYTES, bytes_per_s=1e12)
        self.store, self.found, self.purges = DiskStore.open(
            folder, fingerprint, num_segments=num_segments, segment_bytes=SEGMENT_BYTES, block_bytes=BLOCK_BYTES
        )
        self.tier.restore(self.found, self.purges)
        self.tier.check()

    def put(self, numbers: list[int], num_bytes: int = BLOCK_BYTES, namespace: bytes = MINE) -> None:
        """One batch, acknowledged."""
        writes = self.begin(numbers, num_bytes, namespace)
        for write, done in zip(writes, self.store.write(writes, filler(numbers)), strict=True):
            (self.tier.written if done else self.tier.failed)(write.copy.number)

    def begin(self, numbers: list[int], num_bytes: int = BLOCK_BYTES, namespace: bytes = MINE) -> list[Write]:
        records = []
        for slot, number in enumerate(numbers):
            data = content(number, num_bytes)[:num_bytes]
            checksum = xxhash.xxh3_64_intdigest(data)
            key = number.to_bytes(16, "big")
            records.append((slot, Record(State.COMMITTED, key, namespace, slot + 1, 0, None, checksum, num_bytes, 7)))
        self.tier.see(records)
        writes = self.tier.next_writes(0.0)
        self.tier.see((slot, Record()) for slot, _ in records)
        return writes

    def read(self, number: int, namespace: bytes = MINE) -> bytes | None:
        """What would be served: only what is known, and is what it was."""
        copy = self.tier.find(number.to_bytes(16, "big"), namespace)
        if copy is None:
            return None
        taken: list[bytes] = []

        def take(data: memoryview) -> int:
            taken.append(bytes(data))
            return xxhash.xxh3_64_intdigest(data)

        return taken[0] if self.store.read(copy, take) == copy.checksum else None


def filler(numbers: list[int]):  # type: ignore[no-untyped-def]  # a slot is a place in this list
    def fill(slot: int, into: memoryview) -> int:
        into[:] = content(numbers[slot], len(into))[: len(into)]
        return xxhash.xxh3_64_intdigest(into)

    return fill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "cache-0"


@pytest.fixture
def opened(folder: Path) -> Iterator[Disk]:
    disk = Disk(folder)
    yield disk
    disk.store.close()


def again(disk: Disk, folder: Path, **other: object) -> Disk:
    disk.store.close()
    return Disk(folder, **other)  # type: ignore[arg-type]


def test_what_was_acknowledged_is_found_by_later_lives(opened: Disk, folder: Path) -> None:
    opened.put([1, 2])
    opened.put([3], num_bytes=1)
    opened.put([4], namespace=THEIRS)
    later = again(opened, folder)
    for number, size in ((1, BLOCK_BYTES), (2, BLOCK_BYTES), (3, 1)):
        assert later.read(number) == content(number, size)[:size]
    assert later.read(4, THEIRS) == content(4, BLOCK_BYTES)[:BLOCK_BYTES] and later.read(4) is None
    assert {copy.form for segment in later.found for copy in segment.disk_copies} == {7}
    later.put([5])
    last = again(later, folder)
    assert all(last.read(number) is not None for number in (1, 2, 3, 5))
    last.store.close()


def test_a_ring_that_went_round_holds_the_youngest(opened: Disk, folder: Path) -> None:
    for number in range(20):
        opened.put([number])
    known = [number for number in range(20) if opened.read(number) is not None]
    assert known == list(range(9, 20)), "three segments, and the one that is being filled"
    later = again(opened, folder)
    assert [number for number in range(20) if later.read(number) is not None] == known
    later.store.close()
    total = sum(path.stat().st_size for path in folder.glob("segment-*"))
    assert total == SEGMENTS * SEGMENT_BYTES, "all of it was taken at the beginning, and no more"


def test_a_block_that_could_not_be_copied_does_not_hide_those_behind_it(opened: Disk, folder: Path) -> None:
    writes = opened.begin([1, 2, 3])
    assert opened.store.write(writes, filler([1, 99, 3])) == [True, False, True]
    later = again(opened, folder)
    assert later.read(1) is not None and later.read(2) is None and later.read(3) is not None
    later.store.close()


@SUITE
@given(
    acknowledged=st.integers(0, 5),
    in_flight=st.integers(0, 3),
    how=st.sampled_from(["flip", "zero", "truncate"]),
    places=st.lists(st.integers(0, SEGMENTS * SEGMENT_BYTES - 1), min_size=1, max_size=5),
)
def test_damage_anywhere_costs_the_blocks_it_hits_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, acknowledged: int, in_flight: int, how: str, places: list[int]
) -> None:
    """Bytes flipped, pages lost, files cut short, at any place of any file: never a wrong byte."""
    folder = tmp_path_factory.mktemp("disk")
    disk = Disk(folder)
    for number in range(acknowledged):
        disk.put([number])
    disk_copies = dict(disk.tier.disk_copies)
    disk.begin(list(range(100, 100 + in_flight)))
    disk.store.close()
    hit: set[tuple[int, int]] = set()
    for place in places:
        segment, offset = divmod(place, SEGMENT_BYTES)
        path = folder / f"segment-{segment:04d}.blocks"
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[offset] ^= 0x40
            hit.add((segment, offset))
        elif how == "zero":
            data[offset // PAGE * PAGE : offset // PAGE * PAGE + PAGE] = bytes(PAGE)
            hit |= {(segment, at) for at in range(offset // PAGE * PAGE, offset // PAGE * PAGE + PAGE)}
        else:
            data = data[:offset]
            hit |= {(segment, at) for at in range(SEGMENT_BYTES)}  # a file of another size begins anew
        path.write_bytes(data.ljust(SEGMENT_BYTES if how != "truncate" else 0, b"\0"))
    later = Disk(folder)
    for copy in disk_copies.values():
        number = int.from_bytes(copy.key, "big")
        read = later.read(number)
        assert read in (None, content(number, BLOCK_BYTES)[:BLOCK_BYTES]), "served what was not stored"
        head = {(copy.segment, at) for at in range(PAGE)}
        own = {(copy.segment, at) for at in range(copy.offset, copy.end)}
        if not hit & (head | own):
            assert read is not None, "lost a block that was not hit"
    later.put([200])  # and it goes on
    assert later.read(200) is not None
    later.store.close()


@SUITE
@given(torn_at=st.integers(0, 3 * footprint(BLOCK_BYTES)), count=st.integers(1, 3))
def test_a_write_that_was_cut_anywhere_leaves_whole_blocks_or_none(
    tmp_path_factory: pytest.TempPathFactory, torn_at: int, count: int
) -> None:
    """The file as it would be had the last `torn_at` bytes of a batch's blocks never been written."""
    folder = tmp_path_factory.mktemp("disk")
    disk = Disk(folder)
    path = folder / "segment-0000.blocks"
    writes = disk.begin(list(range(count)))
    disk.store.write(writes, filler(list(range(count))))
    disk.store.close()
    data, end = path.read_bytes(), writes[-1].copy.end
    cut = max(PAGE, end - torn_at)
    path.write_bytes(data[:cut].ljust(len(data), b"\0"))
    later = Disk(folder)
    for write in writes:
        number = int.from_bytes(write.copy.key, "big")
        whole = content(number, BLOCK_BYTES)[:BLOCK_BYTES]
        assert later.read(number) in (None, whole)
        if write.copy.offset + PAGE + BLOCK_BYTES <= cut:
            assert later.read(number) == whole
    later.store.close()


def test_a_purge_lasts(opened: Disk, folder: Path) -> None:
    opened.put([1, 2])
    opened.put([3], namespace=THEIRS)
    assert opened.tier.purge(MINE) == 2
    (purge,) = opened.tier.take_purges()
    opened.store.purge(purge)
    opened.put([2])
    later = again(opened, folder)
    assert later.read(1) is None and later.read(2) is not None and later.read(3, THEIRS) is not None
    last = again(later, folder)
    assert last.read(1) is None and last.purges == [purge], "it is still needed"
    for number in range(10, 25):
        last.put([number])
    rest = again(last, folder)
    assert rest.purges == [], "what it was about is gone"
    rest.store.close()


def test_a_torn_purge_is_none(opened: Disk, folder: Path) -> None:
    opened.put([1])
    opened.tier.purge(MINE)
    (purge,) = opened.tier.take_purges()
    opened.store.purge(purge)
    with (folder / "purges").open("ab") as file:
        file.write(b"half a rec")
    later = again(opened, folder)
    assert later.purges == [purge] and later.read(1) is None
    later.store.close()


def test_another_models_blocks_are_not_read_and_their_room_is_used(opened: Disk, folder: Path) -> None:
    opened.put([1, 2])
    other = again(opened, folder, fingerprint=b"g" * 16)
    assert other.read(1) is None
    other.put([1, 5])
    back = again(other, folder)
    assert back.read(1) is None and back.read(2) is None and back.read(5) is None
    back.store.close()


def test_a_smaller_disk_gives_room_back(opened: Disk, folder: Path) -> None:
    opened.put([1])
    small = again(opened, folder, num_segments=2)
    assert small.read(1) is not None and len(list(folder.glob("segment-*"))) == 2
    small.store.close()


# ---- what the world does -----------------------------------------------------------------------------------------


def test_no_room_is_said_at_the_beginning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(DiskError, match=r"no room for .* GB") as caught:
        Disk(folder)
    assert "--disk-gb" in caught.value.hint
    assert not list(folder.glob("segment-*")), "half of a disk is left behind"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError) as caught:
        Disk(tmp_path / "file" / "cache-0")
    assert "--disk-dir" in caught.value.hint


def test_a_folder_in_use(opened: Disk, folder: Path) -> None:
    with pytest.raises(DiskError, match="in use"):
        Disk(folder)
    opened.put([1])


def test_deleted_files_are_noticed(opened: Disk, folder: Path) -> None:
    opened.put([1])
    for path in folder.glob("segment-*"):
        path.unlink()
    with pytest.raises(DiskError, match="was deleted"):
        opened.put([2])


def test_a_file_that_has_become_shorter_is_noticed(opened: Disk, folder: Path) -> None:
    opened.put([1])
    os.truncate(folder / "segment-0000.blocks", PAGE)
    with pytest.raises(DiskError, match="shorter"):
        opened.read(1)


def test_places_are_aligned(opened: Disk) -> None:
    disk_copies = [write.copy for number in range(12) for write in opened.begin([number], 1 + 700 * number)]
    assert all(copy.offset % PAGE == 0 and copy.end % PAGE == 0 for copy in disk_copies)
