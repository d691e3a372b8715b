"""Which hosts a run has: kept by the server's host from what they tell, and read by every process from its run folder.

`Hosts` is pure. The files are written by the host's own server process: `host.json` once, `hosts.json` at every change.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tripool.control.topology import Machine
from tripool.hosts.keys import HostKeys
from tripool.hosts.wire import Directory, Host, TransferName
from tripool.messages import Role

PRESENT_S = 0.5
"""How often a host says that it is there."""
SILENCE_S = 3.0
"""After this time without a word it is not: its cache members belong to no host any more."""
RESERVED_S = 20.0
"""What was given to a host that has not said yet that it is there is kept from others for so long."""
_MAX_HOSTS, _MAX_HOST_BYTES = 512, 4096
"""All of them fit into one message."""
_HOST, _HOSTS = "host.json", "hosts.json"


@dataclass(slots=True)
class Hosts:
    """`own` is the server's host, which is always there."""

    own: Host
    _others: dict[str, tuple[Host, float]] = field(default_factory=dict)

    def present(self, host: Host, now_s: float) -> bool:
        """It is there. Whether that is news."""
        if len(msgspec.msgpack.encode(host)) > _MAX_HOST_BYTES:
            return False
        if host.name == self.own.name or (host.name not in self._others and len(self._others) >= _MAX_HOSTS):
            return False
        known = self._others.get(host.name)
        host = replace(host, ranks=self._free(host))
        self._others[host.name] = host, now_s
        return known is None or known[0] != host

    def _free(self, host: Host) -> dict[str, tuple[int, ...]]:
        """Its ranks that no other host has: it may come back after they were given to another one."""
        others = [self.own, *(other for other, _ in self._others.values() if other.name != host.name)]
        taken = {(name, rank) for other in others for name, ranks in other.ranks.items() for rank in ranks}
        return {name: tuple(r for r in ranks if (name, r) not in taken) for name, ranks in host.ranks.items()}

    def expire(self, now_s: float) -> list[Host]:
        """Those that are silent for too long; they are forgotten."""
        gone = [host for host, heard_s in self._others.values() if now_s - heard_s > SILENCE_S]
        for host in gone:
            del self._others[host.name]
        return gone

    def reserve(self, host: Host, now_s: float) -> None:
        """It will be there: its processes are starting."""
        self._others[host.name] = host, now_s + RESERVED_S

    def others(self) -> list[Host]:
        return [host for host, _ in self._others.values()]

    def directory(self) -> Directory:
        """The server's own host first."""
        return Directory((self.own, *(host for host, _ in sorted(self._others.values(), key=lambda one: one[0].name))))

    def scarcer(self) -> Role:
        """The role that fewer workers of joined hosts have; decode where it is even: it is the one that runs longer."""
        count = Counter(role for host, _ in self._others.values() for role in host.roles)
        return "prefill" if count["prefill"] < count["decode"] else "decode"


class OwnHost(msgspec.Struct, frozen=True):
    """What the processes of a host know of it. The file is as private as the run folder: it holds the token."""

    name: str
    token: str
    trusted: bool
    address: str = ""
    """Where others reach it; empty: they do not, or at the address at which they joined."""
    join: str = ""
    """Where it has joined; empty: it is the server's own."""
    members: dict[str, tuple[str, ...]] = {}
    """Its cache members, by model."""
    roles: tuple[Role, ...] = ()
    links: tuple[str, ...] = ()
    """Its other addresses."""
    transfer: TransferName = "tcp"
    """How KV gets from host to host; the same on all."""
    second_copy: bool = False
    """Whether cached blocks that are read often are stored on two hosts."""
    machine: Machine = Machine()
    ranks: dict[str, tuple[int, ...]] = {}

    @property
    def keys(self) -> HostKeys:
        return HostKeys(self.token, self.trusted)

    @property
    def host(self) -> Host:
        return Host(self.name, self.address, self.members, self.roles, self.links, self.machine, self.ranks)

    def write(self, folder: Path) -> None:
        _write(folder / _HOST, msgspec.json.encode(self))


def read_own(folder: Path) -> OwnHost | None:
    """None: this run is of one machine."""
    try:
        return msgspec.json.decode((folder / _HOST).read_bytes(), type=OwnHost)
    except FileNotFoundError:
        return None


def write_directory(folder: Path, directory: Directory) -> None:
    _write(folder / _HOSTS, msgspec.json.encode(directory))


def _write(path: Path, data: bytes) -> None:
    new = path.with_suffix(".next")
    new.touch(0o600)
    new.write_bytes(data)
    new.replace(path)


class DirectoryFile:
    """The directory of this host's run folder; `changed` costs a look at the file's time."""

    def __init__(self, folder: Path) -> None:
        self._path, self._seen = folder / _HOSTS, (0, 0)
        self.hosts: tuple[Host, ...] = ()

    def changed(self) -> bool:
        try:
            found = os.stat(self._path)
            seen = found.st_ino, found.st_mtime_ns  # replaced as a whole; the number of a file may come again
            if seen == self._seen:
                return False
            self.hosts = msgspec.json.decode(self._path.read_bytes(), type=Directory).hosts
        except (OSError, msgspec.DecodeError):
            return False
        self._seen = seen
        return True

    def describe(self) -> list[dict[str, Any]]:
        """As `tripool status` shows them; none on one machine."""
        self.changed()
        return [
            {
                "host": host.name,
                "address": host.address,
                "roles": host.roles,
                "cache": sum(host.members.values(), ()),
                "ranks": host.ranks,
                "machine": msgspec.to_builtins(host.machine),
            }
            for host in self.hosts
        ]

    def address_of(self, name: str) -> str:
        """Empty: there is no such host, or it cannot be reached."""
        self.changed()
        return next((host.address for host in self.hosts if host.name == name), "")

    def links_of(self, name: str) -> tuple[str, ...]:
        """All of its addresses, the one that is sure to be reached first."""
        self.changed()
        return next((tuple(dict.fromkeys(filter(None, (host.address, *host.links))))
                     for host in self.hosts if host.name == name), ())  # fmt: skip

    def member_address(self, member: str) -> str:
        self.changed()
        return next((host.address for name, host in self.members(None).items() if name == member), "")

    def host_of_member(self, member: str) -> str:
        return next((host.name for name, host in self.members(None).items() if name == member), "")

    def members(self, model: str | None) -> dict[str, Host]:
        """Cache members and their hosts; None: of all models."""
        return {
            member: host
            for host in self.hosts
            for name, members in host.members.items()
            if model is None or name == model
            for member in members
        }
