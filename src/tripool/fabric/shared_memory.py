"""KV transfer on one machine: an arena that a sender writes and receivers map."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from tripool.cache.arena import Arena
from tripool.cache.copying import Bytes, checksum
from tripool.errors import ArenaError
from tripool.fabric.kv_transfer import KvReceiver, KvSender, TransferCapabilities
from tripool.messages import Checksum, FileName, KvDescriptor, Natural, Positive, WorkerId, strictly

KIND = "shared_memory"


class BlockTable(msgspec.Struct, frozen=True, array_like=True):
    """What a descriptor of this kind holds: slots of an arena."""

    arena: FileName
    """In the run folder."""
    block_bytes: Positive
    slots: tuple[Natural, ...]
    """In order of position; the last block may be partly filled."""
    checksums: tuple[Checksum, ...]

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


class Summed(Protocol):
    """KV whose blocks are known by their checksums, wherever they are."""

    @property
    def checksums(self) -> Sequence[int]: ...


class Arenas(Protocol):
    """The receiver's maps of senders' arenas, by name."""

    def view(self, name: str, slot: int, num_bytes: int) -> Bytes | None:
        """None: there is no such arena, or no such slot in it."""


class MappedArenas:
    """`Arenas` in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._arenas: dict[str, Arena] = {}

    def view(self, name: str, slot: int, num_bytes: int) -> Bytes | None:
        if name not in self._arenas:
            self._arenas = {known: arena for known, arena in self._arenas.items() if arena.path.exists()}
            try:
                self._arenas[name] = Arena.attach(self._folder / name, read_only=True)
            except (OSError, ArenaError):
                return None  # its owner is gone, and with it the KV; or it is none of ours
        arena = self._arenas[name]
        return arena.view(slot, num_bytes) if slot < arena.num_slots and num_bytes <= arena.slot_bytes else None


class MappedReceiver:
    """`KvReceiver` of blocks in arenas that this process maps."""

    def __init__(self, arenas: Arenas, block_tokens: int, block_bytes: int) -> None:
        self._arenas, self._block_tokens, self._block_bytes = arenas, block_tokens, block_bytes

    def open(self, descriptor: KvDescriptor, num_tokens: int) -> MappedKv | None:
        table, num_blocks = BlockTable.of(descriptor), -(-num_tokens // self._block_tokens)
        if table is None or table.block_bytes != self._block_bytes:
            return None
        return MappedKv(table, self._arenas) if len(table.slots) == len(table.checksums) == num_blocks else None

    def close(self) -> None:
        pass  # a mapping ends with its last user


class MappedKv:
    """`IncomingKv` in a mapped arena."""

    arrived = True

    def __init__(self, table: BlockTable, arenas: Arenas) -> None:
        self.num_blocks = len(table.slots)
        self._table, self._arenas = table, arenas

    def begin(self) -> None:
        pass

    def read(self, index: int, into: memoryview) -> memoryview | None:
        view = self._arenas.view(self._table.arena, self._table.slots[index], len(into))
        if view is None:
            return None
        # The copy is what is summed up: what is checked is what will be used.
        into[:] = view.data
        return into if checksum(into) == self._table.checksums[index] else None

    @property
    def checksums(self) -> Sequence[int]:
        return self._table.checksums

    def num_shared(self, other: Summed) -> int:
        return num_equal(self.checksums, other.checksums)

    def close(self) -> None:
        pass


def num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading checksums are the same."""
    differs = (place for place, (one, two) in enumerate(zip(ours, theirs, strict=False)) if one != two)
    return next(differs, min(len(ours), len(theirs)))


class SharedMemoryTransfer:
    """`Transfer` between the workers of one run folder. `num_slots`: of a sender."""

    capabilities = TransferCapabilities(KIND, same_host=True, in_place=True)

    def __init__(
        self, folder: Path, worker_id: WorkerId, *, block_tokens: int, block_bytes: int, num_slots: int
    ) -> None:
        self.path = folder / f"{worker_id}.kv"
        self.block_tokens, self.block_bytes, self.num_slots = block_tokens, block_bytes, num_slots

    def sender(self) -> KvSender:
        return KvSender(self._create(), partial(_describe, self.path.name, self.block_bytes))

    def receiver(self) -> KvReceiver:
        return MappedReceiver(self._attached(), self.block_tokens, self.block_bytes)

    def _create(self) -> Arena:
        return Arena.create(self.path, self.block_bytes, self.num_slots, lazy=True)

    def _attached(self) -> Arenas:
        return MappedArenas(self.path.parent)


def _describe(name: str, block_bytes: int, slots: Sequence[int], checksums: Sequence[int]) -> KvDescriptor:
    return BlockTable(name, block_bytes, tuple(slots), tuple(checksums)).descriptor()
