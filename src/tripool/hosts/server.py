"""The process of a host that other hosts talk to: relays workers' messages, and serves blocks and models.

A thread per connection. A peer that does not know the token is not heard; how many may try at once is bounded.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import get_args

import msgspec

from tripool.fabric.folder import coordinator_address, gateways_address, socket_path
from tripool.fabric.shared_memory import MappedArenas
from tripool.hosts import wire
from tripool.hosts.blocks import LocalBlocks
from tripool.hosts.connection import Connection, answer, dial
from tripool.hosts.directory import PRESENT_S, DirectoryFile, Hosts, OwnHost, write_directory
from tripool.hosts.errors import HostError
from tripool.hosts.experts import ExpertLinks
from tripool.hosts.fetch import Fetcher
from tripool.hosts.leader import Leader
from tripool.hosts.links import Bulk, Links
from tripool.hosts.relay import relay
from tripool.hosts.traffic import Traffic
from tripool.messages import WorkerId

_LOG = logging.getLogger("tripool.hosts")
_MAX_CONNECTIONS = 512
_MAX_GREETING = 64
"""Connections that have not proved yet that they know the token."""
_LOOK_S = 0.25
_IDLE_S = 3600.0
_REPLY_S = 4.0
_BULK_NICE = 5
"""Threads that send KV and weights yield to what computes tokens and carries them."""


class HostServer:
    """`leader`: what only the server's own host knows; None on a host that has joined it."""

    def __init__(
        self,
        folder: Path,
        listener: socket.socket,
        worker_id: WorkerId,
        own: OwnHost,
        leader: Leader | None = None,
        experts: ExpertLinks | None = None,
    ) -> None:
        """`experts`: the exchange of ranks with those of other hosts, if this host has such ranks."""
        self._experts = experts
        self._folder, self._listener, self._own, self._leader = folder, listener, own, leader
        self._blocks = LocalBlocks(folder, worker_id)
        self._hosts, self._links = Hosts(own.host), Links()
        self._lock = threading.Lock()
        self._greeting: dict[socket.socket, None] = {}
        """Who has not proved yet that it knows the token, oldest first."""
        self._num_open = 0
        write_directory(folder, self._hosts.directory())

    def run(self, still_wanted: Callable[[], bool]) -> None:
        self._listener.settimeout(_LOOK_S)
        fetcher = Fetcher(self._folder, self._own, DirectoryFile(self._folder))
        _start(fetcher.run)
        if self._own.join:
            _start(self._follow)
            for kind in get_args(wire.CoordinatorSocket):
                _start(self._relay_coordinator, kind)
        if self._experts is not None:
            self._experts.start()
        while still_wanted():
            with suppress(TimeoutError):
                self._accept()
            self._expire()
        fetcher.close()
        if self._experts is not None:
            self._experts.close()
        self._blocks.close()

    def _expire(self) -> None:
        with self._lock:
            gone = self._hosts.expire(time.monotonic())
            if gone:
                write_directory(self._folder, self._hosts.directory())
        for host in gone:
            _LOG.warning("host lost", extra={"host": host.name, "address": host.address})

    # ---- connections that come --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except TimeoutError:
            raise
        except OSError:  # it has gone already, or there are no more file descriptors
            time.sleep(_LOOK_S)
            return
        with self._lock:
            if self._num_open >= _MAX_CONNECTIONS:
                end.close()
                return
            if len(self._greeting) >= _MAX_GREETING:
                # Who knows the token proves it within milliseconds: the oldest is the least likely to.
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._greeting[end] = None
        _start(self._serve, end)

    def _serve(self, end: socket.socket) -> None:
        connection = None
        try:
            connection = answer(end, self._own.keys)
        except (OSError, HostError):
            pass
        finally:
            with self._lock:
                self._greeting.pop(end, None)
                self._num_open += connection is not None
            if connection is None:
                end.close()
        if connection is None:
            return
        try:
            self._answer_all(connection)
        except (OSError, msgspec.DecodeError):
            pass  # it has gone, or what it says makes no sense: its connection ends
        finally:
            connection.close()
            with self._lock:
                self._num_open -= 1

    def _answer_all(self, connection: Connection) -> None:
        arenas, polite = MappedArenas(self._folder), False
        bulk = Bulk(connection, self._links.of(connection))
        while True:
            connection.timeout(_IDLE_S)
            request = connection.receive(wire.REQUESTS)
            connection.timeout(_REPLY_S)
            if not polite and isinstance(request, (wire.ReadSlots, wire.ReadFile)):
                polite = True
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BULK_NICE)
            match request:
                case wire.ReadSlots():
                    self._blocks.read_slots(connection, request, arenas, bulk)
                case wire.FindBlocks():
                    with bulk.link.sending(Traffic.MEMORY, connection):
                        self._blocks.find(connection, request, bulk)
                case wire.StoreBlocks():
                    self._blocks.store(connection, request)
                case wire.AskMember():
                    self._blocks.ask(connection, request)
                case wire.TryHost(address):
                    connection.send(self._try(address))
                case wire.Meet(host):
                    met = host == self._own.name
                    connection.send(wire.Data() if met else wire.No("meet", "this is another host", "look again"))
                case wire.ToCoordinator(kind):
                    self._to_coordinator(connection, kind)
                    return
                case wire.OpenExchange() if self._experts is not None:
                    self._experts.serve(connection, request)
                    return
                case wire.OpenExchange():
                    connection.send(wire.No("exchange", "this host has no ranks", "try again"))
                case wire.Present(host):
                    connection.send(self._present(host))
                case _:
                    self._lead(connection, request, bulk)

    def _lead(self, connection: Connection, request: wire.Request, bulk: Bulk) -> None:
        if self._leader is None:
            connection.send(wire.No("join", "this host has joined a server itself", "join at the server's address"))
        elif isinstance(request, wire.Join):
            with self._lock:
                missing = self._leader.missing(self._own.host, self._hosts.others())
                scarcer = missing or self._hosts.scarcer()
            connection.send(self._leader.join(request, scarcer))
        elif isinstance(request, wire.JoinGateway):
            told = self._leader.serving(request)
            if isinstance(told, wire.No):
                connection.send(told)
            else:
                bulk.send(Traffic.SERVICE, wire.Data(len(told)), [memoryview(told)], _REPLY_S)
        elif isinstance(request, wire.TakeRanks):
            with self._lock:
                given = self._leader.take_ranks(request, self._own.host, self._hosts.others())
                if given.ranks:
                    host = msgspec.structs.replace(request.host, ranks={given.instance: given.ranks})
                    self._hosts.reserve(host, time.monotonic())
                    write_directory(self._folder, self._hosts.directory())
            connection.send(given)
        elif isinstance(request, wire.ReadFile):
            data = self._leader.read(request)
            if data is None:
                connection.send(wire.No("fetch", f"no such part of '{request.name}'", "start the server again"))
                return
            bulk.send(Traffic.SERVICE, wire.Data(len(data)), [memoryview(data)], _REPLY_S)

    def _present(self, host: wire.Host) -> wire.Answer:
        if self._leader is None:
            return wire.No("join", "this host has joined a server itself", "join at the server's address")
        with self._lock:
            if self._hosts.present(host, time.monotonic()):
                _LOG.info("host joined", extra={"host": host.name, "address": host.address})
                write_directory(self._folder, self._hosts.directory())
            return self._hosts.directory()

    def _try(self, address: str) -> wire.Answer:
        try:
            dial(address, self._own.keys).close()
        except HostError as error:
            return wire.No(error.step, error.message[:1024], error.hint[:1024])
        return wire.Data()

    def _to_coordinator(self, connection: Connection, kind: wire.CoordinatorSocket) -> None:
        """It may be starting again: its clients try until it is there."""
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.settimeout(_REPLY_S)
            local.connect(_path(self._folder, kind))
        except OSError:
            local.close()
            return
        connection.send(wire.Data())
        relay(local, connection)

    # ---- a host that joined -----------------------------------------------------------------------------------------

    def _relay_coordinator(self, kind: wire.CoordinatorSocket) -> None:
        """Workers and gateways of this host find the coordinator in their run folder, as on the server's own host."""
        path = _path(self._folder, kind)
        Path(path).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(_MAX_GREETING)
            while True:
                try:
                    local, _ = listener.accept()
                except OSError:  # it has gone already, or there are no more file descriptors
                    time.sleep(_LOOK_S)
                    continue
                _start(self._to_leader, local, kind)

    def _to_leader(self, local: socket.socket, kind: wire.CoordinatorSocket) -> None:
        try:
            connection = dial(self._own.join, self._own.keys)
        except HostError:
            time.sleep(_LOOK_S)  # who connected tries again at once
            local.close()
            return
        try:
            connection.send(wire.ToCoordinator(kind))
            if isinstance(connection.receive(wire.ANSWERS), wire.Data):
                relay(local, connection)
        except (OSError, msgspec.DecodeError):
            time.sleep(_LOOK_S)  # the coordinator is not there
        finally:
            local.close()
            connection.close()

    def _follow(self) -> None:
        """Say that this host is there, and learn which others are."""
        known, trouble = None, ""
        while True:
            try:
                connection = dial(self._own.join, self._own.keys)
                if trouble:
                    _LOG.info("server found again")
                trouble = ""
                try:
                    while True:
                        connection.timeout(_REPLY_S)
                        connection.send(wire.Present(self._own.host))
                        heard = connection.receive(wire.ANSWERS)
                        if isinstance(heard, wire.Directory) and heard.hosts and heard != known:
                            known = heard
                            write_directory(
                                self._folder, _seen_from_here(heard, self._own.join, connection.peer_address)
                            )
                        time.sleep(PRESENT_S)
                finally:
                    connection.close()
            except (OSError, msgspec.DecodeError, HostError) as error:
                said = str(error)
                if said != trouble:
                    trouble = said
                    _LOG.warning("server lost", extra={"reason": said})
                time.sleep(PRESENT_S)


def _path(folder: Path, kind: wire.CoordinatorSocket) -> str:
    return socket_path(coordinator_address(folder) if kind == "workers" else gateways_address(folder))


def _seen_from_here(directory: wire.Directory, join: str, met: str) -> wire.Directory:
    """The server's own host is where this one has reached it, by a name perhaps: it may listen at many addresses."""
    leader, *others = directory.hosts
    links = tuple(link for link in leader.links if link != met)
    return wire.Directory((msgspec.structs.replace(leader, address=join, links=links), *others))


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()
