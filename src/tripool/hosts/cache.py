"""The cache pool across hosts: members of this host through shared memory, those of others over their host's server.

A look-up at another host brings the blocks with its answer: one round trip for all of them, read from the connection
straight into the buffers that are to hold them. What is stored at another host leaves by a thread, within bounds, so
that a slow network delays no worker. A host that is not there is a miss, and is tried again without waiting for it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tripool.cache import wire as cache_wire
from tripool.cache.arena import as_bytes
from tripool.cache.client import PoolClient
from tripool.cache.copying import checksum
from tripool.cache.host import LocalHost
from tripool.cache.link import Acquired, AnswerT, FoundBlocks, Link
from tripool.cache.records import Block
from tripool.hosts.connection import Connection, dial
from tripool.hosts.directory import DirectoryFile, OwnHost, read_own
from tripool.hosts.errors import HostError
from tripool.hosts.wire import ANSWERS, AskMember, Data, FindBlocks, Reply, StoreBlocks, Taken
from tripool.hosts.wire import FoundBlocks as Found
from tripool.messages import WorkerId

_WAIT_S, _RETRY_S = 0.25, 0.5
_PROGRESS_S = 1.0
"""Longest time without a byte of blocks that were found."""
_UNREAD_BYTES = 2**20
"""More than that is not read for nothing: another connection is quicker."""
_SKIP_BYTES = 2**16
_STORING_BYTES = 64 * 2**20
"""On their way to one member; what is more is not stored."""


def pool_client(folder: Path, members: Sequence[str], worker_id: WorkerId, *, model: str | None) -> PoolClient | None:
    """Of one model, or of all; None: there is no cache and none can come."""
    own = read_own(folder)
    if own is None:
        return PoolClient(LocalHost(folder), members, worker_id) if members else None
    directory, local = DirectoryFile(folder), LocalHost(folder)

    def open_link(member: str) -> Link:
        if member in here:
            return Link(local, member, worker_id, _WAIT_S, _RETRY_S)
        return RemoteLink(own, local, member, worker_id, lambda: directory.member_address(member))

    here = {member for names in own.members.values() for member in names}
    watch = partial(_members, directory, model)
    host_of = directory.host_of_member if own.second_copy else None
    return PoolClient(local, members, worker_id, open_link=open_link, watch=watch, host_of=host_of)


def all_members(folder: Path, members: Sequence[str], worker_id: WorkerId) -> PoolClient:
    return pool_client(folder, members, worker_id, model=None) or PoolClient(LocalHost(folder), members, worker_id)


def _members(directory: DirectoryFile, model: str | None) -> Sequence[str] | None:
    return tuple(directory.members(model)) if directory.changed() else None


class RemoteLink(Link):
    """A `Link` to a member of another host. Its arena stays None: nothing of another host is mapped."""

    is_mapped = False

    def __init__(
        self, own: OwnHost, local: LocalHost, member: str, worker_id: WorkerId, address: Callable[[], str]
    ) -> None:
        super().__init__(local, member, worker_id, _WAIT_S, _RETRY_S)
        self._own, self._address = own, address
        self._connection: Connection | None = None
        self._asked: deque[int] = deque()
        """Requests without an answer, oldest first."""
        self._reading: RemoteBlocks | None = None
        self._storing = _Storing(self._dial, member)

    def close(self) -> None:
        super().close()
        self._drop()
        self._storing.close()

    def _dial(self) -> Connection | None:
        try:
            return dial(self._address(), self._own.keys)
        except HostError:
            return None

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._reading = None, None
        self._asked.clear()

    def ready(self) -> bool:
        if self._connection is None:
            self._connection = self._storing.take_connection()
        if self._connection is None and self._host.now_s() >= self._ask_again_s:
            self._ask_again_s = self._host.now_s() + self._retry_s
            self._storing.connect()
        return self._connection is not None

    def answers(self) -> bool:
        return self.ready() and self.answer(self.ask(cache_wire.GetStats), cache_wire.Stats) is not None

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _request(self, request: msgspec.Struct) -> int | None:
        if self._reading is not None:
            self._reading.skip()
            self._reading = None
        if self._connection is None:
            return None
        try:
            self._connection.timeout(self._wait_s)
            self._connection.send(request)
        except OSError:
            self._drop()
            return None
        self._number += 1
        self._asked.append(self._number)
        return self._number

    def _answer(self, number: int | None) -> msgspec.Struct | None:
        try:
            while self._connection is not None and self._asked and number is not None and self._asked[0] <= number:
                at = self._asked.popleft()
                heard = self._connection.receive(ANSWERS)
                if at == number:
                    return heard
        except (OSError, msgspec.DecodeError):
            self._drop()  # late: what comes now has no reader
        return None

    def find_here(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        return None

    def look_up(self, namespace: bytes, keys: tuple[bytes, ...]) -> int | None:
        return self._request(FindBlocks(self.member, namespace, keys[: cache_wire.MAX_KEYS]))

    def found(self, number: int | None, wanted: Sequence[bytes]) -> tuple[int, Any] | None:
        answer = self._answer(number)
        if not isinstance(answer, Found) or self._connection is None or not 0 < len(answer.blocks) <= len(wanted):
            if isinstance(answer, Found) and len(answer.blocks) > len(wanted):
                self._drop()
            return None
        self._connection.timeout(_PROGRESS_S)
        self._reading = RemoteBlocks(self._connection, answer.blocks, self._drop)
        return 0, self._reading

    def end(self, lease: int | Acquired, found: FoundBlocks) -> None:
        if found is self._reading:
            self._reading.skip()
            self._reading = None

    def ask(self, request: Callable[..., cache_wire.Request], *fields: object) -> int | None:
        return self._request(AskMember(self.member, cache_wire.encode(request(self._number + 1, *fields))))

    def answer(self, number: int | None, kind: type[AnswerT]) -> AnswerT | None:
        answer = self._answer(number)
        if not isinstance(answer, Reply) or not answer.data:
            return None
        try:
            reply = cache_wire.decode_reply(answer.data)
        except msgspec.DecodeError:
            return None
        return reply if isinstance(reply, kind) else None

    def flush(self) -> None:
        pass  # a lease at another host lasts as long as its answer

    def send_blocks(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        positions: Sequence[int],
        blocks: Sequence[Any],
        checksums: Sequence[int],
        first: int,
        form: int,
    ) -> int:
        sums = [checksums[position - first] for position in positions] if checksums else None
        sources = [as_bytes(blocks[position - first]).data for position in positions]
        return self._storing.put(namespace, tuple(keys), tuple(positions), sources, sums, form)


class RemoteBlocks:
    """Blocks that another host is sending, in order; their reader takes them from the connection."""

    def __init__(self, connection: Connection, blocks: Sequence[Block], failed: Callable[[], None]) -> None:
        self._connection, self._blocks, self._failed = connection, blocks, failed
        self._next = 0
        """The first block that is still to come."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def read(self, start: int, into: Sequence[Any]) -> int:
        try:
            self._skip_to(start)
            for number, (block, buffer) in enumerate(zip(self._blocks[start:], into, strict=False)):
                target = as_bytes(buffer).data
                if target.nbytes != block.num_bytes:
                    return number
                self._next += 1
                if self._connection.read_summed(target) != block.checksum:
                    return number
            return min(len(into), len(self._blocks) - start)
        except OSError:
            good = max(0, self._next - start - 1)
            self._next = len(self._blocks)
            self._failed()
            return good

    def skip(self) -> None:
        """What is not wanted is read and forgotten, if it is little."""
        unread = sum(block.num_bytes for block in self._blocks[self._next :])
        try:
            if unread > _UNREAD_BYTES:
                raise OSError
            self._skip_to(len(self._blocks))
        except OSError:
            self._next = len(self._blocks)
            self._failed()

    def _skip_to(self, start: int) -> None:
        unwanted = memoryview(bytearray(_SKIP_BYTES if start > self._next else 0))
        for block in self._blocks[self._next : start]:
            self._next += 1
            for offset in range(0, block.num_bytes, _SKIP_BYTES):
                self._connection.read_into(unwanted[: block.num_bytes - offset])


