"""Found blocks of one arena: sat down at, read and risen from, by compiled code where it is there, else step by step.

What was found stays packed, 32 bytes for each block, as compiled code fills and reads it: objects for each block would
cost as much time as half of its copy, since whoever copies megabytes finds nothing of the interpreter in its caches.
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
"""Ticket, checksum, slot, bytes, form, whether it came from disk."""
_KEY_BYTES = 16


class SharedBlocks:
    """The blocks of these keys, in their order. Whoever made it sees to it that they stay as they are."""

    def __init__(self, arena: Arena, keys: Sequence[bytes], packed: bytearray) -> None:
        self.arena = arena
        self.bad: list[int] = []
        """Slots that were read, and are not as they were written."""
        self._keys, self._packed = keys, packed

    @classmethod
    def told(cls, arena: Arena, keys: Sequence[bytes], blocks: Iterable[Block]) -> SharedBlocks:
        """By the member."""
        rows = (_FOUND.pack(0, each.checksum, each.slot, each.num_bytes, each.form, each.from_disk) for each in blocks)
        return cls(arena, keys, bytearray().join(rows))

    @classmethod
    def acquire(cls, arena: Arena, keys: Sequence[bytes], namespace: bytes, reader_slot: int) -> SharedBlocks | None:
        """Without asking. All of them, until `release`; None when not all can be seen."""
        compiled = library()
        if compiled is None:
            return cls.acquire_plainly(arena, keys, namespace, reader_slot)
        packed = bytearray(_FOUND.size * len(keys))
        joined = b"".join(keys)
        assert len(joined) == _KEY_BYTES * len(keys) and len(namespace) == _KEY_BYTES
        if not compiled.tripool_acquire(arena.shape, reader_slot, namespace, len(keys), joined, _address(packed)):
            return None
        return cls(arena, keys, packed)

    @classmethod
    def acquire_plainly(
        cls, arena: Arena, keys: Sequence[bytes], namespace: bytes, reader_slot: int
    ) -> SharedBlocks | None:
        rows: list[bytes] = []
        for key in reversed(keys):  # what is not there is mostly the end of a chain
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
        """Slots and tickets, for the member to know what was read."""
        return [(slot, ticket) for ticket, _, slot, _, _, _ in _FOUND.iter_unpack(self._packed)]

    def release(self, reader_slot: int) -> None:
        compiled = library()
        if compiled is not None:
            compiled.tripool_release(self.arena.shape, reader_slot, len(self), _address(self._packed))
            return
        for block in self:
            self.arena.release(block.slot, reader_slot)

    def read(self, start: int, into: Sequence[Any]) -> int:
        """Fill these writable buffers from block `start` on; returns how many hold their block.

        Buffers behind that number may hold anything.
        """
        into = into[: len(self) - start]
        size = memoryview(into[0]).nbytes if into else 0
        compiled = library()
        if compiled is None or not is_compiled(size) or any(memoryview(each).nbytes != size for each in into):
            return self.read_plainly(start, into)
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

    def read_plainly(self, start: int, into: Sequence[Any]) -> int:
        into = into[: len(self) - start]
        for number, (buffer, key) in enumerate(zip(into, self._keys[start:], strict=False)):
            _, checksum, slot, num_bytes, _, _ = _FOUND.unpack_from(self._packed, (start + number) * _FOUND.size)
            target = as_bytes(buffer)
            if len(target) != num_bytes:
                return number
            copied = self.arena.read(slot, target)
            if not self.arena.holds(slot, key):
                return number  # the lease was lost, and the slot is someone else's: not our business
            if copied != checksum:
                self._note_bad(start + number)
                return number
        return len(into)

    def _note_bad(self, number: int) -> None:
        _, _, slot, _, _, _ = _FOUND.unpack_from(self._packed, number * _FOUND.size)
        self.bad.append(slot)


def _address(buffer: Any) -> int:
    """Of something writable. An empty one has none, and nobody looks at it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if memoryview(buffer).nbytes else 0
