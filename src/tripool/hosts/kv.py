"""KV transfer between hosts: on one host through shared memory, between two over TCP. The descriptor says which.

The sender is that of one host: blocks in an arena, leased. A receiver on another host has its own host's server bring
them (`fetch.py`), checked, into an arena of its own, from which they are imported where they are: a worker neither
receives nor decrypts, so that decode steps are not disturbed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from tripool.cache.arena import Arena
from tripool.errors import ArenaError
from tripool.fabric.kv_transfer import IncomingKv, KvReceiver, KvSender, TransferCapabilities
from tripool.fabric.shared_memory import BlockTable, MappedReceiver, SharedMemoryTransfer, Summed, num_equal
from tripool.hosts.directory import DirectoryFile, OwnHost
from tripool.hosts.fetch import FETCHED, MAX_BLOCKS, Cancel, Fetch, fetch_address
from tripool.local_channel import LocalChannel
from tripool.messages import KvDescriptor, Name, strictly

KIND = "hosts"
Describe = Callable[[Sequence[int], Sequence[int]], KvDescriptor]
_PART_BYTES = 2 * 2**20
"""Asked for at once."""


class HostBlocks(msgspec.Struct, frozen=True, array_like=True):
    """What a descriptor of this kind holds."""

    host: Name
    """Of the sender; the receiver's directory says where that is."""
    table: BlockTable


class HostTransfer:
    """`Transfer` between all workers of a run of several hosts. `local`: between those of this host."""

    capabilities = TransferCapabilities(KIND, same_host=False, in_place=False)

    def __init__(self, own: OwnHost, directory: DirectoryFile, local: SharedMemoryTransfer) -> None:
        self._own, self._directory, self._local = own, directory, local

    def sender(self) -> KvSender:
        sender = self._local.sender()
        sender.describe = partial(_describe, self._own, sender.describe)
        return sender

    def receiver(self) -> KvReceiver:
        return HostReceiver(self._own, self._directory, self._local)


def _describe(own: OwnHost, local: Describe, slots: Sequence[int], sums: Sequence[int]) -> KvDescriptor:
    return KvDescriptor(KIND, msgspec.msgpack.encode(HostBlocks(own.name, table_of(local, slots, sums))))


def table_of(local: Describe, slots: Sequence[int], sums: Sequence[int]) -> BlockTable:
    table = BlockTable.of(local(slots, sums))
    assert table is not None
    return table


class Staging:
    """Memory for blocks on their way in: slots of an arena, made when it is first used, that are taken all at once."""

    def __init__(self, path: Path, block_bytes: int, num_slots: int) -> None:
        self.path, self.block_bytes, self.num_slots = path, block_bytes, num_slots
        self._arena: Arena | None = None
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """None: there are not so many, or there is no memory for them now."""
        if count > len(self._free):
            return None
        try:
            self._arena = self._arena or Arena.create(self.path, self.block_bytes, self.num_slots, lazy=True)
        except (OSError, ArenaError):
            return None
        slots = self._free[-count:][::-1]
        if not all(map(self._arena.back, slots)):
            return None
        del self._free[-count:]
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        self._free += reversed(slots)

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, "nothing was taken yet"
        return self._arena

    def view(self, slot: int) -> memoryview:
        return self.arena.view(slot, self.block_bytes).data

    def close(self) -> None:
        if self._arena is not None:
            self._arena.remove()
        self._arena = None


