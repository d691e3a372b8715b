"""Cache member: the process that owns one arena and the index of its blocks. Answers small messages, copies no blocks.

Headers are written before a reply is sent, so a restarted member knows everything that was granted.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from tripool.cache import wire
from tripool.cache.arena import NUM_READER_SLOTS
from tripool.cache.disk_io import DiskIo, DiskTasks, OpenDisk
from tripool.cache.host import CacheHost, LocalHost
from tripool.cache.index import PoolIndex
from tripool.cache.mooncake_store import MooncakeIo
from tripool.cache.records import Hit, State
from tripool.cache.tiered_index import TieredIndex
from tripool.config import CacheConfig
from tripool.local_channel import MAX_MESSAGE_BYTES, LocalChannel
from tripool.messages import Reaped, Suspect, WorkerId

LOOK_AROUND_S = 0.5
"""How often an idle member checks that its parent is alive."""
_LINGER_S = 500e-6
"""How long to poll for the next message before sleeping: being woken takes longer than a look-up."""
_MAX_PEERS = 512
_MAX_WAIT_S = 10.0  # for blocks from disk, whatever a client requests
_REMEMBERED_WRITERS = 4096
_REPORTED_NAMESPACES = 1000
"""Largest namespaces reported: a reply must fit into one message."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a client."""

Send = Callable[[bytes], None]


