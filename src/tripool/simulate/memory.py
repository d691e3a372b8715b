"""Memory that processes share in virtual time: KV transfer slots, and the arenas of cache members.

Copies let time pass in their middle, so that other processes write, evict or die while a block is half copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any

from tripool.cache.arena import Arena, arena_bytes, as_bytes
from tripool.cache.copying import Bytes, copy
from tripool.cache.records import State
from tripool.fabric.shared_memory import BlockTable, MappedKv, MappedReceiver, SharedMemoryTransfer
from tripool.messages import KvDescriptor, WorkerId
from tripool.simulate.hosts import Hosts
from tripool.simulate.process import Process

_BLOCK_S = 0.0004
"""For one block, or the request for it, between two hosts."""
_PROGRESS_S = 1.0
"""Longest time without a block."""


class Memory:
    """Everything that processes share, by name. It outlives them."""

    def __init__(self) -> None:
        self.slots: dict[str, SimSlots] = {}
        self.arenas: dict[str, tuple[mmap, int, int, int]] = {}
        """Memory, bytes of a slot, number of slots and nonce."""
        self.disturbed_s: dict[str, float] = {}
        """When a member last died, started or had to forget blocks that may be read."""
        self.is_leased: dict[str, Callable[[int], bool]] = {}
        """By arena: whether its member keeps a slot for a reader that asked."""
        self.seen: Counter[str] = Counter()


class SimSlots(Arena):
    """Arena of one KV sender."""

    def __init__(self, memory: Memory, name: str, slot_bytes: int, num_slots: int) -> None:
        super().__init__(Path(name), mmap(-1, arena_bytes(slot_bytes, num_slots)), slot_bytes, num_slots, 0)
        self.num_to_spoil = 0
        """Blocks that will have changed by the time they are read."""
        self._memory = memory
        memory.slots[name] = self

    def back(self, slot: int) -> bool:
        return True

    def remove(self) -> None:
        self._memory.slots.pop(self.path.name, None)


class SimTransfer(SharedMemoryTransfer):
    """`Transfer` of one simulated process."""

    def __init__(self, memory: Memory, process: Process, worker_id: WorkerId, hosts: Hosts, **shape: int) -> None:
        super().__init__(Path(), worker_id, **shape)
        self.memory, self.process, self.hosts, self.host = memory, process, hosts, hosts.of(worker_id.name)
        self.slots: SimSlots | None = None
        """Of the sender, if there is one."""

    def _create(self) -> Arena:
        self.slots = SimSlots(self.memory, self.path.name, self.block_bytes, self.num_slots)
        return self.slots

    def receiver(self) -> SimReceiver:
        return SimReceiver(self)

    def view(self, name: str, slot: int, num_bytes: int) -> Bytes | None:
        self.process.pause("transfer")
        return self.block(name, slot, num_bytes)

    def block(self, name: str, slot: int, num_bytes: int) -> Bytes | None:
        """As it is in the sender's memory now."""
        slots = self.memory.slots.get(name)
        if slots is None or slot >= slots.num_slots or num_bytes > slots.slot_bytes:
            return None
        view = slots.view(slot, num_bytes)
        if slots.num_to_spoil:
            slots.num_to_spoil -= 1
            view[::8] ^= 1  # in every position's KV: only some are read
        return view


class SimReceiver(MappedReceiver):
    """In place on the sender's host; over the network from others."""

    def __init__(self, transfer: SimTransfer) -> None:
        super().__init__(transfer, transfer.block_tokens, transfer.block_bytes)
        self._transfer = transfer

    def open(self, descriptor: KvDescriptor, num_tokens: int) -> MappedKv | None:
        kv, table = super().open(descriptor, num_tokens), BlockTable.of(descriptor)
        if kv is None or table is None:
            return None
        source = self._transfer.hosts.of(table.arena.rsplit(".", 2)[0])
        return kv if source == self._transfer.host else FetchedKv(table, self._transfer, source)


