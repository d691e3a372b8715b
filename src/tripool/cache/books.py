"""Whether an index's books agree with each other: for tests and the simulation, never on a request's way. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tripool.cache.leases import Lease
from tripool.cache.records import Reservation, State
from tripool.cache.slots import SlotTable


def check_books(
    slots: SlotTable,
    leases: Sequence[Lease],
    reservations: Mapping[int, Reservation],
    fenced: Mapping[int, Reservation],
    slot_of: Mapping[bytes, int],
    writing: Mapping[bytes, int],
) -> None:
    """Every slot is in one hand, no lease has lost its block, and what is found is there. Raises otherwise."""
    records = slots.records
    owners = Counter(slot for table in (reservations, fenced) for held in table.values() for slot in held.slots)
    readers = Counter(slot for lease in leases for slot in lease.slots)
    for slot, record in enumerate(records):
        reserved, committed = record.state is State.RESERVED, record.state is State.COMMITTED
        assert owners[slot] == reserved, f"slot {slot} is {record.state.name} and has {owners[slot]} writers"
        assert slots.is_idle(slot) == (committed and not readers[slot]), f"slot {slot}: idle or read?"
        assert record.state is not State.DOOMED or readers[slot], f"doomed slot {slot} has no reader"
    for lease in leases:
        for slot, ticket in zip(lease.slots, lease.tickets, strict=True):
            known = records[slot].state in (State.COMMITTED, State.DOOMED) and records[slot].ticket == ticket
            assert known, f"slot {slot} was taken from its reader"
    by_key = {record.key: slot for slot, record in enumerate(records) if record.state is State.COMMITTED}
    assert by_key == slot_of, "index and slots disagree"
    in_time = {records[slot].key: slot for held in reservations.values() for slot in held.slots}
    assert in_time == writing, "keys being written disagree"
    doomed = sum(record.state is State.DOOMED for record in records)
    assert slots.num_free + sum(owners.values()) + len(slot_of) + doomed == len(records), "slots are miscounted"
