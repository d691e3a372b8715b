"""Brings KV of other hosts into the memory of this host's decode workers. Part of the host's server process.

A worker asks over a local socket, with the slots of an arena of its own in which the blocks are to arrive; it hears
when they are there, checked. So receiving and decrypting costs no time of the thread that decodes, and a worker that
dies takes nothing along but its arena. Once this process has ended, nothing more is written anywhere.

A host may be reached over several links. Each has connections of its own, which take the next part of what is asked for
whenever they are free; what a link does not bring is asked for again over another one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from tripool.cache.arena import Arena
from tripool.errors import ArenaError
from tripool.hosts.connection import Connection, dial
from tripool.hosts.directory import DirectoryFile, OwnHost
from tripool.hosts.errors import HostError
from tripool.hosts.wire import ANSWERS, Data, Meet, ReadSlots
from tripool.local_channel import LocalChannel
from tripool.messages import Checksum, FileName, Name, Natural, Positive, Small

_SOCKET = "host.sock"
MAX_BLOCKS = 4096
"""In one request."""
_CONNECTIONS = 2
"""To one address of a host."""
_AHEAD = 2
"""Requests under way on each of them."""
_PROGRESS_S, _OTHER_LINK_S = 3.0, 0.25
"""Longest time without a byte: a link that is cut for less loses nothing. The second where there is another link."""
_IDLE_S = 30.0
_TRY_LINK_S = 1.0
"""After this time a link that failed is tried again."""
_TRIES = 3
_NICE = 5
_BACKLOG = 64
_FEW = msgspec.Meta(max_length=MAX_BLOCKS)


class Fetch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of a worker of this host."""

    number: Natural
    host: Name
    arena: FileName
    block_bytes: Positive
    slots: Annotated[tuple[Small, ...], _FEW]
    checksums: Annotated[tuple[Checksum, ...], _FEW]
    into: FileName
    into_slots: Annotated[tuple[Small, ...], _FEW]


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What has not begun need not begin; `Fetched` is still reported."""

    numbers: tuple[Natural, ...]


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """Nothing is written to its slots any more. `good`: they hold what was asked for."""

    number: Natural
    good: bool


_requests: msgspec.msgpack.Decoder[Fetch | Cancel] = msgspec.msgpack.Decoder(Fetch | Cancel)
FETCHED: msgspec.msgpack.Decoder[Fetched] = msgspec.msgpack.Decoder(Fetched)


def fetch_address(folder: Path) -> Path:
    return folder / _SOCKET


@dataclass(slots=True, eq=False)
class Part:
    """Blocks that are asked for at once, and where they go."""

    request: ReadSlots
    checksums: Sequence[int]
    into: Sequence[memoryview]
    ended: Callable[[bool], None]
    """Called once."""
    cancelled: Callable[[], bool]
    tries: int = 0


class Fetcher:
    """For all workers of this host."""

    def __init__(self, folder: Path, own: OwnHost, directory: DirectoryFile) -> None:
        self._folder, self._own, self._directory = folder, own, directory
        self._sources: dict[str, Source] = {}
        self._clients: list[_Client] = []
        self._lock = threading.Lock()
        path = fetch_address(folder)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)

    def run(self) -> None:
        """Until `close`."""
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                client = _Client(self, end, self._folder)
                self._clients = [known for known in self._clients if not known.gone] + [client]
                threading.Thread(target=client.run, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for client in self._clients:
            client.shut()

    def fetch(self, host: str, part: Part) -> None:
        with self._lock:
            links = self._directory.links_of(host)
            if host not in self._sources:
                self._sources[host] = Source(host, self._own)
            source = self._sources[host]
        source.fetch(part, links)


class _Client:
    """A worker's connection."""

    def __init__(self, fetcher: Fetcher, end: socket.socket, folder: Path) -> None:
        self._fetcher, self._folder, self._end = fetcher, folder, end
        self._channel = LocalChannel(end)
        self._arenas: dict[str, Arena] = {}
        self._cancelled: set[int] = set()
        self.gone = False

    def run(self) -> None:
        try:
            while True:
                data = self._channel.receive(_IDLE_S)
                if data is None:
                    continue
                if not len(data):
                    break
                request = _requests.decode(data)
                if isinstance(request, Cancel):
                    self._cancelled |= set(request.numbers)
                else:
                    self._fetch(request)
        except (OSError, msgspec.DecodeError):
            pass
        finally:
            self.gone = True
            self._channel.close()

    def shut(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _fetch(self, request: Fetch) -> None:
        number = request.number
        into = self._views(request)
        if into is None:
            self._tell(number, False)
            return
        asked = ReadSlots(request.arena, request.block_bytes, request.slots)
        part = Part(
            asked, request.checksums, into, lambda good: self._tell(number, good),
            lambda: self.gone or number in self._cancelled,
        )  # fmt: skip
        self._fetcher.fetch(request.host, part)

    def _views(self, request: Fetch) -> list[memoryview] | None:
        if not 0 < len(request.slots) == len(request.checksums) == len(request.into_slots):
            return None
        if request.into not in self._arenas:
            try:
                self._arenas[request.into] = Arena.attach(self._folder / request.into, lazy=True)
            except (OSError, ArenaError):
                return None
        arena = self._arenas[request.into]
        if max(request.into_slots) >= arena.num_slots or request.block_bytes > arena.slot_bytes:
            return None
        return [arena.view(slot, request.block_bytes).data for slot in request.into_slots]

    def _tell(self, number: int, good: bool) -> None:
        self._cancelled.discard(number)
        try:
            self._channel.send(msgspec.msgpack.encode(Fetched(number, good)))
        except OSError:  # it does not read, or is gone: its end of the connection tells it
            self.gone = True
            self._channel.close()


class Source:
    """Another host: its links, and the parts that are to be brought over them."""

    def __init__(self, host: str, own: OwnHost) -> None:
        self._host, self._own = host, own
        self._parts: deque[Part] = deque()
        self._changed = threading.Condition()
        self._links: dict[str, int] = {}
        """How many threads each address has."""
        self._connected: Counter[str] = Counter()
        """Connections of each address."""
        self._failed_s: dict[str, float] = {}
        """When a link could not be used."""

    def fetch(self, part: Part, links: Sequence[str]) -> None:
        now_s = time.monotonic()
        with self._changed:
            usable = [link for link in links if now_s > self._failed_s.get(link, -_TRY_LINK_S) + _TRY_LINK_S]
            if not usable and not any(self._links.values()):
                usable = list(links)  # none failed lately: try
            for link in usable:
                for _ in range(self._links.get(link, 0), _CONNECTIONS):
                    self._links[link] = self._links.get(link, 0) + 1
                    threading.Thread(target=self._main, args=(link,), daemon=True, name="tripool-kv").start()
            if not any(self._links.values()):
                part.ended(False)
                return
            self._parts.append(part)
            self._changed.notify_all()  # a thread that wakes up may have no connection yet

    # ---- one connection ---------------------------------------------------------------------------------------------

    def _main(self, link: str) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        asked: deque[Part] = deque()
        connection: Connection | None = None
        try:
            while self._is_wanted():
                if connection is None:
                    connection = self._connect(link)
                    self._connected[link] += 1
                try:
                    self._bring(connection, asked)
                    self._failed_s.pop(link, None)
                except (OSError, msgspec.DecodeError):
                    connection.close()
                    connection = None
                    self._connected[link] -= 1
                    self._put_back(asked)
        except HostError:
            self._failed_s[link] = time.monotonic()
        finally:
            if connection is not None:
                connection.close()
                self._connected[link] -= 1
            self._leave(link)

    def _is_wanted(self) -> bool:
        """Wait for something to do; False: there was nothing for a while."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._parts), _IDLE_S)

    def _leave(self, link: str) -> None:
        """Without any link nothing can be brought."""
        with self._changed:
            self._links[link] -= 1
            left = [] if any(self._links.values()) else list(self._parts)
            if left:
                self._parts.clear()
        for part in left:
            part.ended(False)

    def _connect(self, link: str) -> Connection:
        connection = dial(link, self._own.keys)
        try:
            connection.send(Meet(self._host))
            if not isinstance(connection.receive(ANSWERS), Data):
                raise HostError(f"{link} is another host", hint="it has left, or this address is not only its own")
        except (OSError, msgspec.DecodeError) as error:
            connection.close()
            raise HostError(f"{link} does not answer", hint="is the network between the hosts good?") from error
        except HostError:
            connection.close()
            raise
        return connection

    def _bring(self, connection: Connection, asked: deque[Part]) -> None:
        """Parts until there are none."""
        while True:
            while len(asked) < _AHEAD and (part := self._take()) is not None:
                asked.append(part)
                others = sum(count > 0 for count in self._connected.values()) > 1
                connection.timeout(_OTHER_LINK_S * 2**part.tries if others else _PROGRESS_S)
                connection.send(part.request)
            if not asked:
                return
            part = asked[0]
            good = self._receive(connection, part)
            asked.popleft()
            part.ended(good)

    def _take(self) -> Part | None:
        with self._changed:
            while self._parts:
                part = self._parts.popleft()
                if not part.cancelled():
                    return part
                part.ended(False)
        return None

    def _receive(self, connection: Connection, part: Part) -> bool:
        answer = connection.receive(ANSWERS)
        if not isinstance(answer, Data):
            return False  # it is not there: asking again would not help
        if answer.num_bytes != sum(view.nbytes for view in part.into):
            raise msgspec.DecodeError("another number of bytes")
        good = True
        for view, checksum in zip(part.into, part.checksums, strict=True):
            good &= connection.read_summed(view) == checksum
        return good

    def _put_back(self, asked: deque[Part]) -> None:
        """Those that failed come first again: they have waited longest."""
        while asked:
            part = asked.pop()
            part.tries += 1
            if part.tries < _TRIES:
                with self._changed:
                    self._parts.appendleft(part)
                    self._changed.notify_all()  # a thread that wakes up may have no connection yet
            else:
                part.ended(False)