class Member:
    """Knows nothing of sockets: `answer` takes and gives bytes. `disk_io` makes the disk tier if the config has one."""

    def __init__(self, host: CacheHost, worker_id: WorkerId, config: CacheConfig, disk_io: OpenDisk = DiskIo) -> None:
        self._worker_id, self._write_s = worker_id, config.write_s
        shape = f"{worker_id.name}.arena", config.slot_bytes, config.num_slots
        left = host.reopen_arena(*shape)
        self.arena = left or host.create_arena(*shape)
        self.arena.clear(slice(None))
        self._reader_slots: dict[WorkerId, int] = {}
        records = left.records() if left is not None else []
        self.index = PoolIndex(
            config.num_slots,
            lease_s=config.lease_s,
            write_s=config.write_s,
            namespace_slots=config.namespace_slots,
            # Above every number of every earlier run, so that what was meant for those does nothing here.
            first_number=max([1, int(host.now_s() * 1e9), *(record.ticket + 1 for record in records)]),
            shared_readers=self.arena,
        )
        if left is not None:
            self.index.restore(records)
            for record in records:
                # Reserved for disk reads of an earlier process of this member, which has ended.
                if record.state is State.RESERVED and record.writer and record.writer.name == worker_id.name:
                    self.index.at_rest(record.writer)
        self.tiered_index = TieredIndex(self.index, worker_id)
        share = (config.namespace_slots or config.num_slots) / config.num_slots
        self.disk_io = (
            disk_io(worker_id.name, config.disk, self.tiered_index, self.arena, share) if config.disk else None
        )
        self._disk_bytes = config.disk.num_bytes if config.disk else 0
        self.store_io: MooncakeIo | None = None
        if config.store is not None:
            self.store_io = MooncakeIo(config.store, self.tiered_index, self.arena, config.num_slots)
        self._parked: dict[int, tuple[int, Send]] = {}
        """Look-ups that wait for the disk: the number of the request, and where the reply goes."""
        self._write_headers()
        self._num_strange = 0
        self._last_reserve: dict[WorkerId, int] = {}
        """Number of each writer's latest reservation."""

    def answer(
        self, data: bytes | memoryview, now_s: float, worker_ids: set[WorkerId], send: Send | None = None
    ) -> bytes | None:
        """The reply to one message, if it has one. Invalid and unauthorised messages are counted and dropped.

        `worker_ids`: the worker of this connection, at most one; it is lost when the connection closes.
        `send` takes replies that wait for the disk; without it nothing waits.
        """
        try:
            question = wire.decode_request(data)
        except msgspec.DecodeError:
            self._num_strange += 1
            return None
        if not wire.may_say(question, worker_ids, self._worker_id):
            self._num_strange += 1
            return None
        reply = self._reply(question, now_s, send)
        self._write_headers()
        return None if reply is None else wire.encode(reply)

    def expire(self, now_s: float) -> None:
        self.index.expire(now_s)
        self._write_headers()

    def lost(self, worker_id: WorkerId) -> None:
        """The worker's connection has closed."""
        self._free_reader_slot(worker_id)
        self.index.lost(worker_id)
        self._write_headers()

    def _take_reader_slot(self, worker_id: WorkerId) -> int:
        """A reader slot for as long as the connection is open; -1 if none is free."""
        if worker_id not in self._reader_slots:
            free = set(range(NUM_READER_SLOTS)) - set(self._reader_slots.values())
            if not free:
                return -1
            self._reader_slots[worker_id] = min(free)
        return self._reader_slots[worker_id]

    def _free_reader_slot(self, worker_id: WorkerId) -> None:
        reader_slot = self._reader_slots.pop(worker_id, None)
        if reader_slot is not None:
            self.arena.clear(slice(reader_slot, reader_slot + 1))

    def turn(self, now_s: float) -> None:
        """Take results of disk and store, start their next jobs, and send replies that waited for them."""
        if not self.tasks:
            return
        for tasks in self.tasks:
            tasks.poll(now_s)
        answers = [(*self._parked.pop(waited), hit) for waited, hit in self.tiered_index.answers(now_s)]
        self._write_headers()
        for number, send, hit in answers:
            send(wire.encode(self._found(number, hit)))

    @property
    def tasks(self) -> list[DiskTasks | MooncakeIo]:
        """Of tiers behind memory."""
        return [tasks for tasks in (self.disk_io, self.store_io) if tasks is not None]

    def hang_up(self, send: Send) -> None:
        """Cancel the pending replies of a closed connection."""
        for waited in [waited for waited, (_, to) in self._parked.items() if to == send]:
            del self._parked[waited]
            self.tiered_index.give_up(waited)

    @property
    def next_deadline_s(self) -> float | None:
        return self.tiered_index.next_deadline_s

    def close(self) -> None:
        for tasks in self.tasks:
            tasks.close()
        self.arena.remove()

    def _reply(self, question: wire.Request, now_s: float, send: Send | None) -> wire.Reply | None:
        match question:
            case wire.Lookup():
                return self._look_up(question, now_s, send)
            case wire.Release(worker_id, leases, bad):
                for lease in leases:
                    self.index.release(lease, worker_id, bad)
            case wire.Used(worker_id, uses, bad):
                self.index.used(uses, worker_id, bad)
            case wire.Reserve():
                return self._reserve(question, now_s)
            case wire.Commit(worker_id, ticket, written):
                fitting = [each for each in written if each.num_bytes <= self.arena.slot_bytes]
                self.index.commit(ticket, worker_id, fitting)
            case wire.Open(number, _, worker_id):
                # Not if it arrived on an old connection after a reservation on a new one.
                if number > self._last_reserve.get(worker_id, 0):
                    self.index.at_rest(worker_id)
                place = self.arena.path.name, self.arena.nonce
                return wire.Opened(
                    number, wire.PROTOCOL, self._worker_id, *place, self._write_s, self._take_reader_slot(worker_id)
                )
            case wire.GetStats(number):
                return self._stats(number)
            case wire.Purge(number, namespace):
                return self._purge(number, namespace, send)
            case wire.Quotas(number, slots):
                return wire.Purged(number, self.tiered_index.set_quotas(slots))
            case Suspect(worker_id):
                if worker_id in self._reader_slots:
                    self.arena.clear(slice(self._reader_slots[worker_id], self._reader_slots[worker_id] + 1))
                self.index.lost(worker_id)
            case Reaped(worker_id):
                self._free_reader_slot(worker_id)
                self._last_reserve.pop(worker_id, None)
                self.index.reaped(worker_id)
        return None

    def _look_up(self, question: wire.Lookup, now_s: float, send: Send | None) -> wire.LookupResult | None:
        for lease in question.done:
            self.index.release(lease, question.worker_id)
        wait_s = min(question.wait_ms / 1e3, _MAX_WAIT_S) if send is not None else 0.0
        hit = self.tiered_index.lookup(question.keys, question.worker_id, question.namespace, now_s, wait_s)
        if isinstance(hit, Hit):
            return self._found(question.number, hit)
        assert send is not None
        self._parked[hit] = question.number, send
        return None

    def _purge(self, number: int, namespace: bytes, send: Send | None) -> wire.Purged | None:
        """The purge is answered once it is recorded on disk, and by the store."""
        purged = wire.Purged(number, self.tiered_index.purge(namespace))
        if not self.tasks or send is None:
            return purged
        then: Callable[[], None] = partial(send, wire.encode(purged))
        for tasks in self.tasks:
            then = partial(tasks.purge, namespace, then)
        then()
        return None

    def _found(self, number: int, hit: Hit) -> wire.LookupResult:
        return wire.LookupResult(number, self.arena.nonce, hit.lease, hit.blocks)

    def _reserve(self, question: wire.Reserve, now_s: float) -> wire.Granted:
        self._last_reserve.pop(question.worker_id, None)
        self._last_reserve[question.worker_id] = question.number
        if len(self._last_reserve) > _REMEMBERED_WRITERS:
            del self._last_reserve[next(iter(self._last_reserve))]
        grant = self.index.reserve(question.keys, question.worker_id, question.namespace, now_s, question.depths)
        return wire.Granted(question.number, self.arena.nonce, grant.ticket, grant.positions, grant.slots)

    def _stats(self, number: int) -> wire.Stats:
        index, counters = self.index, self.index.counters
        return wire.Stats(
            number=number,
            slot_bytes=self.arena.slot_bytes,
            num_slots=index.num_slots,
            free=index.num_free,
            reserved=index.num_reserved,
            fenced=index.num_fenced,
            committed=index.num_committed,
            leases=index.num_leases,
            hits=counters.hits,
            misses=counters.misses,
            evicted=counters.evicted,
            bad=counters.bad,
            expired_leases=counters.expired_leases,
            strange_messages=self._num_strange,
            held=dict(Counter(index.held).most_common(_REPORTED_NAMESPACES)),
            disk=self._disk(),
        )

    def _disk(self) -> wire.Disk | None:
        if self.disk_io is None or (tier := self.disk_io.tier) is None:
            return wire.Disk(self.disk_io.state, self._disk_bytes) if self.disk_io is not None else None
        counters = tier.counters
        return wire.Disk(
            self.disk_io.state,
            self._disk_bytes,
            sum(tier.held_bytes.values()),
            tier.num_disk_copies,
            tier.num_pending,
            counters.written,
            counters.promoted,
            counters.lost,
            counters.forgotten,
            counters.bad,
        )

    def _write_headers(self) -> None:
        for slot, record in self.tiered_index.take_changes():
            self.arena.write_header(slot, record)


