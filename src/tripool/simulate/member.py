"""Cache members in virtual time: the real `Member` behind simulated connections, killed and started again by faults."""

from __future__ import annotations

from collections import Counter, deque
from mmap import mmap

from tripool.cache import namespace_tag, wire
from tripool.cache.arena import Arena, arena_bytes
from tripool.cache.disk_records import DiskCopy
from tripool.cache.disk_tier import DiskTier
from tripool.cache.host import MemberChannel
from tripool.cache.member import Member
from tripool.cache.records import State
from tripool.cache.tiered_index import TieredIndex
from tripool.config import CacheConfig, DiskConfig
from tripool.messages import SUPERVISOR, Reaped, WorkerId
from tripool.simulate.disk import SimDisk, SimDiskIo
from tripool.simulate.memory import Memory, SimArena
from tripool.simulate.process import Process
from tripool.simulate.rng import Rng
from tripool.simulate.timeline import Timeline

LEASE_S = 0.5
WRITE_S = 0.3
_LATENCY_S = (0.00002, 0.0002)
_LATE_S = 0.5
_TURN_S = 0.01
"""Least time between two iterations of an idle member."""


class SimMember:
    """One member's place: a `Member` over the arena and the disk that its predecessor left."""

    def __init__(
        self, timeline: Timeline, rng: Rng, memory: Memory, name: str, config: CacheConfig, disk: SimDisk | None
    ) -> None:
        self.name, self.disk = name, disk
        self.up = False
        self.epoch = 0
        self.seen: Counter[str] = Counter()
        self._timeline, self._rng, self._memory, self._config = timeline, rng, memory, config
        self._channels: list[SimMemberChannel] = []
        self._acknowledged: set[bytes] = set()
        self._deadline_s = 0.0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        worker_id = WorkerId(self.name, self.epoch)
        self._disturb()
        host = SimHost(self._timeline, self._memory, worker_id, [], None)
        self.member = Member(host, worker_id, self._config, self._open_disk)
        self._memory.is_leased[f"{self.name}.arena"] = self.member.index.is_leased
        self.up = True
        tier = self._tier
        if tier is not None:
            lost = self._acknowledged - tier.disk_copies.keys()
            assert not lost, f"{len(lost)} blocks that were on disk are gone"
            self.seen["blocks found on disk"] += tier.num_disk_copies if self.epoch > 1 else 0
        self._turn()

    @property
    def _tier(self) -> DiskTier | None:
        return self.member.disk_io.tier if self.member.disk_io is not None else None

    def kill(self) -> None:
        self._disturb()
        self.remember()
        self.up = False
        tier = self._tier
        self._acknowledged = set(tier.disk_copies) if tier is not None else set()
        if self.member.disk_io is not None:
            self.member.disk_io.close()
        for channel in self._channels:
            channel.end()
        self._channels = []

    def check(self) -> None:
        deadline_s = self.member.next_deadline_s
        late_s = 0.0 if deadline_s is None else self._timeline.now_s - deadline_s
        assert late_s < _LATE_S, f"{self.name} is {late_s:.1f} s past its deadline"
        self.member.tiered_index.check()
        tier = self._tier
        if self.disk is not None and tier is not None:
            for copy in tier.disk_copies.values():
                assert self.disk.keeps(copy), "the index knows a block that is not on disk"

    def holds_nothing(self, alive: set[WorkerId]) -> bool:
        """`alive`: the workers that run now."""
        index, arena = self.member.index, self.member.arena
        if not self.up or index.num_leases or any(map(arena.is_read, range(arena.num_slots))):
            return False
        writers = {record.writer for record in index.records if record.state is State.RESERVED}
        # A client that was late for its grant, or has lost its connection, gives it back when it next uses this member.
        busy = {worker_id for channel in self._channels if not channel.readable for worker_id in channel.worker_ids}
        return writers <= alive - busy

    def remember(self) -> None:
        """Count what this run of the member did; the next one counts from zero."""
        if not self.up:
            return
        self.seen["bad blocks in the cache"] += self.member.index.counters.bad
        self.seen["blocks evicted"] += self.member.index.counters.evicted
        tier = self._tier
        if tier is not None:
            self.seen["blocks read from disk"] += tier.counters.promoted
            self.seen["blocks written to disk"] += tier.counters.written
            self.seen["bad blocks on disk"] += tier.counters.bad

    # ---- for faults and the supervisor ------------------------------------------------------------------------------

    def reaped(self, worker_id: WorkerId) -> None:
        if self.up:
            self.member.answer(wire.encode(Reaped(worker_id)), self._timeline.now_s, {WorkerId(SUPERVISOR, 1)})

    def purge(self, namespace: str) -> None:
        """Forget a tenant, in this run and in later ones."""
        tag = namespace_tag(namespace)
        self._disturb()
        self.member.answer(wire.encode(wire.Purge(1, tag)), self._timeline.now_s, set(), lambda data: None)
        index, tier = self.member.index, self._tier
        found = [record for record in index.records if record.state is State.COMMITTED and record.namespace == tag]
        left: list[DiskCopy] = [] if tier is None else [c for c in tier.disk_copies.values() if c.namespace == tag]
        assert not found and not left, "a purged block can be found"

    def rot(self, salt: int) -> None:
        """Some blocks on disk are not what they were."""
        if self.disk is not None:
            self.seen["blocks rotten on disk"] += self.disk.damage(salt)

    def fill_disk(self) -> None:
        """Nothing more can be written, until the next run makes room."""
        if self.disk is not None:
            self.disk.is_full = True

    # ---- connections ------------------------------------------------------------------------------------------------

    def connect(self, process: Process) -> SimMemberChannel | None:
        if not self.up:
            return None
        channel = SimMemberChannel(self, self._timeline, process)
        self._channels.append(channel)
        return channel

    def carry(self, channel: SimMemberChannel, data: bytes) -> None:
        """A client's message, on its way here."""
        channel.to_member_s = max(channel.to_member_s, self._timeline.now_s + self._rng.uniform(*_LATENCY_S))
        self._timeline.call_at(channel.to_member_s, self._receive, channel, data)

    def hang_up(self, channel: SimMemberChannel) -> None:
        """A client closed its end, or died: noticed after what it had sent."""
        channel.to_member_s = max(channel.to_member_s, self._timeline.now_s)
        self._timeline.call_at(channel.to_member_s, self._lose, channel)

    def _receive(self, channel: SimMemberChannel, data: bytes) -> None:
        if channel in self._channels:
            now_s = self._timeline.now_s
            self.member.expire(now_s)
            num_bad = self.member.index.counters.bad
            reply = self.member.answer(data, now_s, channel.worker_ids, channel.deliver)
            if reply is not None:
                channel.deliver(reply)
            assert self.member.index.counters.bad == num_bad, "a committed block is not what was written"
            self._turn()

    def _lose(self, channel: SimMemberChannel) -> None:
        if channel in self._channels:
            self._channels.remove(channel)
            self.member.hang_up(channel.deliver)
            for worker_id in channel.worker_ids:
                self.member.lost(worker_id)

    def _disturb(self) -> None:
        self._memory.disturbed_s[f"{self.name}.arena"] = self._timeline.now_s

    def _turn(self) -> None:
        if not self.up:
            return
        now_s = self._timeline.now_s
        self.member.turn(now_s)
        deadline_s = self.member.next_deadline_s
        if deadline_s is not None and not now_s < self._deadline_s <= deadline_s:
            self._deadline_s = max(deadline_s, now_s + _TURN_S)
            self._timeline.call_at(self._deadline_s, self._expire)

    def _expire(self) -> None:
        if self.up:
            self.member.expire(self._timeline.now_s)
            self._turn()

    def _open_disk(
        self, name: str, config: DiskConfig, tiered_index: TieredIndex, arena: Arena, share: float
    ) -> SimDiskIo:
        assert self.disk is not None
        return SimDiskIo(self.disk, self._timeline, tiered_index, arena, self._turn, self.seen)


