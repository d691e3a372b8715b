"""A host's server in a thread of the test, with a run folder of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tripool.hosts.directory import DirectoryFile, OwnHost, write_directory
from tripool.hosts.fetch import Fetcher
from tripool.hosts.leader import Leader, SharedModel, write_models
from tripool.hosts.server import HostServer
from tripool.hosts.wire import Directory, Host
from tripool.messages import WorkerId

TOKEN = "a-token-that-is-long-enough"


@dataclass(frozen=True)
class Running:
    own: OwnHost
    folder: Path
    address: str
    server: HostServer

    def known_to(self, folder: Path, name: str = "other") -> OwnHost:
        """Makes another host's run folder, whose processes know this one; returns what that host knows of itself."""
        folder.mkdir(exist_ok=True)
        own = OwnHost(name, self.own.token, self.own.trusted, join=self.address)
        own.write(folder)
        here = Host(self.own.name, self.address, self.own.members)
        write_directory(folder, Directory((here, own.host)))
        return own


@contextmanager
def fetcher(folder: Path, own: OwnHost) -> Iterator[None]:
    """The part of a host's server that brings KV for its own workers."""
    found = Fetcher(folder, own, DirectoryFile(folder))
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        found.close()
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def host_server(
    folder: Path,
    *,
    trusted: bool = False,
    models: Sequence[SharedModel] = (),
    members: dict[str, tuple[str, ...]] | None = None,
    name: str = "server",
    address: str = "127.0.0.1",
) -> Iterator[Running]:
    folder.mkdir(exist_ok=True)
    write_models(folder, tuple(models))
    own = OwnHost(name, TOKEN, trusted, members=members or {})
    own.write(folder)
    stopped = threading.Event()
    with socket.create_server((address, 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        server = HostServer(folder, listener, WorkerId("host-server", 1), own, Leader(folder))
        thread = threading.Thread(target=server.run, args=(lambda: not stopped.is_set(),), daemon=True)
        thread.start()
        try:
            yield Running(own, folder, address, server)
        finally:
            stopped.set()
            thread.join(10)
            assert not thread.is_alive()
