"""Whether the system of another host is still there, by its acknowledgements. Pure.

A process that computes or waits for a core may say nothing for a second and is well; its system acknowledges what it is
sent all the same. So a link is known to be cut, or a host to have vanished, long before silence of a process says
anything, and in either direction: an acknowledgement needs both.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALLOWED_S = 0.25
"""Longer than any system delays an acknowledgement."""
_TRIPS = 2.0
_LONGEST_LOOK_S = 0.04
"""More than that between two looks is time in which this side did not run, and says nothing about the other."""


@dataclass(slots=True)
class Silence:
    """Of one connection, which is looked at all the time. Times are those of any clock that does not go back."""

    _looked_s: float | None = None
    _lasted_s: float = 0.0

    def look(self, num_under_way: int, acknowledged_s: float, round_trip_s: float, now_s: float) -> bool:
        """Whether the other system is gone. `acknowledged_s`: how long ago it acknowledged something."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if not num_under_way or acknowledged_s <= passed_s:
            self._lasted_s = 0.0
        else:
            self._lasted_s += min(passed_s, _LONGEST_LOOK_S)
        return self._lasted_s > _ALLOWED_S + _TRIPS * round_trip_s
