"""KV transfer between hosts: on one host through shared memory, between two over TCP. The descriptor says which.

The sender is that of one host: blocks in an arena, leased. A receiver on another host asks the sender's host for them,
many at once over several connections, into memory of its own, and checks every block when it copies it out. Its threads
have a low priority, so that decode steps come first.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial

import msgspec

from tripool.cache.arena import as_bytes
from tripool.cache.copying import copy
from tripool.fabric.kv_transfer import IncomingKv, KvReceiver, KvSender, TransferCapabilities
from tripool.fabric.shared_memory import BlockTable, MappedReceiver, SharedMemoryTransfer, Summed, num_equal
from tripool.hosts.connection import Connection, dial
from tripool.hosts.directory import DirectoryFile, OwnHost
from tripool.hosts.errors import HostError
from tripool.hosts.keys import HostKeys
from tripool.hosts.wire import ANSWERS, Data, ReadSlots
from tripool.messages import KvDescriptor, Name, strictly

KIND = "hosts"
Describe = Callable[[Sequence[int], Sequence[int]], KvDescriptor]
_CONNECTIONS = 2
"""To one sender's host."""
_PART_BYTES = 4 * 2**20
"""Asked for at once; of each connection two such parts are under way."""
_AHEAD = 2
_PROGRESS_S = 3.0
"""Longest time without a byte. A link that is cut for less loses nothing."""
_IDLE_S = 30.0
_TRIES = 2
_NICE = 5


class HostBlocks(msgspec.Struct, frozen=True, array_like=True):
    """What a descriptor of this kind holds."""

    host: Name
    """Of the sender; the receiver's directory says where that is."""
    table: BlockTable


_decoder = msgspec.msgpack.Decoder(HostBlocks)


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
        mapped = self._local.receiver()
        assert isinstance(mapped, MappedReceiver)
        staging = Staging(self._local.block_bytes, self._local.num_slots)
        return HostReceiver(self._own, self._directory, mapped, self._local.block_tokens, staging)


def _describe(own: OwnHost, local: Describe, slots: Sequence[int], sums: Sequence[int]) -> KvDescriptor:
    table = BlockTable.of(local(slots, sums))
    assert table is not None
    return KvDescriptor(KIND, msgspec.msgpack.encode(HostBlocks(own.name, table)))


class Staging:
    """Memory for blocks on their way in: slots that are taken all at once, and reused. Not for several threads."""

    def __init__(self, block_bytes: int, num_slots: int) -> None:
        self.block_bytes, self.num_slots = block_bytes, num_slots
        self._memory = memoryview(mmap.mmap(-1, max(1, block_bytes * num_slots)))  # without pages before it is used
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        return [self._free.pop() for _ in range(count)] if count <= len(self._free) else None

    def give_back(self, slots: Sequence[int]) -> None:
        self._free += reversed(slots)

    def view(self, slot: int) -> memoryview:
        return self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]


