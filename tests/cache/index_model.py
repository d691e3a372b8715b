"""The pool's rules in words: a model that keeps plain dicts and searches, and a machine that drives both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tripool.cache.eviction import ATTENTION_BLOCKS, CostAware
from tripool.cache.index import PoolIndex
from tripool.cache.records import Record, State, Written
from tripool.messages import WorkerId

LEASE_S, WRITE_S = 5.0, 3.0
SPACES = [b"a" * 16, b"b" * 16]
LIVES = [WorkerId(worker, epoch) for worker in ("p-0", "d-0") for epoch in (1, 2)]
# A chain per namespace, few and short so that they meet.
STARTS = st.sampled_from([0, 0, 0, 1, 3])
CHAINS = {space: [space[:1] * 15 + bytes([n]) for n in range(5)] for space in SPACES}


@dataclass
class Reserved:
    writer: WorkerId
    deadline_s: float
    keys: dict[int, bytes]
    fenced: bool = False


@dataclass
class Leased:
    reader: WorkerId
    deadline_s: float
    slots: list[int]


@dataclass
class Model:
    num_slots: int
    quota: int
    committed: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Key -> slot, checksum."""
    used: list[bytes] = field(default_factory=list)
    """Committed keys, the least recently used first; those being read are not to be forgotten."""
    by_cost: bool = False
    clock: int = 0
    uses: dict[bytes, int] = field(default_factory=dict)
    until: dict[bytes, float] = field(default_factory=dict)
    """By cost: how long each committed key lives, on a clock that counts uses."""
    leases: dict[int, Leased] = field(default_factory=dict)
    tickets: dict[int, Reserved] = field(default_factory=dict)
    doomed: dict[int, bytes] = field(default_factory=dict)
    """Slots that were forgotten while someone read them, and whose they are."""
    dead: set[WorkerId] = field(default_factory=set)

    def readers(self, slot: int) -> int:
        return sum(lease.slots.count(slot) for lease in self.leases.values())

    def slots_in_use(self, space: bytes | None = None) -> set[int]:
        used = {slot: key[:1] for key, (slot, _) in self.committed.items()}
        used |= {slot: key[:1] for ticket in self.tickets.values() for slot, key in ticket.keys.items()}
        used |= {slot: key[:1] for slot, key in self.doomed.items()}
        return {slot for slot, first in used.items() if space is None or first == space[:1]}

    def being_written(self) -> set[bytes]:
        return {key for held in self.tickets.values() if not held.fenced for key in held.keys.values()}

    def touch(self, keys: list[bytes]) -> None:
        """Used now, the head last: a tail without its head is useless and goes first."""
        at_least = 0.0
        self.clock += len(keys)
        for key in reversed(keys):
            if key in self.used:
                self.used.remove(key)
            self.used.append(key)
            self.uses[key] = self.uses.get(key, 0) + 1
            keep = 0.1 * self.num_slots * (1 + key[-1] / ATTENTION_BLOCKS) * min(self.uses[key], 16) ** 0.5
            at_least = self.until[key] = max(self.clock + keep, at_least, self.until.get(key, 0.0))

    def key_at(self, slot: int) -> bytes | None:
        return next((key for key, (at, _) in self.committed.items() if at == slot), None)

    def forget(self, key: bytes) -> None:
        slot, _ = self.committed.pop(key)
        self.used.remove(key)
        del self.uses[key], self.until[key]
        if self.readers(slot):
            self.doomed[slot] = key

    def end_lease(self, number: int) -> None:
        lease = self.leases.pop(number)
        unread = [slot for slot in dict.fromkeys(lease.slots) if not self.readers(slot)]
        self.touch([key for slot in unread if (key := self.key_at(slot)) is not None])
        for slot in unread:
            self.doomed.pop(slot, None)

    def make_room(self, space: bytes, asked: list[bytes]) -> bool:
        at_quota = len(self.slots_in_use(space)) >= self.quota
        if not at_quota and len(self.slots_in_use()) < self.num_slots:
            return True
        unread = [key for key in self.used if not self.readers(self.committed[key][0])]
        unread = [key for key in unread if key[:1] == space[:1]] if at_quota else unread
        goes = min(unread, key=lambda key: self.until[key] if self.by_cost else 0, default=None)
        if goes is None or goes in asked:
            return False
        self.forget(goes)
        return True


