"""The blocks of this host for other hosts: KV in senders' arenas, cached blocks in members' arenas.

What another host writes, it writes through this process, which is reaped by the supervisor of this host: once its
connection has ended here, nothing of it can still arrive. So a lost host needs no fence in this host's memory.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from tripool.cache import wire as cache_wire
from tripool.cache.host import LocalHost
from tripool.cache.link import Link
from tripool.cache.records import Written
from tripool.cache.shared_reads import SharedBlocks
from tripool.fabric.shared_memory import MappedArenas
from tripool.hosts.connection import Connection
from tripool.hosts.links import Bulk
from tripool.hosts.traffic import Traffic
from tripool.hosts.wire import (
    AskMember,
    Data,
    FindBlocks,
    FoundBlocks,
    No,
    ReadSlots,
    Reply,
    StoreBlocks,
    Taken,
)
from tripool.local_channel import LocalChannel
from tripool.messages import WorkerId

_WAIT_S = 0.25
_RETRY_S = 0.5
_ASK_S = 1.0
_PROGRESS_S = 4.0
"""Longest time without a byte, while blocks are sent."""
_WRITING = 0.8
"""Share of a member's deadline for writes in which the bytes must have come."""
_QUESTIONS = (cache_wire.GetStats, cache_wire.Purge, cache_wire.Quotas)


class LocalBlocks:
    """For all connections of this process. Reads and writes are clients of a member's under names of their own: one
    that reads reserves nothing."""

    def __init__(self, folder: Path, worker_id: WorkerId) -> None:
        self._folder, self._host = folder, LocalHost(folder)
        self._writer, self._reader = worker_id, WorkerId(f"{worker_id.name}-reads", worker_id.epoch)
        self._members: dict[str, _Member] = {}
        self._lock = threading.Lock()

    def read_slots(self, connection: Connection, request: ReadSlots, arenas: MappedArenas, bulk: Bulk) -> None:
        """Straight from the sender's arena. What changes there meanwhile does not have its checksum any more."""
        views = []
        for slot in request.slots if request.arena.endswith(".kv") else ():
            view = arenas.view(request.arena, slot, request.block_bytes)
            if view is None:
                break
            views.append(view.data)
        if len(views) < len(request.slots) or not views:
            connection.send(No("kv", "there is no such KV", "its sender is gone, or this was never one"))
            return
        connection.timeout(_PROGRESS_S)
        bulk.send(Traffic.TRANSFER, Data(sum(view.nbytes for view in views)), views, _PROGRESS_S)

    def find(self, connection: Connection, request: FindBlocks, bulk: Bulk) -> None:
        member = self._member(request.member)
        with member.reading:
            found, lease = member.find(request)
        try:
            blocks = tuple(found) if found is not None else ()
            connection.timeout(_PROGRESS_S)
            views = [] if found is None else [found.arena.view(each.slot, each.num_bytes).data for each in blocks]
            bulk.send_now(Traffic.MEMORY, FoundBlocks(blocks), views)
        finally:
            if found is not None:
                with member.reading:
                    member.end_read(found, lease)

    def store(self, connection: Connection, request: StoreBlocks) -> None:
        count = len(request.keys)
        if not count or {len(request.depths), len(request.sizes), len(request.checksums)} != {count}:
            raise msgspec.DecodeError("not as many sizes as keys")
        self._member(request.member).store(connection, request)

    def ask(self, connection: Connection, request: AskMember) -> None:
        """Questions about the member itself. What only its supervisor may say is not passed on."""
        data = b""
        if isinstance(cache_wire.decode_request(request.question), _QUESTIONS):
            channel = LocalChannel.connect(cache_wire.address(self._folder, self._name(request.member)))
            if channel is not None:
                try:
                    channel.send(request.question)
                    data = bytes(channel.receive(_ASK_S) or b"")
                except OSError:
                    data = b""
                finally:
                    channel.close()
        connection.send(Reply(data))

    def close(self) -> None:
        with self._lock:
            for member in self._members.values():
                member.close()
            self._members.clear()

    def _member(self, name: str) -> _Member:
        with self._lock:
            if name not in self._members:
                who = (self._reader, self._writer)
                links = [Link(self._host, self._name(name), each, _WAIT_S, _RETRY_S) for each in who]
                if not cache_wire.address(self._folder, name).exists():
                    raise msgspec.DecodeError("no such member")
                self._members[name] = _Member(*links)
            return self._members[name]

    def _name(self, name: str) -> str:
        if "/" in name or name.startswith("."):
            raise msgspec.DecodeError("no name of a member")
        return name


class _Member:
    def __init__(self, reader: Link, writer: Link) -> None:
        self._reader, self._writer = reader, writer
        self.reading, self.writing = threading.Lock(), threading.Lock()
        self._num_stores = 0
        """Whose bytes are coming in."""

    def close(self) -> None:
        with self.reading:
            self._reader.close()
        with self.writing:
            self._writer.close()

    def find(self, request: FindBlocks) -> tuple[SharedBlocks | None, object]:
        """The blocks, and the lease that keeps them."""
        link = self._reader
        if not link.ready():
            return None, None
        here = link.find_here(request.namespace, request.keys)
        if here is not None:
            return here[1], here[0]
        answer = link.answer(link.look_up(request.namespace, request.keys), cache_wire.LookupResult)
        arena = link.arena
        if answer is None or not answer.lease or arena is None:
            return None, None
        return SharedBlocks.from_lookup(arena, request.keys, answer.blocks), answer.lease

    def end_read(self, found: SharedBlocks, lease: object) -> None:
        if isinstance(lease, int):
            self._reader.release(lease)
            self._reader.flush()
        else:  # nothing is held: what was used is reported now and then, as workers do
            self._reader.end_read(lease, found)  # type: ignore[arg-type]

    def store(self, connection: Connection, request: StoreBlocks) -> None:
        """Several at once: only what is said to the member is said one after the other."""
        link, began_s = self._writer, time.monotonic()
        with self.writing:
            grant = self._reserve(request)
            self._num_stores += 1
        written: list[Written] = []
        places: list[tuple[int, int]] = []
        try:
            arena = link.arena
            if grant is not None and grant.ticket and arena is not None:
                granted = zip(grant.positions, grant.slots, strict=True)
                places = [place for place in granted if request.sizes[place[0]] <= arena.slot_bytes]
            connection.send(Taken(tuple(position for position, _ in places)))
            until_s = began_s + _WRITING * link.write_s
            for position, slot in places:
                assert arena is not None
                connection.timeout(max(0.001, until_s - time.monotonic()))
                view = arena.view(slot, request.sizes[position]).data
                if connection.read_summed(view) == request.checksums[position]:
                    written.append(Written(slot, request.checksums[position], len(view), request.form))
            connection.timeout(_PROGRESS_S)
        finally:
            with self.writing:
                self._num_stores -= 1
                if grant is not None:
                    link.commit(grant.ticket, written)
        if places:
            connection.send(Data(len(written)))

    def _reserve(self, request: StoreBlocks) -> cache_wire.Granted | None:
        """Not by a link that has to be opened while others still write: opening says that nothing is being written."""
        link = self._writer
        if (self._num_stores and not link.is_there) or not link.ready():
            return None
        return link.answer(link.reserve(request.namespace, request.keys, request.depths), cache_wire.Granted)
