"""Bugs planted one by one in the workers, the KV transfer, the session and the cache client that serve.

Each is found by the fault simulation within `NUM_SEEDS` seeds, by a rule that fits it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tripool.cache.arena import Arena
from tripool.cache.client import PoolClient, Prefix
from tripool.cache.link import Link as MemberLink
from tripool.cache.records import Written
from tripool.cache.shared_reads import SharedBlocks
from tripool.core import TokenEvent
from tripool.decode.worker import DecodeWorker
from tripool.engine.fake_paged import PagedFake
from tripool.fabric import KvSender, Loop
from tripool.fabric.kv_transfer import Lease
from tripool.fabric.shared_memory import MappedKv
from tripool.messages import KvDescriptor
from tripool.prefill.worker import PrefillWorker
from tripool.simulate import simulate

NUM_SEEDS = 500

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, tuple[Plant, str]] = {}


def bug(found_by: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        PLANTS[plant.__name__] = plant, found_by
        return plant

    return register


# ---- KV transfer ----------------------------------------------------------------------------------------------------


@bug("was lost under its lease")
def lease_is_freed_when_it_is_announced(patch: pytest.MonkeyPatch) -> None:
    descriptor = KvSender.descriptor

    def hasty(self: KvSender, lease: Lease) -> KvDescriptor:
        told = descriptor(self, lease)
        self.release(lease.number)
        return told

    patch.setattr(KvSender, "descriptor", hasty)


@bug("was lost under its lease|a lease without its owner|a slot")
def release_also_ends_the_next_lease(patch: pytest.MonkeyPatch) -> None:
    """A finished or cancelled request takes the KV of another one with it."""
    release = KvSender.release

    def greedy(self: KvSender, number: int) -> None:
        release(self, number)
        release(self, number + 1)

    patch.setattr(KvSender, "release", greedy)


@bug("instead of")
def checksum_of_a_transfer_is_skipped(patch: pytest.MonkeyPatch) -> None:
    read = MappedKv.read
    patch.setattr(MappedKv, "read", lambda self, index, into: read(self, index, into) or into)


@bug("a slot|a lease without its owner|was lost under its lease")
def lease_number_is_used_again(patch: pytest.MonkeyPatch) -> None:
    lease = KvSender.lease

    def forgetful(self: KvSender, *args: Any, **more: Any) -> Lease | None:
        found = lease(self, *args, **more)
        if found is not None and self._next_lease > 3:
            self._next_lease = 1
        return found

    patch.setattr(KvSender, "lease", forgetful)


@bug("instead of")
def slots_are_shared_by_length_instead_of_key(patch: pytest.MonkeyPatch) -> None:
    """Blocks of two sequences that are at the same position are taken for the same block."""
    lease = KvSender.lease

    def loose(self: KvSender, request_id: str, attempt: int, choice: int, keys: Any, **more: Any) -> Lease | None:
        loosely = [None if key is None else bytes([position]) for position, key in enumerate(keys)]
        return lease(self, request_id, attempt, choice, loosely, **more)

    patch.setattr(KvSender, "lease", loose)


# ---- workers --------------------------------------------------------------------------------------------------------


@bug("sends it twice")
def tokens_are_sent_twice(patch: pytest.MonkeyPatch) -> None:
    tell = DecodeWorker._tell

    def stutter(self: DecodeWorker, events: list[TokenEvent]) -> None:
        tell(self, [event for event in events if event.finish_reason is None and event.index == 5])
        tell(self, events)

    patch.setattr(DecodeWorker, "_tell", stutter)


@bug("instead of|a block is not what it should be|failed although there was capacity")
def sequence_starts_before_its_last_block_is_there(patch: pytest.MonkeyPatch) -> None:
    fill = DecodeWorker._fill

    def careless(self: DecodeWorker, job: Any, seq: Any) -> bool:
        if job.num_filled == job.kv.num_blocks - 1:
            job.num_filled += 1
            return True
        return fill(self, job, seq)

    patch.setattr(DecodeWorker, "_fill", careless)


@bug("disagree on what is there|hangs")
def blocks_of_a_sequence_that_left_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedFake, "release", lambda self, seq: None)


@bug("leaves with KV that is leased")
def drained_worker_leaves_with_transfers_under_lease(patch: pytest.MonkeyPatch) -> None:
    consider = Loop._consider_leaving

    def hasty(self: Loop) -> None:
        consider(self)
        if self._draining and not self._worker.busy:
            self._stopped = True

    patch.setattr(Loop, "_consider_leaving", hasty)


# ---- session --------------------------------------------------------------------------------------------------------


@bug("after the gateway's death|hangs|for a (prefill|decode) worker")
def lost_gateway_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tripool.fabric.link.SILENCE_S", 1e9)


@bug("hangs|for a (prefill|decode) worker")
def lost_gateway_leaves_everything_in_place(patch: pytest.MonkeyPatch) -> None:
    """What belongs to an earlier session is not dropped, and taken into the next one."""
    patch.setattr(PrefillWorker, "drop", lambda self: None)
    patch.setattr(DecodeWorker, "drop", lambda self: None)


# ---- cache client and shared reads ----------------------------------------------------------------------------------


@bug("kept for no reader|evicted under its lease")
def shared_read_without_acquire(patch: pytest.MonkeyPatch) -> None:
    acquire = SharedBlocks.acquire.__func__

    def unseen(cls: Any, arena: Arena, keys: Any, namespace: bytes, reader_slot: int) -> SharedBlocks | None:
        found = acquire(cls, arena, keys, namespace, reader_slot)
        if found is not None:
            found.release(reader_slot)
        return found

    patch.setattr(SharedBlocks, "acquire", classmethod(unseen))


@bug("hangs")
def shared_read_is_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemberLink, "end_read", lambda self, acquired, found: None)


@bug("kept for no reader|evicted under its lease")
def lease_of_a_prefix_is_released_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    read = Prefix.read

    def hasty(self: Prefix, into: Any) -> int:
        for held in self._held:
            held.release()
        for held in self._held:
            held.link.flush()
        self._held = []
        return read(self, into)

    patch.setattr(Prefix, "read", hasty)


@bug("not what was written|instead of|writes where others may read")
def commit_comes_before_the_blocks(patch: pytest.MonkeyPatch) -> None:
    write = PoolClient._write

    def early(self: PoolClient, link: Any, grant: Any, blocks: Any, *more: Any) -> Any:
        granted = zip(grant.positions, grant.slots, strict=True)
        link.commit(grant.ticket, [Written(slot, 1, len(blocks[position])) for position, slot in granted])
        return write(self, link, grant, blocks, *more)

    patch.setattr(PoolClient, "_write", early)


LATE = {
    "checksum_of_a_transfer_is_skipped", "lost_gateway_leaves_everything_in_place",
    "drained_worker_leaves_with_transfers_under_lease",
}  # fmt: skip
"""Found after dozens of seeds: seconds each, which only `make prove` has."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.prove] * (n in LATE)) for n in PLANTS])
def test_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found_by = PLANTS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=found_by):
        run_seeds()


def run_seeds() -> None:
    for seed in range(NUM_SEEDS):
        simulate(seed)
