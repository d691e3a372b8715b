"""Arena: a file in shared memory that several processes map, with slots of one size and a header each.

A cache member has one for its blocks, and a prefill worker one for the KV that it sends, without headers.

| bytes | contents |
|---|---|
| one page | magic, version, slot size, number of slots, nonce |
| 128 per slot, to a full page | headers: written only by the member, state last, so a torn header reads as free |
| 16 per slot, to a full page | directory: where a key may be, for shared reads |
| 64 per slot, to a full page | reader slots: current reads by each client; each writes only its own column |
| the slots, page by page | written only by the client that reserved a slot |

Headers survive the member: a restarted member recovers its blocks from them. The file is removed at an orderly end.

**Shared reads.** A client increments its reader slot and then reads the header: committed, with this key, its digest
valid. The member closes the header before it checks the reader slots. So either the member sees the reader and keeps
the block, or the reader sees that the slot is closed. There is no fence between the two steps: the processor may
reorder them within some nanoseconds, and then, as after an expired lease, the reader finds another header after
copying. Not `multiprocessing.shared_memory`: its tracker would remove the file when any one of its users dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tripool.cache.copying import Bytes, address, copy
from tripool.cache.records import Block, Record, State
from tripool.errors import ArenaError
from tripool.messages import WorkerId

PAGE = 4096
_RW = mmap.PROT_READ | mmap.PROT_WRITE
MAX_WORKER_NAME_BYTES = 43
NUM_READER_SLOTS = 64
_MAGIC = b"TPARENA3"
_FILE = struct.Struct("<8sQQQ")
_BODY = struct.Struct(f"<16s16sQIQIIqB{MAX_WORKER_NAME_BYTES}s")
_TAIL = struct.Struct("<QQ")
"""Digest of the body, then the state."""
_HEADER_BYTES = _BODY.size + _TAIL.size
_FOUND = struct.Struct("<16s16sQ4xQII")
"""The first fields of a body: key, namespace, ticket, checksum, bytes, form."""
_WAYS = 8
"""Directory entries per hash bucket. An outdated entry is detected by its slot's header."""
_BUCKET = struct.Struct(f"<{_WAYS}I")
_EMPTY = bytes(NUM_READER_SLOTS)
_MAX_TICKET = 2**62
"""Tickets start at the monotonic time in nanoseconds: a header with a higher one was not written by a member."""


