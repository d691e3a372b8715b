"""The coordinator's log: records of what no gateway knows, and the state that they add up to at a standby. Pure.

A gateway holds each of its open requests with the tokens that its client has, and gives both to the next coordinator
(`held.py`). What is left is what concerns several requests or several gateways:

| record | without it |
|---|---|
| `Level` of a tenant's rate limit | a takeover would fill every bucket |
| `Given` to a tenant by the fair queue | a flooding tenant would start level with the others |
| `Trouble` of one request: workers lost with it and crashed by it | a request that crashes workers would get new ones |
| `KeptState` of an answer under an idempotency key (`kept_log.py`) | it would be computed, and charged, again |
| `Count`: usage that no gateway has logged yet | it would be logged never, or twice |
| whether the server is draining | a takeover would end that |

A record holds the newest values, so that any number of them adds up to the last one of each kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tripool.router.kept_log import KeptReplica
from tripool.router.kept_types import Count, KeptState, Name

_MAX_TROUBLES = 10_000


@dataclass(frozen=True, slots=True)
class Level:
    """Of a token bucket at a time."""

    tenant: str
    limit: str
    per_minute: float
    level: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens per weight that the fair queue of a model has given to a tenant, and the queue's level."""

    model: str
    tenant: str
    weight: float
    given: float
    level: float


@dataclass(frozen=True, slots=True)
class Trouble:
    request_id: str
    num_losses: int
    num_crashes: int


@dataclass(frozen=True, slots=True)
class Record:
    """What has changed since the last one; the first one of a log holds everything."""

    levels: tuple[Level, ...] = ()
    given: tuple[Given, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    kept: tuple[KeptState, ...] = ()
    removed: tuple[Name, ...] = ()
    """Kept answers that are forgotten."""
    counts: tuple[Count, ...] = ()
    counted: tuple[str, ...] = ()
    """Those that a gateway has logged."""
    draining: bool | None = None
    """None: as before."""

    def __bool__(self) -> bool:
        lists = (self.levels, self.given, self.troubles, self.kept, self.removed, self.counts, self.counted)
        return any(lists) or self.draining is not None


class Replica:
    """The sum of all records."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """The next record holds everything."""
        self._levels: dict[tuple[str, str], Level] = {}
        self._given: dict[tuple[str, str], Given] = {}
        self._troubles: OrderedDict[str, Trouble] = OrderedDict()
        self._kept, self._counts = KeptReplica(), dict[str, Count]()
        self._draining: bool | None = None

    def apply(self, record: Record) -> None:
        self._levels |= {(level.tenant, level.limit): level for level in record.levels}
        self._given |= {(given.model, given.tenant): given for given in record.given}
        for trouble in record.troubles:
            self._troubles[trouble.request_id] = trouble
            self._troubles.move_to_end(trouble.request_id)
        while len(self._troubles) > _MAX_TROUBLES:
            self._troubles.popitem(last=False)
        self._kept.apply(record.kept, record.removed)
        self._counts |= {count.id: count for count in record.counts}
        for count_id in record.counted:
            self._counts.pop(count_id, None)
        self._draining = self._draining if record.draining is None else record.draining

    @property
    def state(self) -> Record:
        """As one record."""
        return Record(
            tuple(self._levels.values()), tuple(self._given.values()), tuple(self._troubles.values()),
            self._kept.states, counts=tuple(self._counts.values()), draining=self._draining,
        )  # fmt: skip

    def given_by(self, model: str) -> Iterable[Given]:
        return (given for given in self._given.values() if given.model == model)


class Lease:
    """When a silent leader has to go. It renews its lease with every sign of life.

    `stopped_s`: how long one whose process is stopped may be silent; `silence_s`: any other one, which may wait for a
    core. Time in which nobody looked does not count: then the reader itself was stopped, and must not judge.
    """

    def __init__(self, now_s: float, *, stopped_s: float = 0.6, silence_s: float = 3.0, look_s: float = 0.3) -> None:
        self._stopped_s, self._silence_s, self._look_s = stopped_s, silence_s, look_s
        self._heard_s = self._looked_s = now_s

    def renew(self, now_s: float) -> None:
        self._heard_s = now_s

    def is_over(self, now_s: float, *, stopped: bool) -> bool:
        if now_s - self._looked_s > self._look_s:
            self._heard_s += now_s - self._looked_s
        self._looked_s = now_s
        return now_s - self._heard_s > (self._stopped_s if stopped else self._silence_s)
