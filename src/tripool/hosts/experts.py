"""The exchange of experts between hosts: one connection in each direction to every host that has ranks of an instance.

A thread sends what `experts/native_forward.py` takes out of this host's shared memory; another puts what comes into it.
Whatever is longer than a doorbell is copied by compiled code; the interpreter sees one buffer per message.

| frame | contents |
|---|---|
| RECORDS | requests, answers and counts, as `experts/forward.py` describes them |
| BEAT | which ranks of the sender run, and whether it hears the receiver; ten times a second |
| MAP | from the server's own host: the expert map |
| SILENT | a rank of the receiver, or for the server's own host any rank, has left a request unanswered |

A host whose system acknowledges nothing for a quarter of a second, whose process is silent for `SILENCE_S`, or whose
connection ends, is gone with its ranks: the server's own host raises the map's epoch, and owners send to other ranks
what was not answered. A joined host that does not hear the server's own
takes its map away, which ends its ranks (`control/joined_instance.py`).
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from tripool.control.instance import map_file, slabs_file, write_map
from tripool.control.joined_instance import present_file, read_present
from tripool.errors import ExpertMapError
from tripool.experts import ExpertMap
from tripool.experts.exchange import SharedView
from tripool.experts.forward import routed_record
from tripool.experts.native_forward import NativeForwarder
from tripool.experts.slabs import attach_slabs
from tripool.hosts import wire
from tripool.hosts.connection import MAX_MESSAGE_BYTES, Connection, dial
from tripool.hosts.directory import DirectoryFile, OwnHost
from tripool.hosts.errors import HostError
from tripool.hosts.silence import Silence
from tripool.messages import AnyMessage, RemoteRank, SilentRank, strictly

_LOG = logging.getLogger("tripool.hosts")
SILENCE_S = 1.0
"""Of a host, before its ranks are given up. A process that ends closes its connections at once."""
_BEAT_S, _COUNTS_S, _LOOK_S, _AGAIN_S = 0.1, 0.5, 0.02, 0.1
_DIAL_S = 2.0
_FRAME = struct.Struct("<2I")
RECORDS, BEAT, MAP, SILENT = 1, 2, 3, 4


class Beat(msgspec.Struct, frozen=True, array_like=True):
    hears: bool
    present: dict[int, int]
    """Rank -> number of its process."""


_BEATS: msgspec.msgpack.Decoder[Beat] = msgspec.msgpack.Decoder(Beat)
_SILENT: msgspec.msgpack.Decoder[SilentRank] = msgspec.msgpack.Decoder(SilentRank)


class ExpertLinks:
    """All links of a host. `tell`: sends a message to this host's supervisor."""

    def __init__(self, folder: Path, own: OwnHost, tell: Callable[[AnyMessage], object]) -> None:
        self._folder, self._own, self._tell = folder, own, tell
        self._links: dict[tuple[str, str], Link] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="tripool-experts", daemon=True).start()

    def _follow(self) -> None:
        """Open a link to each host that comes, and close those of hosts that are gone."""
        directory, again_s = DirectoryFile(self._folder), 0.0
        while not self._closed.wait(_LOOK_S):
            tell = time.monotonic() >= again_s
            if tell:
                again_s = time.monotonic() + _AGAIN_S
                if directory.changed():
                    self._update(directory.hosts)
            with self._lock:
                links = list(self._links.values())
            for link in links:
                link.look()
                if tell:
                    link.tell_present()
        with self._lock:
            for link in self._links.values():
                link.close()

    def close(self) -> None:
        self._closed.set()

    def _update(self, hosts: tuple[wire.Host, ...]) -> None:
        leader = hosts[0].name
        wanted = {
            (instance, host.name): host
            for host in hosts
            for instance in self._own.ranks
            if host.name != self._own.name and host.ranks.get(instance) and host.address
        }
        own = next((host for host in hosts if host.name == self._own.name), None)
        if own is not None and own.ranks != self._own.ranks:
            _LOG.warning("the ranks of this host were given to another: start it again", extra={"host": own.name})
        with self._lock:
            for key, link in list(self._links.items()):
                if wanted.get(key) != link.peer:
                    self._links.pop(key).close()
            for key, host in wanted.items():
                if key not in self._links:
                    self._links[key] = Link(self._folder, self._own, host, key[0], self._tell, leader == host.name)
                    _LOG.info("ranks of another host", extra={"instance": key[0], "host": host.name})

    def silent(self, report: SilentRank) -> None:
        """Tell the host of a silent rank, and the server's own."""
        with self._lock:
            for link in self._links.values():
                concerned = link.to_leader or report.rank in link.peer.ranks[link.instance]
                if link.instance == report.instance and concerned:
                    link.report(report)

    def serve(self, connection: Connection, request: wire.OpenExchange) -> None:
        with self._lock:
            link = self._links.get((request.instance, request.host))
        if link is None:
            connection.send(wire.No("exchange", "this host does not know of ranks there yet", "try again"))
            return
        connection.send(wire.Data())
        link.receive(connection)