class Arena:
    """Made in a file by `create`, `reopen` (its owner) or `attach` (others)."""

    def __init__(
        self, path: Path, memory: mmap.mmap, slot_bytes: int, num_slots: int, nonce: int, fd: int = -1
    ) -> None:
        self.path, self.slot_bytes, self.num_slots, self.nonce = path, slot_bytes, num_slots, nonce
        self._fd, self._map, self._num_backed = fd, memory, 0
        self._stride, self._data, _ = _layout(slot_bytes, num_slots)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self._directory, self._num_buckets = _headers_end(num_slots), _num_entries(num_slots) // _WAYS
        self._reader_slots = _directory_end(num_slots)
        start = address(self._bytes)
        self.shape = (ctypes.c_uint64 * 8)(
            start, PAGE, self._directory, self._num_buckets, self._reader_slots, self._data, self._stride, num_slots
        )
        """Addresses for compiled code, valid while this arena is alive."""

    @classmethod
    def of_file(
        cls, path: Path, fd: int, slot_bytes: int, num_slots: int, nonce: int, *, lazy: bool = False, access: int = _RW
    ) -> Arena:
        # Unless lazy, populate all pages now: page faults would cost as much as the copies.
        flags = mmap.MAP_SHARED | (0 if lazy else getattr(mmap, "MAP_POPULATE", 0))
        memory = mmap.mmap(fd, arena_bytes(slot_bytes, num_slots), flags, access)
        return cls(path, memory, slot_bytes, num_slots, nonce, fd)

    @classmethod
    def create(cls, path: Path, slot_bytes: int, num_slots: int, *, lazy: bool = False) -> Arena:
        """`lazy`: a slot has memory only after `back`."""
        size = arena_bytes(slot_bytes, num_slots)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ArenaError(f"{path.name} is there already", hint="another member has this name") from None
        try:
            _lock(fd, path)
            # Allocate now, so that a lack of memory is an error here and not a bus error during a copy.
            os.posix_fallocate(fd, 0, PAGE if lazy else size)
            os.ftruncate(fd, size)
            nonce = secrets.randbits(63)
            os.pwrite(fd, _FILE.pack(_MAGIC, slot_bytes, num_slots, nonce), 0)
            return cls.of_file(path, fd, slot_bytes, num_slots, nonce, lazy=lazy)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                hint = "give the cache less memory (--cache-gb), or the shared-memory file system more"
                raise ArenaError(f"no room for {size / 2**30:.1f} GB of cache", hint=hint) from error
            raise

    @classmethod
    def reopen(cls, path: Path, slot_bytes: int, num_slots: int) -> Arena | None:
        """The arena of an earlier process of this member; None if there is none of this shape."""
        try:
            fd = _open(path)
        except FileNotFoundError:
            return None
        found = _read_file_header(fd)
        if found is None or found[:2] != (slot_bytes, num_slots):
            _lock(fd, path)
            path.unlink()
            os.close(fd)
            return None
        _lock(fd, path)
        return cls.of_file(path, fd, *found)

    @classmethod
    def attach(cls, path: Path, *, read_only: bool = False, lazy: bool = False) -> Arena:
        """Map an arena of another process; `read_only` or `lazy` as far as it has memory."""
        fd = _open(path)
        found = _read_file_header(fd)
        if found is None:
            os.close(fd)
            raise ArenaError(f"{path.name} is no arena of this version", hint="restart the cache members")
        arena = cls.of_file(path, fd, *found, lazy=read_only or lazy, access=mmap.PROT_READ if read_only else _RW)
        os.close(fd)  # the mapping stays; only the member's lock needs the file itself
        arena._fd = -1
        return arena

    def back(self, slot: int) -> bool:
        """Make sure that there is memory behind a slot of a lazy arena; False when the shared memory is full. Without
        it, a page that the file system cannot give would end the process.
        """
        while self._num_backed <= slot:
            try:
                os.posix_fallocate(self._fd, self._data + self._num_backed * self._stride, self._stride)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                return False
            self._num_backed += 1
        return True

    def remove(self) -> None:
        """Remove the file; clients that still map it keep their mapping."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    # ---- blocks -------------------------------------------------------------------------------------------------

    def write(self, slot: int, block: Any) -> int:
        """Copy a block (any contiguous buffer) into a slot; returns its checksum."""
        source = as_bytes(block)
        return copy(source, self.view(slot, len(source)))

    def read(self, slot: int, into: Any) -> int:
        """Copy a slot's first bytes until `into` is full; returns the checksum of the copy, not of the slot."""
        target = as_bytes(into)
        return copy(self.view(slot, len(target)), target)

    def view(self, slot: int, num_bytes: int) -> Bytes:
        assert 0 <= slot < self.num_slots and num_bytes <= self.slot_bytes
        start = self._data + slot * self._stride
        return self._bytes[start : start + num_bytes]

    # ---- headers ------------------------------------------------------------------------------------------------

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether a slot holds this committed block now: checked after copying, it detects an expired lease."""
        at = PAGE + slot * _HEADER_BYTES
        (_, state) = _TAIL.unpack_from(self._map, at + _BODY.size)
        return state == State.COMMITTED and self._map[at : at + len(key)] == key

    def write_header(self, slot: int, record: Record) -> None:
        at = PAGE + slot * _HEADER_BYTES
        _TAIL.pack_into(self._map, at + _BODY.size, 0, State.FREE)
        if record.state not in (State.RESERVED, State.COMMITTED):
            return
        writer = record.writer or WorkerId("", 0)
        name = writer.name.encode()
        body = _BODY.pack(
            record.key,
            record.namespace,
            record.ticket,
            record.position,
            record.checksum,
            record.num_bytes,
            record.form,
            writer.epoch,
            len(name),
            name,
        )
        self._map[at : at + _BODY.size] = body
        _TAIL.pack_into(self._map, at + _BODY.size, xxhash.xxh3_64_intdigest(body), record.state)
        if record.state is State.COMMITTED:
            self._enter(record.key, slot)

    def _enter(self, key: bytes, slot: int) -> None:
        bucket = self._bucket(key)
        entries = list(self._entries(bucket))
        if slot + 1 not in entries:
            outdated = (way for way, entry in enumerate(entries) if not entry or not self._belongs(entry - 1, bucket))
            entries[next(outdated, slot % _WAYS)] = slot + 1
            _BUCKET.pack_into(self._map, self._directory + bucket * _BUCKET.size, *entries)

    def _entries(self, bucket: int) -> tuple[int, ...]:
        return _BUCKET.unpack_from(self._map, self._directory + bucket * _BUCKET.size)

    def _belongs(self, slot: int, bucket: int) -> bool:
        if slot >= self.num_slots:
            return False
        record = self.record(slot)
        return record.state is State.COMMITTED and self._bucket(record.key) == bucket

    def _bucket(self, key: bytes) -> int:
        return xxhash.xxh3_64_intdigest(key) % self._num_buckets

    # ---- reader slots -----------------------------------------------------------------------------------------

    def acquire(self, key: bytes, namespace: bytes, reader_slot: int) -> tuple[Block, int] | None:
        """A committed block, kept until `release`, and its ticket; None if it is not in the directory."""
        for entry in self._entries(self._bucket(key)):
            if not entry:
                continue
            at = PAGE + (entry - 1) * _HEADER_BYTES
            if entry > self.num_slots or self._map[at : at + len(key)] != key:
                continue
            counter = self._reader_slots + (entry - 1) * NUM_READER_SLOTS + reader_slot
            if self._map[counter] == 255:
                return None
            self._map[counter] += 1
            head = self._map[at : at + _HEADER_BYTES]
            digest, state = _TAIL.unpack_from(head, _BODY.size)
            owner, tenant, ticket, checksum, num_bytes, form = _FOUND.unpack_from(head)
            is_it = state == State.COMMITTED and owner == key and tenant == namespace
            if is_it and digest == xxhash.xxh3_64_intdigest(head[: _BODY.size]):
                return Block(entry - 1, checksum, num_bytes, form), ticket
            self.release(entry - 1, reader_slot)
        return None

    def release(self, slot: int, reader_slot: int) -> None:
        counter = self._reader_slots + slot * NUM_READER_SLOTS + reader_slot
        self._map[counter] = max(0, self._map[counter] - 1)  # 0 already: cleared by the member

    def close_if_unread(self, slot: int) -> bool:
        """For the member: close a committed slot's header, and open it again if it is being read."""
        at = PAGE + slot * _HEADER_BYTES + _BODY.size
        tail = self._map[at : at + _TAIL.size]
        _TAIL.pack_into(self._map, at, 0, State.FREE)
        if not self.is_read(slot):
            return True
        self._map[at : at + _TAIL.size] = tail
        return False

    def is_read(self, slot: int) -> bool:
        at = self._reader_slots + slot * NUM_READER_SLOTS
        return self._map[at : at + NUM_READER_SLOTS] != _EMPTY

    def evict_readers(self, slot: int) -> None:
        at = self._reader_slots + slot * NUM_READER_SLOTS
        self._map[at : at + NUM_READER_SLOTS] = _EMPTY

    def clear(self, reader_slots: slice) -> None:
        """Clear reader slots whose clients are gone."""
        size = self.num_slots * NUM_READER_SLOTS
        self._bytes[self._reader_slots : self._reader_slots + size].reshape(-1, NUM_READER_SLOTS)[:, reader_slots] = 0

    # ---- recovery -----------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Records of all slots from their headers; damaged ones are free."""
        return [self.record(slot) for slot in range(self.num_slots)]

    def record(self, slot: int) -> Record:
        at = PAGE + slot * _HEADER_BYTES
        body = self._map[at : at + _BODY.size]
        digest, state = _TAIL.unpack_from(self._map, at + _BODY.size)
        if state not in (State.RESERVED, State.COMMITTED) or digest != xxhash.xxh3_64_intdigest(body):
            return Record()
        key, namespace, ticket, position, checksum, num_bytes, form, epoch, name_bytes, name = _BODY.unpack(body)
        if ticket > _MAX_TICKET or num_bytes > self.slot_bytes:
            return Record()
        try:
            writer = WorkerId(name[:name_bytes].decode(), epoch) if state == State.RESERVED else None
        except UnicodeDecodeError:
            return Record()
        return Record(State(state), key, namespace, ticket, position, writer, checksum, num_bytes, form)


