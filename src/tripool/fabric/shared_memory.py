"""KV transfer on one machine: slots that a sender writes and receivers map, in files of the shared-memory file system.

Not `multiprocessing.shared_memory`: its tracker removes a segment when any one process that knew it dies.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from tripool.fabric.kv_transfer import KvReceiver, KvSender, TransferCapabilities, checksum
from tripool.messages import Checksum, FileName, KvDescriptor, Natural, Positive, WorkerId, strictly

KIND = "shared_memory"


class BlockTable(msgspec.Struct, frozen=True, array_like=True):
    """What a descriptor of this kind holds: blocks in a sender's memory."""

    memory: FileName
    """Relative to the run folder."""
    offsets: tuple[Natural, ...]
    """Byte offset of each block, in order of position; the last may be partly filled."""
    checksums: tuple[Checksum, ...]
    block_bytes: Positive

    def descriptor(self) -> KvDescriptor:
        return KvDescriptor(KIND, msgspec.msgpack.encode(self))

    @classmethod
    def of(cls, descriptor: KvDescriptor) -> BlockTable | None:
        """None: it is of another kind, or not valid."""
        try:
            return strictly(_decoder, descriptor.payload) if descriptor.kind == KIND else None
        except msgspec.DecodeError:
            return None


_decoder = msgspec.msgpack.Decoder(BlockTable)


def describe(name: str, slot_bytes: int, slots: Sequence[int], checksums: Sequence[int]) -> KvDescriptor:
    return BlockTable(name, tuple(slot * slot_bytes for slot in slots), tuple(checksums), slot_bytes).descriptor()


class MappedMemory(Protocol):
    """The receiver's maps of senders' memory, by name."""

    def view(self, name: str, start: int, num_bytes: int) -> memoryview | None:
        """None: there is no such memory, or not so much of it."""
        ...

    def close(self) -> None: ...


class Arena:
    """`SlotMemory` in a file. Only touched slots take memory, and it is reserved first: a page that the file system
    cannot give would end the process."""

    def __init__(self, path: Path, slot_bytes: int, num_slots: int) -> None:
        assert slot_bytes > 0 and num_slots > 0
        self.path, self.slot_bytes, self.num_slots = path, slot_bytes, num_slots
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, slot_bytes * num_slots)
        self._map = mmap.mmap(self._file, slot_bytes * num_slots)
        self._num_backed = 0
        """Leading slots that have memory."""

    def describe(self, slots: Sequence[int], checksums: Sequence[int]) -> KvDescriptor:
        return describe(self.path.name, self.slot_bytes, slots, checksums)

    def back(self, slot: int) -> bool:
        while self._num_backed <= slot:
            try:
                os.posix_fallocate(self._file, self._num_backed * self.slot_bytes, self.slot_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                return False
            self._num_backed += 1
        return True

    def view(self, slot: int) -> memoryview:
        start = slot * self.slot_bytes
        return memoryview(self._map)[start : start + self.slot_bytes]

    def close(self) -> None:
        self._map.close()
        os.close(self._file)
        self.path.unlink(missing_ok=True)


class FileMaps:
    """`MappedMemory` of the files in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def view(self, name: str, start: int, num_bytes: int) -> memoryview | None:
        mapped = self._map(name)
        if mapped is None or not 0 <= start <= len(mapped) - num_bytes:
            return None
        return memoryview(mapped)[start : start + num_bytes]

    def _map(self, name: str) -> mmap.mmap | None:
        if name not in self._maps:
            self._forget_removed()
            if name != Path(name).name or "\0" in name:
                return None  # a name, never a path: it came from outside
            try:
                file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                return None  # its owner is gone, and with it the KV
            try:
                self._maps[name] = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError):
                return None  # a folder, or an empty file
            finally:
                os.close(file)
        return self._maps[name]

    def _forget_removed(self) -> None:
        for name in [name for name in self._maps if not (self._folder / name).exists()]:
            self._maps.pop(name).close()

    def close(self) -> None:
        while self._maps:
            self._maps.popitem()[1].close()


class MappedReceiver:
    """`KvReceiver` of blocks in memory that this process maps."""

    def __init__(self, maps: MappedMemory, block_tokens: int, block_bytes: int) -> None:
        self._maps, self._block_tokens, self._block_bytes = maps, block_tokens, block_bytes

    def open(self, descriptor: KvDescriptor, num_tokens: int) -> MappedKv | None:
        table, num_blocks = BlockTable.of(descriptor), -(-num_tokens // self._block_tokens)
        if table is None or table.block_bytes != self._block_bytes:
            return None
        return MappedKv(table, self._maps) if len(table.offsets) == len(table.checksums) == num_blocks else None

    def close(self) -> None:
        self._maps.close()


class MappedKv:
    """`IncomingKv` in mapped memory."""

    arrived = True

    def __init__(self, table: BlockTable, maps: MappedMemory) -> None:
        self.num_blocks = len(table.offsets)
        self._table, self._maps = table, maps

    def begin(self) -> None:
        pass

    def read(self, index: int, into: memoryview) -> bool:
        view = self._maps.view(self._table.memory, self._table.offsets[index], len(into))
        if view is None:
            return False
        # The copy is what is summed up: what is checked is what will be used.
        into[:] = view
        return checksum(into) == self._table.checksums[index]

    def num_shared(self, other: MappedKv) -> int:
        ours, theirs = self._table.checksums, other._table.checksums
        differs = (place for place, (one, two) in enumerate(zip(ours, theirs, strict=False)) if one != two)
        return next(differs, min(len(ours), len(theirs)))

    def close(self) -> None:
        pass


class SharedMemoryTransfer:
    """`Transfer` between the workers of one run folder. `num_slots`: of a sender."""

    capabilities = TransferCapabilities(KIND, same_host=True, in_place=True)

    def __init__(
        self, folder: Path, worker_id: WorkerId, *, block_tokens: int, block_bytes: int, num_slots: int
    ) -> None:
        self._folder, self._worker_id = folder, worker_id
        self._block_tokens, self._block_bytes, self._num_slots = block_tokens, block_bytes, num_slots

    def sender(self) -> KvSender:
        return KvSender(Arena(self._folder / f"{self._worker_id}.kv", self._block_bytes, self._num_slots))

    def receiver(self) -> KvReceiver:
        return MappedReceiver(FileMaps(self._folder), self._block_tokens, self._block_bytes)
