"""The ranks that a joined host has of an instance, whose map the server's own host makes.

The host server tells that host which ranks are there (it reads the file that is written here), and writes the maps that
come back. A rank that a map has named and that the next one does not, or whose map was taken away because the server's
host is silent, has been given up by the others: its process is ended, and its next one enters anew.

A server that was started again counts its maps from 1. What an earlier one's maps have left in the shared memory, above
all fences, would make requests under the new ones look old: it is cleared when no rank is left.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from tripool.control.instance import map_file, slabs_file
from tripool.experts import ExpertMap
from tripool.experts.exchange import SharedView
from tripool.experts.layout import Layout
from tripool.experts.slabs import attach_slabs, create_slabs


def present_file(folder: Path, instance: str) -> Path:
    return folder / f"{instance}.present"


def read_present(file: Path) -> dict[int, int]:
    """Rank -> number of its process, which no other one has."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, int])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


class JoinedInstance:
    def __init__(self, name: str, folder: Path, layout: Layout) -> None:
        create_slabs(slabs_file(folder, name), layout)
        self._layout, self._memory = attach_slabs(slabs_file(folder, name))
        self.name, self._file, self._map_file = name, present_file(folder, name), map_file(folder, name)
        self._present: dict[int, int] = {}
        self._named: set[int] = set()
        """Ranks that a map has named since they entered."""
        self._seen: tuple[int, int] | None = None
        self._gone: frozenset[int] | None = None
        """Of the newest map; None: there is none."""
        self.epoch = 0
        self._stale = False
        """The next map may be of another server."""

    def enter(self, rank: int) -> bool:
        self._present[rank] = secrets.randbits(62) | 1
        self._write()
        return False

    def leave(self, rank: int) -> bool:
        self._named.discard(rank)
        if self._present.pop(rank, None) is not None:
            self._write()
        if self._stale and not self._present:
            self._clear()
        return False

    def is_there(self, rank: int, map_epoch: int) -> bool:
        """As for an `Instance`; ranks enter by other hosts' maps here, so a report under an older one says nothing."""
        return map_epoch == self.epoch

    def balance(self) -> bool:
        return False

    def outdated(self) -> list[int]:
        self._read()
        lost = [rank for rank in self._named if self._gone is None or rank in self._gone]
        if self._gone is not None:
            self._named |= self._present.keys() - self._gone
        return lost

    def _read(self) -> None:
        try:
            found = self._map_file.stat()
            if (found.st_ino, found.st_mtime_ns) != self._seen:
                new = ExpertMap.decode(self._map_file.read_bytes())
                self._stale = self._stale or new.epoch < self.epoch
                self._seen, self.epoch, self._gone = (found.st_ino, found.st_mtime_ns), new.epoch, new.gone
        except FileNotFoundError:
            self._stale = self._stale or self._gone is not None
            self._seen, self._gone = None, None

    def _clear(self) -> None:
        """Doorbells and fences; who sleeps on which signal stays."""
        self._memory[self._layout.dispatch_bells : self._layout.routed] = 0
        for rank in range(self._layout.ranks):
            SharedView(self._layout, self._memory).fence(rank)[0] = 0
        self._stale = False

    def _write(self) -> None:
        new = self._file.with_suffix(".next-present")
        new.write_bytes(msgspec.json.encode(self._present))
        new.replace(self._file)
