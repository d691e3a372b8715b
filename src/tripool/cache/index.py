"""Index of one cache member: reservations of writers, leases of readers, and eviction. Pure.

Uses slots and keys, never bytes: bytes are in the arena, and clients copy them.

**Fencing.** A writer that is late or lost may be stopped, not dead, and may write again when it continues. Its slots
are therefore not reused until it commits itself (late is allowed), or until `reaped` reports that its process has
ended. Its keys are free at once: others may write the same blocks to other slots. Readers need no fencing: a reader
compares what it copied with the slot's header and checksum, and a change is a miss.

**Shared reads** (lock-free, without a request) are detected before a block is evicted (`leases`); readers report them
later with `used`.

`now_s` must be monotonic: deadlines expire in the order in which they were given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tripool.cache.eviction import CostAware
from tripool.cache.invariants import check_invariants
from tripool.cache.leases import Leases, SharedReaders
from tripool.cache.records import Block, Counters, Grant, Hit, Record, Reservation, State, Written
from tripool.cache.slots import SlotTable
from tripool.messages import WorkerId

_REMEMBERED_DEATHS = 4096
"""Reaped workers that are remembered, because messages they sent before may still arrive."""


class PoolIndex:
    """Lease and ticket numbers start at `first_number`, which must be above all numbers of an earlier process of this
    member.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        lease_s: float,
        write_s: float,
        namespace_slots: int | None = None,
        first_number: int = 1,
        order: CostAware | None = None,
        shared_readers: SharedReaders | None = None,
    ) -> None:
        assert write_s > 0 and first_number > 0
        self.num_slots = self.capacity = num_slots
        self.counters = Counters()
        self._write_s = write_s
        self._namespace_slots = namespace_slots or num_slots
        self._quotas: dict[bytes, int] = {}
        """Namespaces with a quota of their own."""
        self._next_number = first_number
        self._slots = SlotTable(num_slots, order or CostAware(num_slots))
        self.records: Sequence[Record] = self._slots.records
        """One per slot."""
        self._slot_of: dict[bytes, int] = {}
        self._writing: dict[bytes, int] = {}
        """Keys with a valid reservation, and the slot of each."""
        self._leases = Leases(lease_s, shared_readers)
        self._reservations: dict[int, Reservation] = {}
        self._fenced: dict[int, Reservation] = {}
        self._dead: OrderedDict[WorkerId, None] = OrderedDict()

    # ---- reading ------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], reader: WorkerId, namespace: bytes, now_s: float) -> Hit:
        """The longest prefix of `keys` that is in memory, under one lease."""
        self._leases.now_s = now_s
        found: list[tuple[int, Record]] = []
        for key in keys if reader not in self._dead else ():
            slot = self._slot_of.get(key)
            if slot is None or (record := self._slots.records[slot]).namespace != namespace:
                break
            found.append((slot, record))
        self.counters.hits += len(found)
        self.counters.misses += len(keys) - len(found)
        if not found:
            return Hit(0, ())
        lease, slots = self._number(), [slot for slot, _ in found]
        for slot in set(slots) - self._leases.readers.keys():
            self._slots.idle.leave(slot)
        self._leases.take(lease, slots, self._slots.records, reader)
        return Hit(lease, tuple(Block(slot, r.checksum, r.num_bytes, r.form) for slot, r in found))

    def used(self, uses: Sequence[tuple[int, int]], reader: WorkerId, bad: Collection[int] = ()) -> None:
        """Count the blocks (slot, ticket) of a shared read; `bad` as in `release`. Those evicted since are skipped."""
        records, touched = self._slots.records, []
        for slot, ticket in reversed(uses):
            if not 0 <= slot < self.num_slots or reader in self._dead:
                continue
            if records[slot].state is not State.COMMITTED or records[slot].ticket != ticket:
                continue
            if slot in bad:
                self.counters.bad += 1
                self._forget(slot)
                continue
            self.counters.hits += 1
            if slot in self._slots.idle:
                self._slots.idle.leave(slot)
                touched.append(slot)
        self._slots.enter_idle(touched)

    def uncount(self, hit: Hit, num_keys: int) -> None:
        """Take back the counts of a look-up that will be repeated."""
        self.counters.hits -= len(hit.blocks)
        self.counters.misses -= num_keys - len(hit.blocks)

    def release(self, lease: int, reader: WorkerId, bad: Iterable[int] = ()) -> None:
        """End a lease; `bad` are slots whose bytes did not match their checksum.

        Unknown and expired leases are ignored, `bad` included: their slots may hold other blocks by now.
        """
        held = self._leases.get(lease)
        if held is None or held.reader != reader:
            return
        for slot in set(bad) & set(held.slots):
            if self._slots.records[slot].state is State.COMMITTED:
                self.counters.bad += 1
                self._forget(slot)
        self._end_lease(lease)

    # ---- writing ------------------------------------------------------------------------------------------------

    def reserve(
        self, keys: Sequence[bytes], writer: WorkerId, namespace: bytes, now_s: float, depths: Sequence[int] = ()
    ) -> Grant:
        """Reserve slots for the keys that are neither stored nor being written; fewer if there is not enough room.

        `depths`: position of each key in its chain; by default the keys are the chain from its first block.

        Blocks of `keys` are not evicted to make room for later ones: a prefix is useless without its head.
        """
        self._leases.now_s = now_s
        if writer in self._dead:
            return Grant(0, (), ())
        here = [slot for key in keys if (slot := self._slot_of.get(key)) is not None and slot in self._slots.idle]
        for slot in here:
            self._slots.idle.leave(slot)
        self._slots.enter_idle(here[::-1])
        ticket, spared = self._number(), set(here)
        positions, slots = [], []
        for position, key in enumerate(keys):
            if key in self._slot_of or key in self._writing:
                continue
            if not self._make_room(namespace, spared):
                break
            slot = self._slots.first_free()
            depth = depths[position] if position < len(depths) else position
            self._slots.fill(slot, Record(State.RESERVED, key, namespace, ticket, depth, writer))
            self._writing[key] = slot
            positions.append(position)
            slots.append(slot)
        if not slots:
            return Grant(0, (), ())
        self._reservations[ticket] = Reservation(writer, now_s + self._write_s, tuple(slots))
        return Grant(ticket, tuple(positions), tuple(slots))

    def commit(self, ticket: int, writer: WorkerId, written: Sequence[Written]) -> int:
        """End a reservation: written slots become findable, the others free. Returns the number of new blocks.

        A late commit of a living writer is accepted: it shows that the writer no longer writes to those slots.
        """
        held = self._reservations.get(ticket) or self._fenced.get(ticket)
        if held is None or held.writer != writer:
            return 0
        self._reservations.pop(ticket, None)
        self._fenced.pop(ticket, None)
        by_slot = {each.slot: each for each in written}
        # Tail first, so that the head counts as used last: a prefix is useless without its head.
        committed = [slot for slot in reversed(held.slots) if self._settle(slot, by_slot.get(slot))]
        self._slots.enter_idle(committed)
        self.counters.committed += len(committed)
        return len(committed)

    def at_rest(self, writer: WorkerId) -> None:
        """Free all reservations of a writer that reports it is writing nothing."""
        for table in (self._reservations, self._fenced):
            for ticket in [number for number, held in table.items() if held.writer == writer]:
                for slot in table.pop(ticket).slots:
                    self._settle(slot, None)

    # ---- deadlines and lost workers ------------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        """End expired and unused leases, and fence late writers."""
        self._leases.now_s = now_s
        for lease in self._leases.released():
            self._end_lease(lease)
        for lease in self._leases.overdue():
            self.counters.expired_leases += 1
            self._end_lease(lease)
        while self._reservations and now_s >= next(iter(self._reservations.values())).deadline_s:
            self._fence(next(iter(self._reservations)))

    @property
    def next_deadline_s(self) -> float | None:
        """Time of the next deadline for `expire`."""
        reservation = next(iter(self._reservations.values()), None)
        times = (self._leases.next_deadline_s, reservation.deadline_s if reservation is not None else None)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def lost(self, worker_id: WorkerId) -> None:
        """Handle a silent worker, perhaps only stopped: end its leases and fence its reservations."""
        for lease in self._leases.of(worker_id):
            self._end_lease(lease)
        for ticket in [number for number, held in self._reservations.items() if held.writer == worker_id]:
            self._fence(ticket)

    def reaped(self, worker_id: WorkerId) -> None:
        """Handle a worker whose process has ended: free all it held and ignore its earlier messages."""
        self.lost(worker_id)
        self._dead[worker_id] = None
        if len(self._dead) > _REMEMBERED_DEATHS:
            self._dead.popitem(last=False)
        self.at_rest(worker_id)

    # ---- tenants and restarts -----------------------------------------------------------------------------------

    def purge(self, namespace: bytes) -> int:
        """Evict a namespace. Blocks under a lease are unfindable at once and freed when the lease ends."""
        slots = [slot for slot in self._slot_of.values() if self._slots.records[slot].namespace == namespace]
        for slot in slots:
            self._forget(slot)
        return len(slots)

    def set_quotas(self, quotas: Mapping[bytes, int]) -> int:
        """Replace all quotas (slots by namespace) and evict what exceeds them, except blocks being read or written.

        The remaining excess is evicted before that namespace gets another slot. Returns the number of evicted blocks.
        """
        self._quotas = dict(quotas)
        num_before = self.num_committed
        for namespace in self._slots.held:
            while self._slots.held_by(namespace) > self._quota(namespace) and self._evict(namespace):
                pass
        return num_before - self.num_committed

    def restore(self, records: Sequence[Record]) -> None:
        """Take over the records of an earlier process of this member, one per slot. Only for a new index.

        Reserved slots come back fenced: their writers may still be writing.
        """
        assert len(records) == self.num_slots == self._slots.num_free
        reserved: dict[tuple[int, WorkerId], list[int]] = {}
        writers: dict[int, WorkerId] = {}
        chain: list[int] = []
        # In order of commit, tails first, because tails are evicted first.
        for slot in sorted(range(self.num_slots), key=lambda slot: (records[slot].ticket, -records[slot].position)):
            record = records[slot]
            assert record.ticket < self._next_number, "numbers must begin above all earlier ones"
            if record.state is State.RESERVED and record.writer is not None:
                if writers.setdefault(record.ticket, record.writer) != record.writer:
                    continue  # damaged: a ticket belongs to one writer
                self._slots.fill(slot, record)
                reserved.setdefault((record.ticket, record.writer), []).insert(0, slot)
            elif record.state is State.COMMITTED and record.key not in self._slot_of:
                self._slots.fill(slot, record)
                self._slot_of[record.key] = slot
                if chain and self._slots.records[chain[-1]].ticket != record.ticket:
                    self._slots.enter_idle(chain)
                    chain = []
                chain.append(slot)
        self._slots.enter_idle(chain)
        for (ticket, writer), slots in reserved.items():
            self._fenced[ticket] = Reservation(writer, 0.0, tuple(slots))

    def take_changes(self) -> list[tuple[int, Record]]:
        """Slots changed since the last call. The arena's headers must be updated with them before any reply is sent."""
        return self._slots.take_changes()

    # ---- inspection ---------------------------------------------------------------------------------------------

    def writer_of(self, ticket: int) -> WorkerId | None:
        held = self._reservations.get(ticket) or self._fenced.get(ticket)
        return held.writer if held is not None else None

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_reserved(self) -> int:
        """Fenced ones included."""
        return self.num_fenced + sum(len(held.slots) for held in self._reservations.values())

    @property
    def num_fenced(self) -> int:
        return sum(len(held.slots) for held in self._fenced.values())

    @property
    def num_committed(self) -> int:
        return len(self._slot_of)

    def is_leased(self, slot: int) -> bool:
        return slot in self._leases.readers

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def held(self) -> dict[bytes, int]:
        """Slots in use by namespace."""
        return self._slots.held

    def check(self) -> None:
        """Raise if a slot has no or two owners, a lease has lost its block, or the index disagrees with the slots."""
        self._slots.check()
        self._leases.check()
        check_invariants(self._slots, self._leases, self._reservations, self._fenced, self._slot_of, self._writing)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _make_room(self, namespace: bytes, spared: set[int]) -> bool:
        """Make a free slot, evicting if necessary. A namespace at its quota evicts its own blocks."""
        while self._slots.held_by(namespace) >= self._quota(namespace):
            if not self._evict(namespace, spared):
                return False
        return self._slots.num_free > 0 or self._evict(None, spared)

    def _quota(self, namespace: bytes) -> int:
        return self._quotas.get(namespace, self._namespace_slots)

    def _evict(self, namespace: bytes | None, spared: Collection[int] = ()) -> bool:
        """Evict one block: of one namespace, or of all."""
        while (oldest := self._slots.idle.first(namespace)) is not None and oldest not in spared:
            if self._leases.close_if_unread(oldest):
                self.counters.evicted += 1
                self._evict_slot(oldest)
                return True
            self._lease_shared_read(oldest)
        return False

    def _settle(self, slot: int, written: Written | None) -> bool:
        """End a slot's reservation; returns whether it now holds a block, which the caller must enter as idle.

        If the same block was committed by another writer meanwhile, this one is dropped.
        """
        record = self._slots.records[slot]
        if self._writing.get(record.key) == slot:
            del self._writing[record.key]
        if written is None or record.key in self._slot_of:
            self._slots.drop(slot)
            return False
        origin = (record.key, record.namespace, record.ticket, record.position)
        contents = (written.checksum, written.num_bytes, written.form)
        self._slots.change(slot, Record(State.COMMITTED, *origin, None, *contents))
        self._slot_of[record.key] = slot
        return True

    def _fence(self, ticket: int) -> None:
        held = self._fenced[ticket] = self._reservations.pop(ticket)
        self.counters.fenced_reservations += 1
        for slot in held.slots:
            del self._writing[self._slots.records[slot].key]

    def _forget(self, slot: int) -> None:
        """Make a committed block unfindable, and free its slot unless it is being read."""
        if not self._leases.close_if_unread(slot):
            self._lease_shared_read(slot)
        elif slot not in self._leases.readers:
            self._evict_slot(slot)
            return
        record = self._slots.records[slot]
        del self._slot_of[record.key]
        self._slots.change(slot, replace(record, state=State.DOOMED))

    def _evict_slot(self, slot: int) -> None:
        del self._slot_of[self._slots.records[slot].key]
        self._slots.idle.leave(slot)
        self._slots.drop(slot)

    def _lease_shared_read(self, slot: int) -> None:
        if slot in self._slots.idle:
            self._slots.idle.leave(slot)
        self._leases.take_shared(self._number(), slot, self._slots.records)

    def _end_lease(self, lease: int) -> None:
        unread: list[int] = []
        for slot in self._leases.end(lease):
            if self._slots.records[slot].state is State.DOOMED:
                self._slots.drop(slot)
            else:
                unread.append(slot)
        self._slots.enter_idle(unread)
