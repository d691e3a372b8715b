"""Hosts in virtual time: which process runs on which, and the paths between them, which faults cut or slow down.

What is on a path that is cut waits, and arrives in order when the cut is over, as over a connection that stays open.
The gateway is on host 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

GATEWAY_HOST = 0

Path = tuple[int, int]
"""From a host to a host; to itself: what its supervisor does there."""


@dataclass(slots=True)
class _State:
    num_cuts: int = 0
    delays_s: list[float] = field(default_factory=list)
    held: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)


class Hosts:
    """`host_of`: by name of a worker or cache member; those that are not named run on the gateway's host."""

    def __init__(self, num_hosts: int = 1, host_of: Mapping[str, int] | None = None) -> None:
        self.num_hosts, self._host_of = num_hosts, host_of or {}
        self._states: dict[Path, _State] = {}
        self.seen: Counter[str] = Counter()

    def of(self, name: str) -> int:
        return self._host_of.get(name, GATEWAY_HOST)

    def between(self, one: int, other: int) -> list[Path]:
        return [(one, other), (other, one)]

    def around(self, host: int) -> list[Path]:
        """All that a host is part of, its own first."""
        others = [other for other in range(self.num_hosts) if other != host]
        return [(host, host), *(path for other in others for path in self.between(host, other))]

    def delay_s(self, start: int, end: int) -> float:
        """Beyond the usual time."""
        state = self._states.get((start, end))
        return max(state.delays_s, default=0.0) if state is not None else 0.0

    def carry(self, start: int, end: int, action: Callable[..., None], *args: Any) -> None:
        """At once; while the path is cut, when it is mended."""
        state = self._states.get((start, end))
        if state is not None and state.num_cuts:
            state.held.append((action, args))
            self.seen["held by a cut"] += 1
        else:
            action(*args)

    # ---- for faults -------------------------------------------------------------------------------------------------

    def cut(self, paths: Iterable[Path]) -> None:
        for path in paths:
            self._states.setdefault(path, _State()).num_cuts += 1

    def mend(self, paths: Iterable[Path]) -> None:
        for path in paths:
            state = self._states[path]
            state.num_cuts -= 1
            while state.held and not state.num_cuts:
                action, args = state.held.pop(0)
                action(*args)

    def slow(self, paths: Iterable[Path], delay_s: float) -> None:
        for path in paths:
            self._states.setdefault(path, _State()).delays_s.append(delay_s)

    def hasten(self, paths: Iterable[Path], delay_s: float) -> None:
        for path in paths:
            self._states[path].delays_s.remove(delay_s)