class SimMemberChannel:
    """A client's `MemberChannel`."""

    def __init__(self, member: SimMember, timeline: Timeline, process: Process) -> None:
        self.worker_ids: set[WorkerId] = set()
        self.to_member_s = 0.0
        self._member, self._timeline, self._process = member, timeline, process
        self._arrived: deque[bytes] = deque()
        self._to_client_s = 0.0
        self._ended = self._closed = False

    def send(self, data: bytes) -> None:
        if self._ended:
            raise BrokenPipeError
        self._member.carry(self, data)

    @property
    def readable(self) -> bool:
        return bool(self._arrived) or self._ended

    def receive(self, wait_s: float) -> bytes | None:
        if wait_s > 0 and not self.readable:
            self._process.wait(self._timeline.now_s + wait_s, "ask", wakes=True)
        if self._arrived:
            return self._arrived.popleft()
        return b"" if self._ended else None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._member.hang_up(self)

    def deliver(self, data: bytes) -> None:
        self._to_client_s = max(self._to_client_s, self._timeline.now_s + _LATENCY_S[0])
        self._timeline.call_at(self._to_client_s, self._arrive, data)

    def end(self) -> None:
        """The member died; what it had answered is still there to be read."""
        self._ended = True
        self._process.wake(self._timeline.now_s)

    def _arrive(self, data: bytes) -> None:
        self._arrived.append(data)
        self._process.wake(self._timeline.now_s)


class SimHost:
    """A process's `CacheHost`; a member's own has no process."""

    def __init__(
        self, timeline: Timeline, memory: Memory, worker_id: WorkerId, members: list[SimMember], process: Process | None
    ) -> None:
        self._timeline, self._memory, self._worker_id, self._process = timeline, memory, worker_id, process
        self._members = {member.name: member for member in members}
        self._channels: list[SimMemberChannel] = []

    def now_s(self) -> float:
        return self._timeline.now_s

    def connect(self, member: str) -> MemberChannel | None:
        assert self._process is not None
        channel = self._members[member].connect(self._process)
        if channel is not None:
            self._channels.append(channel)
        return channel

    def hang_up(self) -> None:
        """The process died, and its connections with it."""
        for channel in self._channels:
            channel.close()

    def create_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena:
        mapped = mmap(-1, arena_bytes(slot_bytes, num_slots))
        self._memory.arenas[name] = mapped, slot_bytes, num_slots, 1 + len(self._memory.arenas)
        return self.attach_arena(name)

    def reopen_arena(self, name: str, slot_bytes: int, num_slots: int) -> Arena | None:
        return self.attach_arena(name) if name in self._memory.arenas else None

    def attach_arena(self, name: str) -> Arena:
        return SimArena(self._memory, name, self._worker_id, LEASE_S, self._process)
