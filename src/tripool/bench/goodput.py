"""Goodput: what counts as served is what kept its promise, not merely what came."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.bench.samples import Sample
from tripool.errors import InvalidRequest

METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in milliseconds, by metric. A request is good when it ended well and is within all of them."""

    limits_ms: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Goodput:
        """From `ttft:500,tpot:50`."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition(":")
            try:
                limit_ms = float(number)
            except ValueError:
                limit_ms = 0.0
            if name not in METRICS or not 0 < limit_ms < float("inf") or name in limits:
                hint = f"like ttft:500,tpot:50, in milliseconds; known: {', '.join(METRICS)}"
                raise InvalidRequest(f"goodput '{part.strip()[:50]}' is no limit", hint=hint, param="goodput")
            limits[name] = limit_ms
        return cls(tuple(limits.items()))

    def keeps(self, sample: Sample) -> bool:
        """An answer of one token has no time per token, and so cannot break that limit."""
        if not sample.ok:
            return False
        measured_s = {"ttft": sample.ttft_s, "tpot": sample.tpot_s, "e2e": sample.e2e_s}
        return all((measured_s[name] or 0.0) * 1e3 <= limit_ms for name, limit_ms in self.limits_ms)

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit_ms:g} ms" for name, limit_ms in self.limits_ms)
