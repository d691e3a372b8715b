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
from tripool.fabric.shared_memory import Arenas, SharedMemoryTransfer
from tripool.messages import WorkerId
from tripool.simulate.process import Process


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

    def __init__(self, memory: Memory, process: Process, worker_id: WorkerId, **shape: int) -> None:
        super().__init__(Path(), worker_id, **shape)
        self._memory, self._process = memory, process
        self.slots: SimSlots | None = None
        """Of the sender, if there is one."""

    def _create(self) -> Arena:
        self.slots = SimSlots(self._memory, self._path.name, self.block_bytes, self.num_slots)
        return self.slots

    def _attached(self) -> Arenas:
        return self

    def view(self, name: str, slot: int, num_bytes: int) -> Bytes | None:
        self._process.pause("transfer")
        slots = self._memory.slots.get(name)
        if slots is None or slot >= slots.num_slots or num_bytes > slots.slot_bytes:
            return None
        view = slots.view(slot, num_bytes)
        if slots.num_to_spoil:
            slots.num_to_spoil -= 1
            view[::8] ^= 1  # in every position's KV: only some are read
        return view


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
