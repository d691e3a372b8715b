"""Files of the disk tier: a folder of segments in which a block is either complete or absent.

| part of a segment | contents |
|---|---|
| first page | header: magic, fingerprint, size, generation, nonce, digest |
| then, for each block | one header page, then the block's bytes in whole pages |

**Writing.** The bytes of all blocks of a batch, `fdatasync`, their headers, `fdatasync`. The header is the commit
record: if it is on disk, so are the bytes behind it. Header digests are seeded with a nonce per segment generation,
which is on disk before the first block of that generation. Headers of an earlier generation are therefore void, and the
contents of a block cannot forge a header.

**Guarantee.** `open` finds every block that `write` acknowledged, also after a crash of the process or the machine, as
far as the disk honours `fdatasync`. Anything else on disk is complete or rejected: headers by digest, position and
number, bytes by the checksum taken when the block was first stored and compared at every read.

**Purges** are in a file of their own: one record voids any number of blocks, permanently. The bytes themselves stay
until their segment is reused.

One thread writes and one reads. Each has a page-aligned buffer, so that files can bypass the page cache (O_DIRECT).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from tripool.cache.disk_records import PAGE, DiskCopy, Purge, Segment, Write, footprint
from tripool.cache.private_folder import NotPrivate, make_private
from tripool.errors import DiskError

FINGERPRINT_BYTES = 16
_MAGIC = b"TPDISK01"
_SEGMENT = struct.Struct("<8s16sQQQ")
"""Magic, fingerprint, bytes, generation, nonce."""
_BLOCK = struct.Struct("<8sIIQQ16s16sIIIQ")
"""Magic, kind, segment, offset, number, key, namespace, position, bytes, form, checksum."""
_DIGEST = struct.Struct("<Q")
_PURGE = struct.Struct("<16sQ")
_VOID, _WHOLE = 0, 1
_LOST_HEADERS = 32
"""More invalid headers in a row than a crash can leave: after this many, the rest of the segment is taken as empty."""


class DiskStore:
    """Made by `open`, which also returns what it found on disk."""

    def __init__(self, folder: Path, fingerprint: bytes, num_segments: int, segment_bytes: int, block_bytes: int):
        assert len(fingerprint) == FINGERPRINT_BYTES and segment_bytes % PAGE == 0
        self._folder, self._fingerprint = folder, fingerprint
        self._segment_bytes, self._block_bytes = segment_bytes, block_bytes
        self._fds: list[int] = []
        self._generations = [(0, 0)] * num_segments
        """(generation, nonce) of each segment, as in its header on disk."""
        self._lock = self._purges = -1
        self._writing, self._reading = (memoryview(mmap.mmap(-1, footprint(block_bytes))) for _ in range(2))

    @classmethod
    def open(
        cls, folder: Path, fingerprint: bytes, *, num_segments: int, segment_bytes: int, block_bytes: int
    ) -> tuple[DiskStore, list[Segment], list[Purge]]:
        """Open or create the store. Blocks of another fingerprint, size or version are ignored and their space is
        reused.
        """
        store = cls(folder, fingerprint, num_segments, segment_bytes, block_bytes)
        try:
            make_private(folder)
            store._take()
            found = [store._open_segment(number) for number in range(num_segments)]
            for other in folder.glob("segment-*.blocks"):
                if other.name not in {store._path(number).name for number in range(num_segments)}:
                    other.unlink()
            purges = store._open_purges([copy for segment in found for copy in segment.disk_copies])
            _sync_folder(folder)
        except OSError as error:
            store.close()
            raise explain(error, folder, num_segments * segment_bytes) from error
        except NotPrivate as error:
            store.close()
            raise DiskError(error.message, hint=f"choose another --disk-dir: {error.hint}") from error
        except DiskError:
            store.close()
            raise
        fitting = [tuple(copy for copy in segment.disk_copies if copy.num_bytes <= block_bytes) for segment in found]
        return (
            store,
            [replace(each, disk_copies=disk_copies) for each, disk_copies in zip(found, fitting, strict=True)],
            purges,
        )

    def close(self) -> None:
        for fd in [*self._fds, self._lock, self._purges]:
            if fd >= 0:
                os.close(fd)
        self._fds, self._lock, self._purges = [], -1, -1

    # ---- blocks -------------------------------------------------------------------------------------------------

    def write(self, writes: Sequence[Write], fill: Callable[[int, memoryview], int]) -> list[bool]:
        """Write blocks durably; returns for each whether it was written, or its slot was reused before it could be
        copied.

        `fill` copies a slot into a buffer and returns the checksum of the copy. Raises OSError and DiskError; then none
        of the blocks is acknowledged.
        """
        done: list[bool] = []
        for write in writes:
            copy = write.copy
            num_padded = footprint(copy.num_bytes) - PAGE
            self._begin(copy)  # uses the same buffer, so it comes before `fill`
            done.append(fill(write.slot, self._writing[: copy.num_bytes]) == copy.checksum)
            if done[-1]:
                self._writing[copy.num_bytes : num_padded] = bytes(num_padded - copy.num_bytes)
                self._put(copy.segment, self._writing[:num_padded], copy.offset + PAGE)
        self._sync(writes)
        for write, whole in zip(writes, done, strict=True):
            # Blocks that were not copied get a header too, so that a scan finds the blocks behind them.
            self._put_page(write.copy.segment, write.copy.offset, self._header(write.copy, _WHOLE if whole else _VOID))
        self._sync(writes)
        return done

    def read(self, copy: DiskCopy, take: Callable[[memoryview], int]) -> int:
        """Pass the block's bytes to `take` and return the checksum of what it stored. Raises OSError and DiskError."""
        num_padded = footprint(copy.num_bytes) - PAGE
        if os.preadv(self._fds[copy.segment], [self._reading[:num_padded]], copy.offset + PAGE) != num_padded:
            raise DiskError(
                f"{self._path(copy.segment).name} has become shorter", hint="no other program may write to this folder"
            )
        return take(self._reading[: copy.num_bytes])

    def purge(self, purge: Purge) -> None:
        """Record a purge durably."""
        self._put_purge(purge)
        os.fdatasync(self._purges)

    def _put_purge(self, purge: Purge) -> None:
        body = _PURGE.pack(purge.namespace, purge.before)
        if os.write(self._purges, body + _digest(body, 0)) != _PURGE.size + _DIGEST.size:
            raise DiskError(f"{self._folder} is full", hint="make room and restart the server")

    def remove(self) -> None:
        """Delete all segments, when a purge cannot be recorded."""
        for segment in range(len(self._generations)):
            self._path(segment).unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # the folder is gone already
            _sync_folder(self._folder)

    def _begin(self, copy: DiskCopy) -> None:
        """Start a new generation of a segment before its first block; blocks of earlier generations are void from here
        on.
        """
        if self._generations[copy.segment][0] == copy.generation:
            return
        nonce = secrets.randbits(63)
        body = _SEGMENT.pack(_MAGIC, self._fingerprint, self._segment_bytes, copy.generation, nonce)
        self._put_page(copy.segment, 0, body + _digest(body, 0))
        os.fdatasync(self._fds[copy.segment])
        self._generations[copy.segment] = copy.generation, nonce

    def _header(self, copy: DiskCopy, kind: int) -> bytes:
        body = _BLOCK.pack(
            _MAGIC, kind, copy.segment, copy.offset, copy.number, copy.key, copy.namespace, copy.position,
            copy.num_bytes, copy.form, copy.checksum,
        )  # fmt: skip
        return body + _digest(body, self._generations[copy.segment][1])

    def _put_page(self, segment: int, offset: int, head: bytes) -> None:
        self._writing[:PAGE] = head + bytes(PAGE - len(head))
        self._put(segment, self._writing[:PAGE], offset)

    def _put(self, segment: int, data: memoryview, offset: int) -> None:
        while data:
            num_bytes = os.pwritev(self._fds[segment], [data], offset)
            data, offset = data[num_bytes:], offset + num_bytes

    def _sync(self, writes: Sequence[Write]) -> None:
        for segment in {write.copy.segment for write in writes}:
            os.fdatasync(self._fds[segment])
            if not os.fstat(self._fds[segment]).st_nlink:
                raise DiskError(f"{self._path(segment).name} was deleted", hint="restart the server to make it anew")

    # ---- opening -----------------------------------------------------------------------------------------------

    def _take(self) -> None:
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiskError(f"{self._folder} is in use", hint="another server uses it; give each its own") from None

    def _path(self, segment: int) -> Path:
        return self._folder / f"segment-{segment:04d}.blocks"

    def _open_segment(self, number: int) -> Segment:
        path, is_new = self._path(number), not self._path(number).exists()
        fd = _open_aligned(path, self._writing[:PAGE])
        self._fds.append(fd)
        try:
            if os.fstat(fd).st_size != self._segment_bytes:
                os.ftruncate(fd, 0)
                # Allocate now, so that a full disk is noticed at start and not when a block is written.
                os.posix_fallocate(fd, 0, self._segment_bytes)
        except OSError:
            if is_new:
                path.unlink()  # existing segments hold blocks and stay
            raise
        head = self._page(number, 0)
        body, digest = head[: _SEGMENT.size], head[_SEGMENT.size : _SEGMENT.size + _DIGEST.size]
        magic, fingerprint, num_bytes, generation, nonce = _SEGMENT.unpack(body)
        known = (magic, fingerprint, num_bytes) == (_MAGIC, self._fingerprint, self._segment_bytes)
        if not known or digest != _digest(body, 0):
            return Segment()
        self._generations[number] = generation, nonce
        return self._scan(number, generation)

    def _scan(self, segment: int, generation: int) -> Segment:
        """Scan header by header. A damaged header hides only its own block: the next one is searched page by page."""
        disk_copies: list[DiskCopy] = []
        at = end = PAGE
        while at < (stop := min(self._segment_bytes, end + _LOST_HEADERS * footprint(self._block_bytes))):
            read = self._parse(self._page(segment, at), segment, at, generation) or self._next_header(
                segment, at + PAGE, stop, generation
            )
            if read is None:
                break
            kind, copy = read
            at = end = copy.end
            if kind == _WHOLE:
                disk_copies.append(copy)
        return Segment(generation, tuple(disk_copies), end)

    def _next_header(self, segment: int, at: int, stop: int, generation: int) -> tuple[int, DiskCopy] | None:
        while at < stop:
            num_bytes = os.preadv(self._fds[segment], [self._writing[: min(len(self._writing), stop - at)]], at)
            for start in range(0, num_bytes - PAGE + 1, PAGE):
                head = bytes(self._writing[start : start + _BLOCK.size + _DIGEST.size])
                if (found := self._parse(head, segment, at + start, generation)) is not None:
                    return found
            at += max(PAGE, num_bytes // PAGE * PAGE)
        return None

    def _parse(self, head: bytes, segment: int, offset: int, generation: int) -> tuple[int, DiskCopy] | None:
        """Parse a block header; None unless it belongs to this position and the segment's current generation."""
        body, digest = head[: _BLOCK.size], head[_BLOCK.size : _BLOCK.size + _DIGEST.size]
        magic, kind, in_segment, at, number, key, namespace, position, num_bytes, form, checksum = _BLOCK.unpack(body)
        if (
            magic != _MAGIC
            or digest != _digest(body, self._generations[segment][1])
            or (in_segment, at) != (segment, offset)
        ):
            return None
        copy = DiskCopy(key, namespace, position, checksum, num_bytes, form, number, segment, at, generation)
        return (kind, copy) if copy.end <= self._segment_bytes else None

    def _page(self, segment: int, offset: int) -> bytes:
        num_bytes = os.preadv(self._fds[segment], [self._writing[:PAGE]], offset)
        return bytes(self._writing[:num_bytes]) + bytes(PAGE - num_bytes)

    def _open_purges(self, disk_copies: Sequence[DiskCopy]) -> list[Purge]:
        """Purges that still void some copy; the file is rewritten without the others."""
        path = self._folder / "purges"
        record = _PURGE.size + _DIGEST.size
        data = path.read_bytes() if path.exists() else b""
        youngest: dict[bytes, int] = {}
        for start in range(0, len(data) - record + 1, record):
            body = data[start : start + _PURGE.size]
            if data[start + _PURGE.size : start + record] == _digest(body, 0):
                namespace, before = _PURGE.unpack(body)
                youngest[namespace] = max(before, youngest.get(namespace, 0))
        needed = {copy.namespace for copy in disk_copies if copy.number < youngest.get(copy.namespace, 0)}
        purges = [Purge(namespace, before) for namespace, before in youngest.items() if namespace in needed]
        fresh = self._folder / "purges.new"
        self._purges = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        for purge in purges:
            self._put_purge(purge)
        os.fsync(self._purges)
        fresh.rename(path)
        return purges


def _digest(body: bytes, nonce: int) -> bytes:
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(body, nonce))


def _open_aligned(path: Path, page: memoryview) -> int:
    """Open with O_DIRECT where the file system supports it: the blocks are in the arena already."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        try:
            os.preadv(fd, [page], 0)
            return fd
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def explain(error: OSError, folder: Path, num_bytes: int) -> DiskError:
    """Turn an OSError into a DiskError with a cause and a hint."""
    what, hint = f"{folder}: {error.strerror or error}", "choose another --disk-dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, hint = f"no room for {num_bytes / 2**30:.1f} GB in {folder}", f"give it less (--disk-gb), or {hint}"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        what = f"{folder} cannot be written ({error.strerror})"
    return DiskError(what, hint=hint)
