"""Traffic classes: guaranteed shares of a link, and how much bulk may be under way on a connection. Pure.

| class | carries | guaranteed |
|---|---|---|
| memory | cached blocks and expert rows: a worker waits for each | 0.7 |
| service | messages and weights | 0.2 |
| transfer | KV from prefill to decode | 0.1 |

A class that is alone has the whole link. Together, a class of the table sends before those below it, which get no less
than their share. A class that had the link to itself has had its share of the next 30 ms: a cache read that takes no
longer has the link to itself, too. Small messages of the service class never wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Traffic(IntEnum):
    """In order of precedence."""

    MEMORY = 0
    SERVICE = 1
    TRANSFER = 2


SHARES: Mapping[Traffic, float] = {Traffic.MEMORY: 0.7, Traffic.SERVICE: 0.2, Traffic.TRANSFER: 0.1}
_FIRST_GUESS = 125e6
"""Bytes per second, of a link that nothing has been sent over yet."""
_LEAST_BYTES_PER_S = 1.25e6
"""A link over which nothing but a word now and then was sent is not that slow."""
_BIN_S, _NUM_BINS = 0.1, 50
"""A link carries what it carried in the best of so many stretches of time."""
_CHUNK_S = 5e-4
_AHEAD_S = 0.03
"""What a class sends without need to wait counts against its share of so much time to come."""
_LEAST_CHUNK, _MOST_CHUNK = 2**16, 2**20


@dataclass(slots=True)
class LinkSchedule:
    """Which class may send next on one link. Times are those of any clock that does not go back."""

    shares: Mapping[Traffic, float] = field(default_factory=lambda: SHARES)
    _sending: dict[Traffic, int] = field(default_factory=lambda: dict.fromkeys(Traffic, 0))
    _credit: dict[Traffic, float] = field(default_factory=lambda: dict.fromkeys(Traffic, 0.0))
    """Bytes that a class may send although one before it has something to send."""
    _until_s: dict[Traffic, float] = field(default_factory=lambda: dict.fromkeys(Traffic, 0.0))
    """When what was handed over of a class has left."""
    _counted_s: float = 0.0
    _bins: dict[int, int] = field(default_factory=dict)
    _newest: int = 0
    bytes_per_s: float = _FIRST_GUESS
    """What the link is known to carry."""

    @property
    def chunk_bytes(self) -> int:
        """What is sent at once: little enough that who comes next waits half a millisecond."""
        return int(min(max(self.bytes_per_s * _CHUNK_S, _LEAST_CHUNK), _MOST_CHUNK))

    def begin(self, traffic: Traffic, now_s: float) -> None:
        """There is something to send."""
        self._count(now_s)
        self._sending[traffic] += 1

    def end(self, traffic: Traffic, now_s: float, num_left: int = 0) -> None:
        """All of it is handed over to the system, which has so many bytes left to send."""
        self._count(now_s)
        self._sending[traffic] -= 1
        self._until_s[traffic] = max(self._until_s[traffic], now_s + num_left / self.bytes_per_s)

    def wait_s(self, traffic: Traffic, num_bytes: int, now_s: float) -> float:
        """How long this class has to wait before it may send so much; 0: not at all."""
        self._count(now_s)
        if not self._is_behind(traffic, now_s) or self._credit[traffic] >= num_bytes:
            return 0.0
        return (num_bytes - self._credit[traffic]) / (self.shares[traffic] * self.bytes_per_s)

    def sent(self, traffic: Traffic, num_bytes: int, now_s: float) -> None:
        self._count(now_s)
        # Who had the link to itself has used its credit up, and that of the near future: it waits when another comes.
        ahead = -self.shares[traffic] * self.bytes_per_s * _AHEAD_S
        least = float("-inf") if self._is_behind(traffic, now_s) else ahead
        self._credit[traffic] = max(self._credit[traffic] - num_bytes, least)
        number = int(now_s / _BIN_S)
        if number != self._newest:
            self._newest = number
            self._bins = {known: count for known, count in self._bins.items() if known > number - _NUM_BINS}
            carried = max(self._bins.values()) / _BIN_S if self._bins else self.bytes_per_s
            self.bytes_per_s = max(carried, _LEAST_BYTES_PER_S)
        self._bins[number] = self._bins.get(number, 0) + num_bytes

    def check(self) -> None:
        """Raise if an invariant is broken."""
        assert all(count >= 0 for count in self._sending.values()), "more have ended than begun"
        assert all(credit <= _MOST_CHUNK for credit in self._credit.values()), "credit without bound"
        assert abs(sum(self.shares.values()) - 1) < 1e-9, "shares of more or less than a link"

    def _is_behind(self, traffic: Traffic, now_s: float) -> bool:
        for other in Traffic:
            if other is traffic:
                return False
            if self._sending[other] or self._until_s[other] > now_s:
                return True
        return False

    def _count(self, now_s: float) -> None:
        """No class saves more than a chunk: a share is one of the present."""
        passed_s = now_s - self._counted_s
        if passed_s <= 0.0:
            return
        self._counted_s, carried, most = now_s, passed_s * self.bytes_per_s, float(self.chunk_bytes)
        for traffic, share in self.shares.items():
            self._credit[traffic] = min(self._credit[traffic] + share * carried, most)


_QUEUE_US = 600.0
"""Time that bulk may add to the way of what is sent after it."""
_LEAST_WINDOW, _MOST_WINDOW = 2**15, 2**26


@dataclass(slots=True)
class BulkWindow:
    """How many bytes of bulk may be under way on a connection: as many as the link carries without a queue to speak of.

    The round trip of an idle link is known; what it is longer now is time in a queue. Below the goal the window grows,
    above it shrinks, at most once per round trip.
    """

    num_bytes: int = 2**19
    _changed_s: float = 0.0

    def heard(self, round_trip_us: float, least_us: float, now_s: float) -> None:
        if now_s < self._changed_s + round_trip_us / 1e6:
            return
        self._changed_s = now_s
        exact = (least_us + _QUEUE_US) / round_trip_us  # the window whose queue is as long as it may be
        factor = 1.25 if round_trip_us - least_us < _QUEUE_US / 2 else min(max(0.7, exact), 1.25)
        self.num_bytes = int(min(max(self.num_bytes * factor, _LEAST_WINDOW), _MOST_WINDOW))