class Link:
    """To one host, for one instance. `to_leader`: the other host is the server's own."""

    def __init__(
        self,
        folder: Path,
        own: OwnHost,
        peer: wire.Host,
        instance: str,
        tell: Callable[[AnyMessage], object],
        to_leader: bool,
    ) -> None:
        self.peer, self.instance, self.to_leader = peer, instance, to_leader
        self._own, self._tell = own, tell
        self._leads = not own.join
        self._map_file, self._present_file = map_file(folder, instance), present_file(folder, instance)
        layout, memory = attach_slabs(slabs_file(folder, instance))
        self._view = SharedView(layout, memory)
        self._here = [rank in own.ranks[instance] for rank in range(layout.ranks)]
        there = [rank in peer.ranks[instance] for rank in range(layout.ranks)]
        self._forwarder = NativeForwarder(layout, memory, self._here, there)
        self._reports: queue.SimpleQueue[SilentRank] = queue.SimpleQueue()
        self._writing = threading.Lock()
        """Of this host's memory: a connection that was replaced must not write after its successor."""
        self._session, self._hears = 0, False
        self._watched: tuple[Connection, Silence] | None = None
        """What this host sends over."""
        self._present: dict[int, int] = {}
        self._closed = False
        threading.Thread(target=self._send_always, name=f"tripool-to-{peer.name}", daemon=True).start()

    def close(self) -> None:
        """Its memory stays mapped: threads may still be using it for a moment."""
        self._closed = True
        with self._writing:
            self._session += 1
        self._lost()

    def look(self) -> None:
        """Give the other host up once its system is gone, or the way there or back is."""
        watched = self._watched
        if watched is None:
            return
        connection, silence = watched
        try:
            found = connection.acknowledged()
        except OSError:  # it has ended meanwhile
            return
        if found is not None and silence.look(*found, time.monotonic()):
            self._watched = None
            connection.shut()
            with self._writing:
                self._session += 1
            self._give_up("its system acknowledges nothing")

    def report(self, silent: SilentRank) -> None:
        self._reports.put(silent)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _send_always(self) -> None:
        while not self._closed:
            try:
                connection = dial(self.peer.address, self._own.keys, timeout_s=_DIAL_S)
            except HostError:
                time.sleep(_AGAIN_S)
                continue
            with suppress(OSError, msgspec.DecodeError):
                connection.timeout(_DIAL_S)
                connection.send(wire.OpenExchange(self.instance, self._own.name))
                if isinstance(connection.receive(wire.ANSWERS), wire.Data):
                    connection.timeout(SILENCE_S)
                    self._forwarder.restart()
                    self._watched = connection, Silence()
                    self._send(connection)
            self._watched = None
            connection.close()
            time.sleep(_AGAIN_S)

    def _send(self, connection: Connection) -> None:
        look_s = beat_s = counts_s = 0.0
        beat, seen = None, None
        while not self._closed:
            frame = self._forwarder.take(_LOOK_S, _FRAME.size)
            if len(frame) > _FRAME.size:
                _FRAME.pack_into(frame, 0, RECORDS, len(frame) - _FRAME.size)
                connection.write([frame])
            now_s = time.monotonic()
            if now_s < look_s:
                continue
            look_s = now_s + _LOOK_S
            new = Beat(self._hears, read_present(self._present_file))
            if new != beat or now_s >= beat_s + _BEAT_S:
                beat, beat_s = new, now_s
                _write(connection, BEAT, msgspec.msgpack.encode(new))
            if self._leads:
                seen = self._send_map(connection, seen)
            elif self.to_leader and now_s >= counts_s + _COUNTS_S:
                counts_s = now_s
                for rank in self._own.ranks[self.instance]:
                    _write(connection, RECORDS, routed_record(self._view, rank))
            while not self._reports.empty():
                _write(connection, SILENT, msgspec.msgpack.encode(self._reports.get()))

    def _send_map(self, connection: Connection, seen: tuple[int, int] | None) -> tuple[int, int] | None:
        try:
            found = self._map_file.stat()
            if (found.st_ino, found.st_mtime_ns) != seen:
                _write(connection, MAP, self._map_file.read_bytes())
        except FileNotFoundError:  # no rank of this host is there yet
            return seen
        return found.st_ino, found.st_mtime_ns

    # ---- receiving --------------------------------------------------------------------------------------------------

    def receive(self, connection: Connection) -> None:
        """Until the connection ends, is silent, or is replaced by another."""
        with self._writing:
            self._session += 1
            session = self._session
        buffer = np.empty(self._forwarder.max_bytes, np.uint8).data
        head = memoryview(bytearray(_FRAME.size))
        connection.timeout(SILENCE_S)
        try:
            while not self._closed:
                connection.read_into(head)
                kind, size = _FRAME.unpack(head)
                if size > (len(buffer) if kind == RECORDS else MAX_MESSAGE_BYTES):
                    raise msgspec.DecodeError(f"a frame of {size} bytes")
                data = buffer[:size] if kind == RECORDS else memoryview(bytearray(size))
                connection.read_into(data)
                with self._writing:
                    if session != self._session:
                        return
                    self._take(kind, data)
        except (OSError, msgspec.DecodeError, ExpertMapError) as error:
            with self._writing:
                if session != self._session or self._closed:
                    return
            self._give_up(str(error))

    def _take(self, kind: int, data: memoryview) -> None:
        if kind == RECORDS:
            if not self._forwarder.put(data):
                raise msgspec.DecodeError("no records of this exchange")
        elif kind == BEAT:
            beat = strictly(_BEATS, data)
            self._hears = True
            present = beat.present if beat.hears else {}
            if present != self._present:
                self._present = present
                self.tell_present()
        elif kind == MAP and self.to_leader:
            found = ExpertMap.decode(bytes(data))
            layout = self._view.layout
            if (found.ranks, found.layers, found.experts) != (layout.ranks, layout.layers, layout.experts):
                raise msgspec.DecodeError("a map of another instance")
            write_map(self._map_file, bytes(data))
        elif kind == SILENT:
            self._tell(strictly(_SILENT, data))
        else:
            raise msgspec.DecodeError(f"a frame of kind {kind}")

    def tell_present(self) -> None:
        """Repeated: a message to the supervisor may be dropped."""
        if self._leads:
            for rank in self.peer.ranks[self.instance]:
                self._tell(RemoteRank(self.instance, rank, self._present.get(rank, 0)))

    def _give_up(self, reason: str) -> None:
        _LOG.warning("ranks lost", extra={"instance": self.instance, "host": self.peer.name, "reason": reason})
        self._lost()

    def _lost(self) -> None:
        self._hears, self._present = False, {}
        self.tell_present()
        if self.to_leader:
            self._map_file.unlink(missing_ok=True)


def _write(connection: Connection, kind: int, data: bytes) -> None:
    connection.write([memoryview(_FRAME.pack(kind, len(data)) + data)])