@dataclass(slots=True)
class _Store:
    request: StoreBlocks
    blocks: list[bytearray]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blocks))


class _Storing:
    """The thread of one link: connects, and sends what is to be stored."""

    def __init__(self, dial: Callable[[], Connection | None], member: str) -> None:
        self._dial, self._member = dial, member
        self._todo: queue.SimpleQueue[_Store | str] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._made: deque[Connection] = deque(maxlen=1)
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._thread: threading.Thread | None = None

    def connect(self) -> None:
        if not self._made:
            self._do("connect")

    def take_connection(self) -> Connection | None:
        return self._made.popleft() if self._made else None

    def put(
        self,
        namespace: bytes,
        keys: tuple[bytes, ...],
        positions: tuple[int, ...],
        sources: Sequence[memoryview],
        sums: Sequence[int] | None,
        form: int,
    ) -> int:
        """Takes copies: what is stored may be overwritten where it is before it has left. Returns how many."""
        count = 0
        with self._lock:
            for source in sources[: cache_wire.MAX_KEYS]:
                if self._num_bytes + source.nbytes > _STORING_BYTES:
                    break
                self._num_bytes += source.nbytes
                count += 1
        blocks = [bytearray(source) for source in sources[:count]]
        named = [checksum(memoryview(block)) for block in blocks]
        if sums is not None:
            good = next((i for i, (ours, theirs) in enumerate(zip(named, sums, strict=False)) if ours != theirs), count)
            self._sent(sum(map(len, blocks[good:])))
            blocks, named, count = blocks[:good], named[:good], good
        if count:
            sizes = tuple(map(len, blocks))
            names = keys[:count], positions[:count]
            self._do(_Store(StoreBlocks(self._member, namespace, *names, form, sizes, tuple(named)), blocks))
        return count

    def close(self) -> None:
        self._do("end")

    def _do(self, what: _Store | str) -> None:
        if self._thread is None:
            if what == "end":
                return
            self._thread = threading.Thread(target=self._main, daemon=True, name="tripool-store")
            self._thread.start()
        self._todo.put(what)

    def _sent(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes

    def _main(self) -> None:
        while (what := self._todo.get()) != "end":
            if isinstance(what, _Store):
                try:
                    self._store(what)
                except (OSError, msgspec.DecodeError):
                    self._drop()
                finally:
                    self._sent(what.num_bytes)
            elif not self._made and (connection := self._dial()) is not None:
                self._made.append(connection)
        self._drop()
        with contextlib.suppress(IndexError):
            self._made.popleft().close()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _store(self, what: _Store) -> None:
        self._connection = connection = self._connection or self._dial()
        if connection is None:
            return
        connection.timeout(_PROGRESS_S * 2)
        connection.send(what.request)
        taken = connection.receive(ANSWERS)
        if not isinstance(taken, Taken) or max(taken.positions, default=0) >= len(what.blocks):
            raise msgspec.DecodeError("not an answer to that")
        if taken.positions:
            connection.write([memoryview(what.blocks[position]) for position in taken.positions])
            if not isinstance(connection.receive(ANSWERS), Data):
                raise msgspec.DecodeError("not an answer to that")