class HostReceiver:
    """`KvReceiver` of blocks on any host."""

    def __init__(
        self, own: OwnHost, directory: DirectoryFile, mapped: MappedReceiver, block_tokens: int, staging: Staging
    ) -> None:
        self._own, self._directory, self._mapped = own, directory, mapped
        self._block_tokens, self.staging = block_tokens, staging
        self._sources: dict[str, _Source] = {}
        self._waiting: deque[RemoteKv] = deque()
        """Begun, without room yet; oldest first."""
        self._lock = threading.Lock()

    def open(self, descriptor: KvDescriptor, num_tokens: int) -> IncomingKv | None:
        try:
            found = strictly(_decoder, descriptor.payload) if descriptor.kind == KIND else None
        except msgspec.DecodeError:
            return None
        if found is None or found.host == self._own.name:
            return self._mapped.open(descriptor if found is None else found.table.descriptor(), num_tokens)
        table, num_blocks = found.table, -(-num_tokens // self._block_tokens)
        if table.block_bytes != self.staging.block_bytes or num_blocks > self.staging.num_slots:
            return None
        address = self._directory.address_of(found.host)
        if not address or not len(table.slots) == len(table.checksums) == num_blocks:
            return None
        return RemoteKv(self, table, address)

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    # ---- what was opened begins and ends; a thread has brought all of it, or failed ---------------------------------

    def begin(self, kv: RemoteKv) -> None:
        with self._lock:
            self._waiting.append(kv)
            self._pump()

    def end(self, kv: RemoteKv) -> None:
        with self._lock:
            kv.closed = True
            if kv in self._waiting:
                self._waiting.remove(kv)
            self._free(kv)

    def part_ended(self, kv: RemoteKv, *, good: bool) -> None:
        with self._lock:
            kv.failed |= not good
            kv.parts_left -= 1
            self._free(kv)

    def _free(self, kv: RemoteKv) -> None:
        """Only when no thread writes to its slots any more."""
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
                return
            self._waiting.popleft()
            kv.slots = slots
            at_once = max(1, _PART_BYTES // self.staging.block_bytes)
            starts = range(0, kv.num_blocks, at_once)
            parts = [_Part(kv, start, min(start + at_once, kv.num_blocks)) for start in starts]
            kv.parts_left, kv.begun = len(parts), True
            self._source(kv.address).fetch(parts)

    def _source(self, address: str) -> _Source:
        if address not in self._sources:
            self._sources[address] = _Source(address, self._own.keys, self)
        return self._sources[address]


class RemoteKv:
    """`IncomingKv` on another host."""

    def __init__(self, receiver: HostReceiver, table: BlockTable, address: str) -> None:
        self.num_blocks = len(table.slots)
        self.table, self.address, self._receiver = table, address, receiver
        self.slots: list[int] = []
        self.parts_left = 0
        self.begun = self.failed = self.closed = False

    @property
    def arrived(self) -> bool:
        return self.begun and not self.parts_left

    def begin(self) -> None:
        self._receiver.begin(self)

    def read(self, index: int, into: memoryview) -> bool:
        if self.failed or not self.slots:
            return False
        # The copy is what is summed up: what is checked is what will be used.
        source = as_bytes(self._receiver.staging.view(self.slots[index]))
        return copy(source[: len(into)], as_bytes(into)) == self.table.checksums[index]

    def num_shared(self, other: Summed) -> int:
        return num_equal(self.checksums, other.checksums)

    @property
    def checksums(self) -> Sequence[int]:
        return self.table.checksums

    def close(self) -> None:
        self._receiver.end(self)


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks that are asked for at once."""

    kv: RemoteKv
    start: int
    stop: int
    tries: int = 0


class _Rest(Enum):
    """Why there is no part to ask for."""

    NONE = "none now"
    IDLE = "none for a while"
    END = "no more"


class _Source:
    """Another host, its connections from here, and what is to be brought by them."""

    def __init__(self, address: str, keys: HostKeys, receiver: HostReceiver) -> None:
        self._address, self._keys, self._receiver = address, keys, receiver
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        for _ in range(_CONNECTIONS):
            threading.Thread(target=self._main, daemon=True, name="tripool-kv").start()

    def fetch(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            self._parts.put(part)

    def close(self) -> None:
        for _ in range(_CONNECTIONS):
            self._parts.put(None)

    def _main(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        connection: Connection | None = None
        asked: deque[_Part] = deque()
        while True:
            try:
                part = self._next(wait=not asked, held=connection is not None)
                if part in (_Rest.IDLE, _Rest.END):
                    if connection is not None:
                        connection.close()
                        connection = None
                    if part is _Rest.END:
                        return
                elif isinstance(part, _Part):
                    asked.append(part)
                    connection = connection or dial(self._address, self._keys)
                    self._ask(connection, part)
                    if len(asked) < _AHEAD:
                        continue
                if asked:
                    assert connection is not None
                    self._take(connection, asked[0])
                    self._receiver.part_ended(asked.popleft().kv, good=True)
            except (OSError, msgspec.DecodeError, HostError):
                if connection is not None:
                    connection.close()
                    connection = None
                while asked:
                    self._again(asked.popleft())

    def _next(self, *, wait: bool, held: bool) -> _Part | _Rest:
        while True:
            try:
                part = self._parts.get(wait, _IDLE_S if held else None)
            except queue.Empty:
                return _Rest.IDLE if wait else _Rest.NONE
            if part is None:
                return _Rest.END
            if not (part.kv.closed or part.kv.failed):
                return part
            self._receiver.part_ended(part.kv, good=False)

    def _ask(self, connection: Connection, part: _Part) -> None:
        table = part.kv.table
        connection.timeout(_PROGRESS_S)
        connection.send(ReadSlots(table.arena, table.block_bytes, table.slots[part.start : part.stop]))

    def _take(self, connection: Connection, part: _Part) -> None:
        staging, slots = self._receiver.staging, part.kv.slots[part.start : part.stop]
        answer = connection.receive(ANSWERS)
        if not isinstance(answer, Data):
            part.tries = _TRIES  # it is not there: asking again would not help
            raise ConnectionError("the blocks are not there")
        if answer.num_bytes != staging.block_bytes * len(slots):
            raise msgspec.DecodeError("another number of bytes")
        for slot in slots:
            connection.read_into(staging.view(slot))

    def _again(self, part: _Part) -> None:
        part.tries += 1
        if part.tries < _TRIES:
            self._parts.put(part)
        else:
            self._receiver.part_ended(part.kv, good=False)
