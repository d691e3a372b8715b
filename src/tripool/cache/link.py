"""A client's link to one cache member: questions, answers, the member's arena, and whether the member is there.

No wait is longer than `wait_s`, and only the first question of an absence is waited for. Afterwards the member is asked
every `retry_s` without waiting, and is back when it has answered. A member that dies closes its connection and
is absent at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from tripool.cache import wire
from tripool.cache.arena import NUM_READER_SLOTS, Arena
from tripool.cache.host import CacheHost, MemberChannel
from tripool.cache.records import Block, Written
from tripool.cache.shared_reads import SharedBlocks
from tripool.errors import ArenaError
from tripool.messages import WorkerId

_UNSENT_RELEASES = 16
_UNSENT_USES = 64
_FROM_DISK = 0.5
"""Share of the reply's deadline that it may spend waiting for blocks from disk."""

AnswerT = TypeVar("AnswerT", wire.Opened, wire.LookupResult, wire.Granted, wire.Stats, wire.Purged)


class FoundBlocks(Protocol):
    """Blocks of one member that were found, in order. They refer to what they were found in: the link may have another
    arena or connection by the time they are read."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]: ...

    def read(self, start: int, into: Sequence[Any]) -> int:
        """Copy the blocks from `start` on; returns how many buffers hold their block. Later calls start later."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """The reader slot under which blocks were acquired, and the connection that the member gave it to."""

    channel: MemberChannel | None
    reader_slot: int


class Link:
    is_mapped = True
    """Blocks are copied from memory; not from another host's."""

    def __init__(self, host: CacheHost, member: str, worker_id: WorkerId, wait_s: float, retry_s: float) -> None:
        self.member = member
        self.arena: Arena | None = None
        self.write_s = 0.0
        self._host, self._worker_id = host, worker_id
        self._wait_s, self._retry_s = wait_s, retry_s
        self._number = 0
        self._channel: MemberChannel | None = None
        self._done: list[int] = []
        """Leases to release."""
        self._reader_slot = -1
        self._used: list[tuple[int, int]] = []
        """(slot, ticket) of blocks read by shared reads, to be reported to the member."""
        self._is_there = False
        self._is_late = False
        """A wait timed out: until the member answers again, requests do not wait."""
        self._ask_again_s = 0.0

    def close(self) -> None:
        self._done = []  # the member ends the leases of a closed connection
        if self._channel is not None:
            self._channel.close()
        self._channel, self._is_there, self._reader_slot, self._used = None, False, -1, []

    @property
    def is_there(self) -> bool:
        """Whether the member has answered, without asking it."""
        return self._is_there

    # ---- availability -------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether requests can be sent. Waits, within bounds, only while the member is not known to be absent."""
        if not self._is_there:
            self._hear_late()
        if not self._is_there and self._host.now_s() >= self._ask_again_s:
            self._ask_again_s = self._host.now_s() + self._retry_s
            self._open()
        return self._is_there

    def answers(self) -> bool:
        """Send a request now: `ready` may not have noticed a dead member yet."""
        self._ask_again_s = 0.0
        return self.ready() and self.answer(self.ask(wire.GetStats), wire.Stats) is not None

    def _open(self) -> None:
        if self._channel is None and not self._connect():
            return
        number = self.ask(wire.Open, wire.PROTOCOL, self._worker_id)
        if not self._is_late:
            opened = self.answer(number, wire.Opened)
            if opened is not None:
                self._attach(opened)

    def _connect(self) -> bool:
        self._channel = self._host.connect(self.member)
        if self._channel is not None:
            self._is_late = False
        return self._channel is not None

    def _attach(self, opened: wire.Opened) -> None:
        if opened.protocol != wire.PROTOCOL or opened.reader_slot >= NUM_READER_SLOTS:
            return
        if self.arena is None or self.arena.nonce != opened.nonce:
            try:
                self.arena = self._host.attach_arena(opened.arena)
            except (OSError, ArenaError):  # removed, or not a private file: treat as absent
                self.arena = None
                return
        if self.arena.nonce != opened.nonce:  # recreated since
            return
        self.write_s, self._reader_slot = opened.write_s, opened.reader_slot
        self._is_there, self._is_late = True, False

    # ---- shared reads -------------------------------------------------------------------------------------------

    def find_here(self, namespace: bytes, keys: Sequence[bytes]) -> tuple[Acquired, SharedBlocks] | None:
        """Acquire all of these blocks in the member's arena; None: send a look-up."""
        arena, channel, reader_slot = self.arena, self._channel, self._reader_slot
        if arena is None or channel is None or reader_slot < 0 or channel.readable:  # closed, or unread answers
            return None
        found = SharedBlocks.acquire(arena, keys, namespace, reader_slot)
        return None if found is None else (Acquired(channel, reader_slot), found)

    def found(self, number: int | None, wanted: Sequence[bytes]) -> tuple[int, SharedBlocks] | None:
        """What a look-up has found, under a lease."""
        answer = self.answer(number, wire.LookupResult)
        arena = self.arena
        if answer is None or not answer.lease or arena is None or len(answer.blocks) > len(wanted):
            return None
        if any(each.slot >= arena.num_slots or each.num_bytes > arena.slot_bytes for each in answer.blocks):
            return None  # an invalid reply
        return answer.lease, SharedBlocks.from_lookup(arena, wanted, answer.blocks)

    def end(self, lease: int | Acquired, found: FoundBlocks) -> None:
        """Nothing more is read of these blocks."""
        assert isinstance(found, SharedBlocks)
        if isinstance(lease, Acquired):
            self.end_read(lease, found)
        else:
            self.release(lease, tuple(found.bad))

    def send_blocks(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        positions: Sequence[int],
        blocks: Sequence[Any],
        checksums: Sequence[int],
        first: int,
        form: int,
    ) -> int | None:
        """For a member whose arena this process cannot map: how many blocks are on their way to it. None: it maps it,
        and the caller writes them there. `blocks`, and their checksums if they are known, begin at position `first`."""
        return None

    def end_read(self, acquired: Acquired, found: SharedBlocks) -> None:
        """End a shared read; its uses are reported later, as with `release`."""
        if acquired.channel is not self._channel or self._channel is None:
            return  # the member has cleared the reader slots of a closed connection
        found.release(acquired.reader_slot)
        if found.bad:
            self._tell_used(found.uses, tuple(found.bad))
            return
        self._used += found.uses
        if len(self._used) >= _UNSENT_USES:
            self.flush()

    # ---- requests and replies -----------------------------------------------------------------------------------

    def look_up(self, namespace: bytes, keys: tuple[bytes, ...]) -> int | None:
        done = self._take_done()
        wait_ms = int(_FROM_DISK * self._wait_s * 1e3)
        return self.ask(wire.Lookup, self._worker_id, namespace, keys[: wire.MAX_KEYS], done, wait_ms)

    def reserve(self, namespace: bytes, keys: tuple[bytes, ...], depths: tuple[int, ...] = ()) -> int | None:
        asked = keys[: wire.MAX_KEYS], depths[: wire.MAX_KEYS]
        return self.ask(wire.Reserve, self._worker_id, namespace, *asked)

    def release(self, lease: int, bad: tuple[int, ...] = ()) -> None:
        """Sent with the next request, or with `flush`: a message of its own would cost as much as a request."""
        if bad:
            self._send(wire.Release(self._worker_id, (lease,), bad))
        elif lease:
            self._done.append(lease)
            if len(self._done) >= _UNSENT_RELEASES:
                self.flush()

    def flush(self) -> None:
        if self._done:
            self._send(wire.Release(self._worker_id, self._take_done()))
        if self._used:
            used, self._used = self._used, []
            self._tell_used(used)

    def _tell_used(self, used: Sequence[tuple[int, int]], bad: tuple[int, ...] = ()) -> None:
        for start in range(0, len(used), wire.MAX_KEYS):
            self._send(wire.Used(self._worker_id, tuple(used[start : start + wire.MAX_KEYS]), bad))

    def _take_done(self) -> tuple[int, ...]:
        done, self._done = tuple(self._done), []
        return done

    def commit(self, ticket: int, written: Sequence[Written] = ()) -> None:
        if ticket:
            self.tell(wire.Commit(self._worker_id, ticket, tuple(written)))

    def ask(self, request: Callable[..., wire.Request], *fields: object) -> int | None:
        """Send a request, with the next number as its first field. Returns the number; None if it cannot be sent."""
        self._number += 1
        return self._number if self.tell(request(self._number, *fields)) else None

    def answer(self, number: int | None, kind: type[AnswerT]) -> AnswerT | None:
        """The reply to a request. None: not in time, and the member is absent until it answers again."""
        deadline_s = self._host.now_s() + self._wait_s
        while number is not None and (left_s := deadline_s - self._host.now_s()) > 0:
            heard = self._hear(left_s)
            if heard is None:
                break
            if heard.number == number:
                return heard if isinstance(heard, kind) and self._of_our_arena(heard) else None
            self._give_up(heard)
        self._is_there, self._is_late = False, self._channel is not None
        return None

    def tell(self, question: wire.Request) -> bool:
        self.flush()
        return self._send(question)

    def _send(self, question: wire.Request) -> bool:
        if self._channel is None:
            return False
        try:
            self._channel.send(wire.encode(question))
        except BlockingIOError:  # it does not read: stopped or overloaded
            self._is_there, self._is_late = False, True
            return False
        except OSError:
            self.close()
            return False
        return True

    def _of_our_arena(self, heard: wire.Reply) -> bool:
        """A member with a recreated arena is opened again, next time; its slots are not those of the current
        mapping.
        """
        if not isinstance(heard, (wire.LookupResult, wire.Granted)) or (self.arena and heard.nonce == self.arena.nonce):
            return True
        self._give_up(heard)
        self._is_there, self._ask_again_s = False, 0.0
        return False

    def _hear_late(self) -> None:
        while (heard := self._hear(0.0)) is not None:
            self._give_up(heard)

    def _give_up(self, heard: wire.Reply) -> None:
        """Handle a late reply: release what it grants; an Opened reply shows that the member is back."""
        match heard:
            case wire.LookupResult(lease=lease):
                self.release(lease)
            case wire.Granted(ticket=ticket):
                self.commit(ticket)
            case wire.Opened():
                self._attach(heard)

    def _hear(self, wait_s: float) -> wire.Reply | None:
        if self._channel is None:
            return None
        try:
            data = self._channel.receive(wait_s)
            if data is None:
                return None
            if len(data):
                return wire.decode_reply(data)
        except (OSError, msgspec.DecodeError):
            pass  # dead or invalid: treated alike
        self.close()
        return None