class FetchedKv(MappedKv):
    """KV of a sender on another host: asked for block by block, read where it was brought to. Nothing for a while, and
    it has failed."""

    def __init__(self, table: BlockTable, transfer: SimTransfer, source: int) -> None:
        super().__init__(table, self)
        self.arrived = False
        self._transfer, self._source = transfer, source
        self._blocks: dict[int, Bytes] = {}
        """By slot."""
        self._progress_s = 0.0

    def begin(self) -> None:
        self._ask()
        self._wait()

    def view(self, name: str, slot: int, num_bytes: int) -> Bytes | None:
        self._transfer.process.pause("transfer")
        return self._blocks.get(slot)

    def close(self) -> None:
        self.arrived = True

    def _wait(self) -> None:
        self._progress_s = self._transfer.process.now_s
        self._transfer.process.call_at(self._progress_s + _PROGRESS_S, self._expire, self._progress_s)

    def _expire(self, progress_s: float) -> None:
        if not self.arrived and progress_s == self._progress_s:
            self.arrived = True
            self._transfer.memory.seen["transfers that a cut ended"] += 1

    def _ask(self) -> None:
        self._travel(self._transfer.host, self._source, self._send, len(self._blocks))

    def _send(self, index: int) -> None:
        """On the sender's host."""
        block = self._transfer.block(self._table.arena, self._table.slots[index], self._table.block_bytes)
        copied = None if block is None else block.copy()
        self._travel(self._source, self._transfer.host, self._take, index, copied)

    def _take(self, index: int, block: Bytes | None) -> None:
        if self.arrived:
            return
        if block is not None:
            self._blocks[self._table.slots[index]] = block
            self._transfer.memory.seen["blocks from another host"] += 1
            self._wait()
        self.arrived = block is None or index + 1 == self.num_blocks
        if not self.arrived:
            self._ask()

    def _travel(self, start: int, end: int, action: Callable[..., None], *args: Any) -> None:
        hosts, process = self._transfer.hosts, self._transfer.process
        there_s = process.now_s + _BLOCK_S + hosts.delay_s(start, end)
        process.call_at(there_s, hosts.carry, start, end, action, *args)


class SimArena(Arena):
    """A process's map of a member's arena; the member's own has no process.

    Rules: only the writer that a slot is reserved for writes it; only blocks that are leased or acquired are read, and
    none of these is evicted.
    """

    def __init__(self, memory: Memory, name: str, worker_id: WorkerId, lease_s: float, of: Process | None) -> None:
        mapped, slot_bytes, num_slots, nonce = memory.arenas[name]
        super().__init__(Path(name), mapped, slot_bytes, num_slots, nonce, -1)
        self._memory, self._worker_id, self._lease_s, self._process = memory, worker_id, lease_s, of

    def write(self, slot: int, block: Any) -> int:
        """In two pieces; a process that was stopped between them goes on there, and must still own the slot."""
        source = as_bytes(block)
        half = len(source) // 2
        self._check_own(slot)
        self.view(slot, half)[:] = source[:half]
        self._pause("write")
        self._check_own(slot)
        self._memory.seen["blocks written to the cache"] += self._process is not None
        return copy(source, self.view(slot, len(source)))

    def read(self, slot: int, into: Any) -> int:
        target, name = as_bytes(into), self.path.name
        if not self.is_read(slot) and not self._memory.is_leased[name](slot) and self._has_lease():
            self._fail(f"{self._worker_id} reads slot {slot}, which is kept for no reader")
        copied = self.view(slot, len(target)).copy()
        self._pause("read")
        half = len(target) // 2
        copied[half:] = self.view(slot, len(target))[half:]
        return copy(copied, target)

    def holds(self, slot: int, key: bytes) -> bool:
        held = super().holds(slot, key)
        if not held and self._process is not None:
            self._memory.seen["leases that ended during a read"] += 1
            if self._has_lease():
                self._fail(f"{self._worker_id} reads a block of slot {slot} that was evicted under its lease")
        return held

    def _has_lease(self) -> bool:
        """Whether what the process reads cannot have been lost: it was found in the present turn, and its time is not
        over."""
        process = self._process
        if process is None or process.now_s >= process.turn_s + self._lease_s:
            return False
        return self._memory.disturbed_s.get(self.path.name, 0.0) < process.turn_s

    def _fail(self, broken: str) -> None:
        if self._process is None:
            raise AssertionError(broken)
        self._process.fail(broken)

    def _pause(self, doing: str) -> None:
        if self._process is not None:
            self._process.pause(doing)

    def _check_own(self, slot: int) -> None:
        record = self.record(slot)
        if record.state is not State.RESERVED or record.writer != self._worker_id:
            self._fail(f"{self._worker_id} writes where others may read: slot {slot} is {record.state.name}")

    def remove(self) -> None:
        pass