class HostReceiver:
    """`KvReceiver` of blocks on any host. For one thread."""

    kind: ClassVar[str] = KIND
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(HostBlocks)

    def __init__(self, own: OwnHost, directory: DirectoryFile, local: SharedMemoryTransfer) -> None:
        mapped = local.receiver()
        assert isinstance(mapped, MappedReceiver)
        self._own, self._directory, self._mapped = own, directory, mapped
        self._block_tokens = local.block_tokens
        self.staging = Staging(local.path.with_suffix(".in"), local.block_bytes, local.num_slots)
        self._waiting: deque[RemoteKv] = deque()
        """Begun, without room yet; oldest first."""
        self._channel: LocalChannel | None = None
        self._asked: dict[int, RemoteKv] = {}
        """By the number of a request."""
        self._number = 0

    def open(self, descriptor: KvDescriptor, num_tokens: int) -> IncomingKv | None:
        try:
            found = strictly(self.decoder, descriptor.payload) if descriptor.kind == self.kind else None
        except msgspec.DecodeError:
            return None
        if found is None or found.host == self._own.name:
            return self._mapped.open(descriptor if found is None else found.table.descriptor(), num_tokens)
        table, num_blocks = found.table, -(-num_tokens // self._block_tokens)
        if table.block_bytes != self.staging.block_bytes or num_blocks > self.staging.num_slots:
            return None
        if not self._directory.links_of(found.host) or not len(table.slots) == len(table.checksums) == num_blocks:
            return None
        return RemoteKv(self, found)

    def close(self) -> None:
        self._lost()
        self.staging.close()

    # ---- what was opened begins and ends; the host's server has brought all of it, or failed ------------------------

    def begin(self, kv: RemoteKv) -> None:
        self._waiting.append(kv)
        self.hear()
        self._pump()

    def end(self, kv: RemoteKv) -> None:
        kv.closed = True
        if kv in self._waiting:
            self._waiting.remove(kv)
        if kv.parts_left and self._channel is not None:
            self._send(Cancel(tuple(number for number, asked in self._asked.items() if asked is kv)))
        self.hear()
        self._free(kv)

    def hear(self) -> None:
        """What the host's server says."""
        while self._channel is not None and self._asked:
            try:
                data = self._channel.receive()
                if data is None:
                    return
                if not len(data):
                    raise ConnectionResetError
                fetched = strictly(FETCHED, data)
            except (OSError, msgspec.DecodeError):
                self._lost()
                return
            kv = self._asked.pop(fetched.number, None)
            if kv is not None:
                self._part_ended(kv, good=fetched.good)

    def _part_ended(self, kv: RemoteKv, *, good: bool) -> None:
        kv.failed |= not good
        kv.parts_left -= 1
        self._free(kv)

    def _lost(self) -> None:
        """Its process has ended, or will: nothing more is written by it."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        asked, self._asked = self._asked, {}
        for kv in asked.values():
            self._part_ended(kv, good=False)

    def _free(self, kv: RemoteKv) -> None:
        """Only when nothing is written to its slots any more."""
        if kv.closed and not kv.parts_left and kv.slots:
            self.staging.give_back(kv.slots)
            kv.slots = []
        self._pump()

    def _pump(self) -> None:
        """Start what there is room for, in order."""
        while self._waiting:
            kv = self._waiting[0]
            slots = self.staging.take(kv.num_blocks)
            if slots is None:
                if self.staging.num_free < self.staging.num_slots:
                    return
                slots = []  # there is no memory, and none will be given back
            self._waiting.popleft()
            kv.slots, kv.begun, kv.failed = slots, True, not slots
            if slots:
                self._ask(kv)

    def _ask(self, kv: RemoteKv) -> None:
        at_once = min(max(1, _PART_BYTES // self.staging.block_bytes), MAX_BLOCKS)
        if self._channel is not None and not self._asked and self._channel.readable:
            self._lost()  # it has nothing to say but that it has ended
        if self._channel is None:
            self._channel = LocalChannel.connect(fetch_address(self.staging.path.parent))
        table = kv.table
        for start in range(0, kv.num_blocks, at_once):
            part, self._number = slice(start, start + at_once), self._number + 1
            kv.parts_left += 1
            self._asked[self._number] = kv
            self._send(
                Fetch(
                    self._number, kv.found.host, table.arena, table.block_bytes, table.slots[part],
                    table.checksums[part], self.staging.path.name, tuple(kv.slots[part]),
                )
            )  # fmt: skip

    def _send(self, request: Fetch | Cancel) -> None:
        try:
            if self._channel is None:
                raise ConnectionResetError("the host's server is not there")
            self._channel.send(msgspec.msgpack.encode(request))
        except OSError:
            self._lost()


class RemoteKv:
    """`IncomingKv` on another host."""

    def __init__(self, receiver: HostReceiver, found: HostBlocks) -> None:
        self.found, self.table, self._receiver = found, found.table, receiver
        self.num_blocks = len(self.table.slots)
        self.slots: list[int] = []
        self.parts_left = 0
        self.begun = self.failed = self.closed = False

    @property
    def arrived(self) -> bool:
        self._receiver.hear()
        return self.begun and not self.parts_left

    def begin(self) -> None:
        self._receiver.begin(self)

    def read(self, index: int, into: memoryview) -> memoryview | None:
        """Where it is: it was checked there, and is not written any more."""
        return None if self.failed or not self.slots else self._receiver.staging.view(self.slots[index])

    def num_shared(self, other: Summed) -> int:
        return num_equal(self.checksums, other.checksums)

    @property
    def checksums(self) -> Sequence[int]:
        return self.table.checksums

    def close(self) -> None:
        self._receiver.end(self)