class IndexMachine(RuleBasedStateMachine):
    """Lives look up, reserve, commit, give up, vanish and die, in any order; the member restarts in between."""

    index_type: type[PoolIndex] = PoolIndex
    by_cost = False

    @initialize(num_slots=st.integers(1, 5), quota=st.none() | st.integers(1, 4))
    def start(self, num_slots: int, quota: int | None) -> None:
        self.quota, self.now_s, self.num_restarts, self.num_committed = quota, 0.0, 0, 0
        self.model = Model(num_slots, quota or num_slots, by_cost=self.by_cost)
        self.index = self.new_index()
        self.headers = [Record()] * num_slots

    def new_index(self) -> PoolIndex:
        first = 1 + self.num_restarts * 1_000_000
        return self.index_type(
            self.model.num_slots,
            lease_s=LEASE_S,
            write_s=WRITE_S,
            namespace_slots=self.quota,
            first_number=first,
            order=CostAware(self.model.num_slots, weight=0.1 if self.by_cost else 0.0),
        )

    @rule(worker_id=st.sampled_from(LIVES), space=st.sampled_from(SPACES), start=STARTS, count=st.integers(1, 5))
    def lookup(self, worker_id: WorkerId, space: bytes, start: int, count: int) -> None:
        keys = CHAINS[space][start : start + count]
        expected = []
        for key in keys if worker_id not in self.model.dead else []:
            if key not in self.model.committed:
                break
            expected.append(self.model.committed[key])
        hit = self.index.lookup(keys, worker_id, space, self.now_s)
        assert [(block.slot, block.checksum) for block in hit.blocks] == expected, "not the longest committed prefix"
        if expected:
            assert hit.lease not in self.model.leases
            self.model.leases[hit.lease] = Leased(worker_id, self.now_s + LEASE_S, [slot for slot, _ in expected])

    @rule(worker_id=st.sampled_from(LIVES), start=st.integers(0, 3))
    def other_tenants_find_nothing(self, worker_id: WorkerId, start: int) -> None:
        mine, theirs = SPACES
        assert not self.index.lookup(CHAINS[mine][start:], worker_id, theirs, self.now_s).blocks

    @precondition(lambda self: self.model.leases)
    @rule(which=st.integers(0, 100), num_bad=st.sampled_from([0, 0, 1, 2]))
    def release(self, which: int, num_bad: int) -> None:
        number = list(self.model.leases)[which % len(self.model.leases)]
        lease = self.model.leases[number]
        bad = lease.slots[:num_bad]
        self.index.release(number, lease.reader, bad)
        for key in [self.model.key_at(slot) for slot in bad]:
            if key is not None:
                self.model.forget(key)
        self.model.end_lease(number)

    @precondition(lambda self: self.model.leases)
    @rule(which=st.integers(0, 100))
    def release_of_another(self, which: int) -> None:
        number = list(self.model.leases)[which % len(self.model.leases)]
        lease = self.model.leases[number]
        stranger = next(worker_id for worker_id in LIVES if worker_id != lease.reader)
        self.index.release(number, stranger, lease.slots)

    @rule(slot=st.integers(0, 4), worker_id=st.sampled_from(LIVES))
    def late_release(self, slot: int, worker_id: WorkerId) -> None:
        """Of a lease that has expired: its slots may be others' by now."""
        self.index.release(999_999_999, worker_id, [slot])

    @rule(worker_id=st.sampled_from(LIVES), space=st.sampled_from(SPACES), start=STARTS, count=st.integers(1, 5))
    def reserve(self, worker_id: WorkerId, space: bytes, start: int, count: int) -> None:
        keys = CHAINS[space][start : start + count]
        model = self.model
        expected = []
        if worker_id not in model.dead:
            known = [key for key in keys if key in model.committed and not model.readers(model.committed[key][0])]
            model.touch(known)
            untouchable = {slot for held in model.tickets.values() for slot in held.keys}
            untouchable |= {slot for lease in model.leases.values() for slot in lease.slots}
            pending = Reserved(worker_id, self.now_s + WRITE_S, {})
            for position, key in enumerate(keys):
                if key in model.committed or key in model.being_written() or key in pending.keys.values():
                    continue
                model.tickets[-1] = pending  # slots promised so far count as used
                room = model.make_room(space, keys)
                del model.tickets[-1]
                if not room:
                    break
                pending.keys[-1 - position] = key
                expected.append(position)
        grant = self.index.reserve(keys, worker_id, space, self.now_s, range(start, start + len(keys)))
        assert list(grant.positions) == expected, "granted more or less than there is room for"
        if expected:
            assert not set(grant.slots) & untouchable, "gave out a slot that someone reads or may write"
            slots = zip(grant.slots, grant.positions, strict=True)
            pending.keys = {slot: keys[position] for slot, position in slots}
            assert len(pending.keys) == len(expected)
            model.tickets[grant.ticket] = pending

    @precondition(lambda self: self.model.tickets)
    @rule(which=st.integers(0, 100), count=st.integers(0, 5), thief=st.booleans())
    def commit_any(self, which: int, count: int, thief: bool) -> None:
        self.commit(list(self.model.tickets)[which % len(self.model.tickets)], count, thief)

    @precondition(lambda self: self.model.tickets)
    @rule()
    def commit_newest(self) -> None:
        self.commit(max(self.model.tickets), 5, thief=False)

    def commit(self, ticket: int, count: int, thief: bool) -> None:
        """Of any reservation, late ones too: the writer lives and is done."""
        held = self.model.tickets[ticket]
        written = []
        for slot in list(held.keys)[:count]:
            self.num_committed += 1
            written.append(Written(slot, self.num_committed, 100))
        if thief:
            stranger = next(worker_id for worker_id in LIVES if worker_id != held.writer)
            assert self.index.commit(ticket, stranger, written) == 0
            return
        del self.model.tickets[ticket]
        kept = [each for each in written if held.keys[each.slot] not in self.model.committed]
        assert self.index.commit(ticket, held.writer, written) == len(kept)
        for each in kept:
            self.model.committed[held.keys[each.slot]] = each.slot, each.checksum
        self.model.touch([held.keys[each.slot] for each in kept])

    @rule(wait_s=st.floats(0, 4))
    def expire(self, wait_s: float) -> None:
        self.now_s += wait_s
        for number in [n for n, lease in self.model.leases.items() if self.now_s >= lease.deadline_s]:
            self.model.end_lease(number)
        for held in self.model.tickets.values():
            held.fenced = held.fenced or self.now_s >= held.deadline_s
        self.index.expire(self.now_s)
        assert self.index.next_deadline_s is None or self.index.next_deadline_s > self.now_s

    @rule(worker_id=st.sampled_from(LIVES))
    def lost(self, worker_id: WorkerId) -> None:
        self.index.lost(worker_id)
        self.forget_life(worker_id)

    def forget_life(self, worker_id: WorkerId) -> None:
        for number in [n for n, lease in self.model.leases.items() if lease.reader == worker_id]:
            self.model.end_lease(number)
        for held in self.model.tickets.values():
            held.fenced = held.fenced or held.writer == worker_id

    @rule(worker_id=st.sampled_from(LIVES[::2]))
    def reaped(self, worker_id: WorkerId) -> None:
        self.index.reaped(worker_id)
        self.forget_life(worker_id)
        self.model.dead.add(worker_id)
        self.model.tickets = {n: held for n, held in self.model.tickets.items() if held.writer != worker_id}

    @rule(worker_id=st.sampled_from(LIVES))
    def at_rest(self, worker_id: WorkerId) -> None:
        self.index.at_rest(worker_id)
        self.model.tickets = {n: held for n, held in self.model.tickets.items() if held.writer != worker_id}

    @rule(space=st.sampled_from(SPACES))
    def purge(self, space: bytes) -> None:
        gone = [key for key in self.model.committed if key[:1] == space[:1]]
        assert self.index.purge(space) == len(gone)
        for key in gone:
            self.model.forget(key)

    @rule()
    def restart(self) -> None:
        """A new life of the member knows what the headers say: no leases, every writer fenced."""
        self.num_restarts += 1
        self.index = self.new_index()
        self.index.restore(self.headers)
        model = self.model
        model.leases, model.doomed, model.dead = {}, {}, set()
        for held in model.tickets.values():
            held.fenced = True
        written = {r.key: (r.ticket, r.position) for r in self.headers if r.state is State.COMMITTED}
        model.used, model.uses, model.until, model.clock = [], {}, {}, 0
        for ticket in sorted({ticket for ticket, _ in written.values()}):
            chain = [key for key, (written_with, _) in written.items() if written_with == ticket]
            model.touch(sorted(chain, key=lambda key: written[key][1]))

    @invariant()
    def quotas_hold(self) -> None:
        for slot, record in self.index.take_changes():
            # As the arena writes it: nobody may find a doomed block after a restart.
            self.headers[slot] = Record() if record.state in (State.FREE, State.DOOMED) else replace(record)
        self.index.check()
        model = self.model
        assert self.index.num_leases == len(model.leases), "a lease is kept or lost"
        assert self.index.num_committed == len(model.committed)
        assert self.index.num_reserved == sum(len(held.keys) for held in model.tickets.values())
        assert self.index.num_free == model.num_slots - len(model.slots_in_use())
        for space in SPACES:
            assert self.index.held.get(space, 0) == len(model.slots_in_use(space)) <= model.quota
        shown = {r.key: (slot, r.checksum) for slot, r in enumerate(self.headers) if r.state is State.COMMITTED}
        assert shown == model.committed, "headers do not say what is committed"
