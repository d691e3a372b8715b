"""A canary: a share of a model's conversations goes to a new version, until it is published or rolled back. Pure.

It is compared with the version beside it on the same traffic, so that what clients do wrong counts for neither.

| when | and | then |
|---|---|---|
| at any time | more requests failed than the bar leaves to the whole canary | rolled back |
| after `requests` of them, or `seconds` | few requests, many errors, objectives missed, too slow | rolled back |
| | none of these | published |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import median

from tripool.errors import InvalidRequest

_MOST_TIMES = 10_000
_NEEDED = 20
_FEWEST_TIMES = 10
"""Medians of fewer are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    share: float = 0.1
    """Of the conversations."""
    requests: int = 200
    """After so many requests to the new version it is decided."""
    seconds: float = 3600.0
    """Or after this time."""
    min_requests: int = 0
    """With fewer in that time, it is rolled back: nothing is known of it. 0: as many as `requests`, 20 at most."""
    max_error_rate: float = 0.01
    """Share of failed requests, above that of the version beside it."""
    ttft_ms: float = 0.0
    """Objective of the time to first token; 0: none."""
    tpot_ms: float = 0.0
    """Objective of the time per token after it; 0: none."""
    objective_share: float = 0.95
    """Of the requests keep each objective, at least."""
    max_slowdown: float = 2.0
    """Of the medians of both times, against the version beside it; 0: not compared."""

    def __post_init__(self) -> None:
        bounds = (
            ("share", 0 < self.share < 1, "above 0 and below 1"),
            ("requests", self.requests >= 1, "at least 1"),
            ("seconds", 0 < self.seconds <= 30 * 86_400, "above 0, and at most 30 days"),
            ("min_requests", 0 <= self.min_requests <= self.requests, "from 0 to `requests`"),
            ("max_error_rate", 0 <= self.max_error_rate < 1, "at least 0 and below 1"),
            ("ttft_ms", self.ttft_ms >= 0, "0 or more"),
            ("tpot_ms", self.tpot_ms >= 0, "0 or more"),
            ("objective_share", 0 < self.objective_share <= 1, "above 0 and at most 1"),
            ("max_slowdown", self.max_slowdown >= 0, "0 or more"),
        )
        for name, holds, said in bounds:
            if not holds:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}", hint=f"must be {said}", param=name)


@dataclass(slots=True)
class Tally:
    """What one version did."""

    ended: int = 0
    errors: int = 0
    ttft_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    tpot_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))

    @property
    def error_rate(self) -> float:
        return self.errors / self.ended if self.ended else 0.0

    def shown(self) -> dict[str, float]:
        times = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}
        medians = {f"median_{name}": round(median(values), 3) for name, values in times.items() if values}
        return {"requests": self.ended, "errors": self.errors, **medians}


@dataclass(frozen=True, slots=True)
class Verdict:
    publish: bool
    reason: str


class Canary:
    def __init__(self, plan: CanaryPlan, version: str, now_s: float) -> None:
        """`version` salts the choice: not the same conversations are first each time."""
        self.plan, self._version, self._begun_s = plan, version, now_s
        self.new, self.old = Tally(), Tally()

    def takes(self, conversation: bytes) -> bool:
        """Whether this conversation goes to the new version: the same answer each time, on every server."""
        said = blake2b(conversation, digest_size=8, key=self._version.encode()[:64], person=b"tripool-canary").digest()
        return int.from_bytes(said, "little") < self.plan.share * 2**64

    def ended(self, *, is_new: bool, failed: bool, ttft_ms: float | None = None, tpot_ms: float | None = None) -> None:
        tally = self.new if is_new else self.old
        tally.ended += 1
        tally.errors += failed
        if ttft_ms is not None:
            tally.ttft_ms.append(ttft_ms)
        if tpot_ms is not None:
            tally.tpot_ms.append(tpot_ms)

    def verdict(self, now_s: float) -> Verdict | None:
        """None: not yet."""
        plan, new = self.plan, self.new
        bar = plan.max_error_rate + self.old.error_rate
        if new.errors > bar * plan.requests:
            return Verdict(False, f"{new.errors} of {new.ended} requests failed, of {plan.requests} {bar:.2%} may")
        is_over = now_s - self._begun_s >= plan.seconds
        if new.ended < plan.requests and not is_over:
            return None
        needed = plan.min_requests or min(plan.requests, _NEEDED)
        if new.ended < needed:
            return Verdict(False, f"only {new.ended} requests in {plan.seconds:g} s, {needed} are needed")
        if new.error_rate > bar:
            return Verdict(False, f"{new.error_rate:.2%} of {new.ended} requests failed, {bar:.2%} may")
        missed = [*self._objectives_missed(), *self._slower()]
        if missed:
            return Verdict(False, "; ".join(missed))
        return Verdict(True, f"{new.ended} requests, {new.errors} failed")

    def _objectives_missed(self) -> list[str]:
        found, plan = [], self.plan
        objectives = (("ttft_ms", plan.ttft_ms, self.new.ttft_ms), ("tpot_ms", plan.tpot_ms, self.new.tpot_ms))
        for name, objective, times in objectives:
            if objective and times:
                kept = sum(one <= objective for one in times) / len(times)
                if kept < plan.objective_share:
                    found.append(f"{kept:.1%} of requests keep {name} {objective:g}, not {plan.objective_share:.1%}")
        return found

    def _slower(self) -> list[str]:
        found, bar = [], self.plan.max_slowdown
        pairs = (("ttft_ms", self.new.ttft_ms, self.old.ttft_ms), ("tpot_ms", self.new.tpot_ms, self.old.tpot_ms))
        for name, new, old in pairs:
            if bar and min(len(new), len(old)) >= _FEWEST_TIMES and median(new) > bar * median(old):
                found.append(f"median {name} is {median(new):.3g}, above {bar:g} times {median(old):.3g}")
        return found

    def shown(self) -> dict[str, dict[str, float]]:
        return {"new": self.new.shown(), "old": self.old.shown()}
