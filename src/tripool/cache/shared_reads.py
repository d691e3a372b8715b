"""Lock-free reads of blocks in another process's arena: acquire, copy, verify, release.

Compiled code does all blocks of a call at once where available, else Python does them one by one. The result of a
look-up stays packed, 32 bytes per block, as the compiled code fills and reads it: creating objects per block would cost
about half as much as copying it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tripool.cache.arena import Arena, as_bytes
from tripool.cache.copying import is_compiled, library, quarter
from tripool.cache.records import Block

_FOUND = struct.Struct("<QQIII?3x")
"""Ticket, checksum, slot, bytes, form, from_disk."""
_KEY_BYTES = 16


class SharedBlocks:
    """Readable blocks of these keys, in order. The caller holds a lease or reader slots that keep them in place."""

    def __init__(self, arena: Arena, keys: Sequence[bytes], packed: bytearray) -> None:
        self.arena = arena
        self.bad: list[int] = []
        """Slots whose bytes did not match their checksum."""
        self._keys, self._packed = keys, packed

    @classmethod
    def from_lookup(cls, arena: Arena, keys: Sequence[bytes], blocks: Iterable[Block]) -> SharedBlocks:
        """From a member's reply, under its lease."""
        rows = (_FOUND.pack(0, each.checksum, each.slot, each.num_bytes, each.form, each.from_disk) for each in blocks)
        return cls(arena, keys, bytearray().join(rows))

    @classmethod
    def acquire(cls, arena: Arena, keys: Sequence[bytes], namespace: bytes, reader_slot: int) -> SharedBlocks | None:
        """Acquire all blocks without a request, until `release`; None if any of them is not in the directory."""
        compiled = library()
        if compiled is None:
            return cls.acquire_plain(arena, keys, namespace, reader_slot)
        packed = bytearray(_FOUND.size * len(keys))
        joined = b"".join(keys)
        assert len(joined) == _KEY_BYTES * len(keys) and len(namespace) == _KEY_BYTES
        if not compiled.tripool_acquire(arena.shape, reader_slot, namespace, len(keys), joined, _address(packed)):
            return None
        return cls(arena, keys, packed)

    @classmethod
    def acquire_plain(
        cls, arena: Arena, keys: Sequence[bytes], namespace: bytes, reader_slot: int
    ) -> SharedBlocks | None:
        rows: list[bytes] = []
        for key in reversed(keys):  # the missing block is usually at the end of a chain
            each = arena.acquire(key, namespace, reader_slot)
            if each is None:
                cls(arena, keys, bytearray().join(rows)).release(reader_slot)
                return None
            block, ticket = each
            rows.append(_FOUND.pack(ticket, block.checksum, block.slot, block.num_bytes, block.form, False))
        return cls(arena, keys, bytearray().join(reversed(rows)))

    def __len__(self) -> int:
        return len(self._packed) // _FOUND.size

    def __iter__(self) -> Iterator[Block]:
        for _, checksum, slot, num_bytes, form, from_disk in _FOUND.iter_unpack(self._packed):
            yield Block(slot, checksum, num_bytes, form, from_disk)

    @property
    def uses(self) -> list[tuple[int, int]]:
        """(slot, ticket) of each block, to report to the member what was read."""
        return [(slot, ticket) for ticket, _, slot, _, _, _ in _FOUND.iter_unpack(self._packed)]

    def release(self, reader_slot: int) -> None:
        compiled = library()
        if compiled is not None:
            compiled.tripool_release(self.arena.shape, reader_slot, len(self), _address(self._packed))
            return
        for block in self:
            self.arena.release(block.slot, reader_slot)

    def read(self, start: int, into: Sequence[Any]) -> int:
        """Copy the blocks from `start` on into these writable buffers; returns how many buffers hold their block.

        The contents of the buffers after that number are undefined.
        """
        into = into[: len(self) - start]
        size = memoryview(into[0]).nbytes if into else 0
        compiled = library()
        if compiled is None or not is_compiled(size) or any(memoryview(each).nbytes != size for each in into):
            return self.read_plain(start, into)
        targets = (ctypes.c_void_p * len(into))(*map(_address, into))
        found = _address(self._packed) + start * _FOUND.size
        keys, damaged = b"".join(self._keys[start : start + len(into)]), ctypes.c_int()
        assert size <= self.arena.slot_bytes
        num_good: int = compiled.tripool_read(
            self.arena.shape, len(into), found, keys, targets, quarter(size), size, ctypes.byref(damaged)
        )
        if damaged.value:
            self._note_bad(start + num_good)
        return num_good

    def read_plain(self, start: int, into: Sequence[Any]) -> int:
        into = into[: len(self) - start]
        for number, (buffer, key) in enumerate(zip(into, self._keys[start:], strict=False)):
            _, checksum, slot, num_bytes, _, _ = _FOUND.unpack_from(self._packed, (start + number) * _FOUND.size)
            target = as_bytes(buffer)
            if len(target) != num_bytes:
                return number
            copied = self.arena.read(slot, target)
            if not self.arena.holds(slot, key):
                return number  # the lease expired and the slot was reused: not damaged
            if copied != checksum:
                self._note_bad(start + number)
                return number
        return len(into)

    def _note_bad(self, number: int) -> None:
        _, _, slot, _, _, _ = _FOUND.unpack_from(self._packed, number * _FOUND.size)
        self.bad.append(slot)


def _address(buffer: Any) -> int:
    """Address of a writable buffer; 0 for an empty one, which is never accessed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if memoryview(buffer).nbytes else 0