def as_bytes(buffer: Any) -> Bytes:
    """The bytes of a contiguous array or buffer, in place."""
    return np.frombuffer(buffer, np.uint8)


def arena_bytes(slot_bytes: int, num_slots: int) -> int:
    return _layout(slot_bytes, num_slots)[2]


def _layout(slot_bytes: int, num_slots: int) -> tuple[int, int, int]:
    """(bytes from slot to slot, offset of the first slot, size of the file)."""
    stride = _pages(slot_bytes)
    data = _directory_end(num_slots) + _pages(num_slots * NUM_READER_SLOTS)
    return stride, data, data + num_slots * stride


def _headers_end(num_slots: int) -> int:
    return PAGE + _pages(num_slots * _HEADER_BYTES)


def _directory_end(num_slots: int) -> int:
    return _headers_end(num_slots) + _pages(4 * _num_entries(num_slots))


def _num_entries(num_slots: int) -> int:
    """Directory entries: four per slot, so that hardly one in ten thousand is displaced."""
    return -(-4 * num_slots // _WAYS) * _WAYS


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _open(path: Path) -> int:
    """Open only a regular file of this user that others cannot access."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    said = os.fstat(fd)
    if not stat.S_ISREG(said.st_mode) or said.st_uid != os.geteuid() or said.st_mode & 0o077:
        os.close(fd)
        raise ArenaError(f"{path.name} is not a private file of this user", hint="remove it")
    return fd


def _read_file_header(fd: int) -> tuple[int, int, int] | None:
    """(slot size, number of slots, nonce); None if this is not a complete arena."""
    head = os.pread(fd, _FILE.size, 0)
    if len(head) < _FILE.size:
        return None
    magic, slot_bytes, num_slots, nonce = _FILE.unpack(head)
    if magic != _MAGIC or not slot_bytes or not num_slots:
        return None
    return (slot_bytes, num_slots, nonce) if os.fstat(fd).st_size == arena_bytes(slot_bytes, num_slots) else None


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArenaError(f"{path.name} is in use", hint="another member with this name is alive") from None