@dataclass(slots=True)
class _Peer:
    channel: LocalChannel
    worker_ids: set[WorkerId] = field(default_factory=set)

    def send(self, data: bytes) -> None:
        """Replies that do not fit the socket's buffer are dropped; a closed connection is noticed when reading."""
        with suppress(OSError):
            self.channel.send(data)


class MemberServer:
    """The member's sockets: accepts connections of the same user only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.unlink(missing_ok=True)  # of an earlier process, which has ended: the arena's lock is held
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(_MAX_PEERS)
        self._listener.setblocking(False)
        self._lines: dict[int, _Peer] = {}
        self._received = memoryview(bytearray(MAX_MESSAGE_BYTES))
        self._ready = select.epoll()
        self._ready.register(self._listener, select.EPOLLIN)

    def serve(self, member: Member, wake: socket.socket, still_wanted: Callable[[], bool]) -> None:
        """Answer until something arrives on `wake`, or `still_wanted` is false."""
        self._ready.register(wake, select.EPOLLIN)
        for tasks in member.tasks:
            self._ready.register(tasks, select.EPOLLIN)
        looked_s = time.monotonic()
        was_asked = False
        while True:
            deadline_s, now_s = member.next_deadline_s, time.monotonic()
            wait_s = LOOK_AROUND_S if deadline_s is None else min(LOOK_AROUND_S, max(0.0, deadline_s - now_s))
            ready = (self._linger() if was_asked else []) or self._ready.poll(wait_s)
            now_s, was_asked = time.monotonic(), False
            if now_s >= looked_s + LOOK_AROUND_S:
                looked_s = now_s
                if not still_wanted():
                    return
            member.expire(now_s)
            for fd, _ in ready:
                if fd == wake.fileno():
                    return
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._lines:
                    was_asked |= self._answer(member, self._lines[fd], now_s)
            member.turn(now_s)

    def _linger(self) -> list[tuple[int, int]]:
        until_s = time.monotonic() + _LINGER_S
        while not (ready := self._ready.poll(0)) and time.monotonic() < until_s:
            pass
        return ready

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        for line in self._lines.values():
            line.channel.close()
        self._listener.close()
        self._ready.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # the client has disconnected
            return
        _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid() or len(self._lines) >= _MAX_PEERS:
            peer.close()
            return
        self._lines[peer.fileno()] = _Peer(LocalChannel(peer, self._received))
        self._ready.register(peer, select.EPOLLIN)

    def _answer(self, member: Member, line: _Peer, now_s: float) -> bool:
        """Answer one message, so that a busy client alternates with the others. Returns whether it was a request."""
        try:
            data = line.channel.receive()
            if data is None:
                return False
            if data:
                reply = member.answer(data, now_s, line.worker_ids, line.send)
                if reply is not None:
                    line.channel.send(reply)
                return reply is not None
        except BlockingIOError:
            return False  # it does not read its replies; they are dropped
        except OSError:
            pass
        member.hang_up(line.send)
        for worker_id in line.worker_ids:
            member.lost(worker_id)
        del self._lines[line.channel.fileno()]
        self._ready.unregister(line.channel)
        line.channel.close()
        return False


def run_member(folder: Path, worker_id: WorkerId, config: CacheConfig) -> None:
    """Run the member process until SIGTERM, SIGINT or its parent's death; removes its arena at the end."""
    parent = os.getppid()
    wake, waker = socket.socketpair()
    with wake, waker:
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        member = Member(LocalHost(folder), worker_id, config)
        server = MemberServer(wire.address(folder, worker_id.name))
        server.serve(member, wake, lambda: os.getppid() == parent)
        server.close()
        member.close()
        signal.set_wakeup_fd(-1)
