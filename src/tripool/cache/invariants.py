"""Consistency check of an index, for tests and the simulation, never on the path of a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tripool.cache.leases import Leases
from tripool.cache.records import Reservation, State
from tripool.cache.slots import SlotTable


def check_invariants(
    slots: SlotTable,
    leases: Leases,
    reservations: Mapping[int, Reservation],
    fenced: Mapping[int, Reservation],
    slot_of: Mapping[bytes, int],
    writing: Mapping[bytes, int],
) -> None:
    """Raise unless every slot has one state, every lease still has its blocks and the key table matches the slots."""
    records, readers = slots.records, leases.readers
    owners = [0] * len(records)
    for held in (*reservations.values(), *fenced.values()):
        for slot in held.slots:
            owners[slot] += 1
    idle, doomed = slots.idle, 0
    for slot, record in enumerate(records):
        state = record.state
        assert owners[slot] == (state is State.RESERVED), f"slot {slot} is {state.name} and has {owners[slot]} writers"
        is_unread = state is State.COMMITTED and slot not in readers
        assert (slot in idle) == is_unread, f"slot {slot}: idle and read disagree"
        if state is State.DOOMED:
            assert slot in readers, f"doomed slot {slot} has no reader"
            doomed += 1
    for lease in leases.all:
        for slot, ticket in zip(lease.slots, lease.tickets, strict=True):
            known = records[slot].state in (State.COMMITTED, State.DOOMED) and records[slot].ticket == ticket
            assert known, f"slot {slot} was reused under a lease"
    by_key = {record.key: slot for slot, record in enumerate(records) if record.state is State.COMMITTED}
    assert by_key == slot_of, "index and slots disagree"
    in_time = {records[slot].key: slot for held in reservations.values() for slot in held.slots}
    assert in_time == writing, "keys being written disagree"
    assert slots.num_free + sum(owners) + len(slot_of) + doomed == len(records), "slots are miscounted"
