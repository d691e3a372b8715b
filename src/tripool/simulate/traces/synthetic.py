"""Made-up requests by a few numbers: rate, lengths, how much of a prompt others share, how many tenants. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tripool.bench.trace import TRACE_BLOCK_TOKENS, TraceRequest
from tripool.errors import InvalidRequest
from tripool.simulate.rng import Rng

_PROMPTS = 8
"""Different beginnings of one tenant's prompts."""
_SIGMA = 0.5
"""Spread of lengths: one in twenty is more than twice the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    requests: int
    rate_per_s: float
    input_tokens: float = 2048.0
    output_tokens: float = 256.0
    """Means."""
    prefix_share: float = 0.0
    """Of a prompt, with other requests of the same tenant."""
    tenants: int = 1
    seed: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS

    def __post_init__(self) -> None:
        wrong = {
            "requests": self.requests < 1, "rate": not self.rate_per_s > 0, "input-len": not self.input_tokens >= 1,
            "output-len": not self.output_tokens >= 1, "prefix-share": not 0.0 <= self.prefix_share <= 1.0,
            "tenants": self.tenants < 1,
        }  # fmt: skip
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise InvalidRequest(f"{name} is out of range", hint="above 0; shares up to 1", param=name)

    def draw(self) -> Iterator[TraceRequest]:
        """One by one: a million take no room."""
        rng, at_s = Rng(self.seed), 0.0
        for serial in range(self.requests):
            prompt = max(1, round(rng.lognormal(self.input_tokens, _SIGMA)))
            answer = max(1, round(rng.lognormal(self.output_tokens, _SIGMA)))
            tenant, beginning = rng.between(0, self.tenants - 1), rng.between(0, _PROMPTS - 1)
            ids = self._ids(serial, prompt, tenant * _PROMPTS + beginning)
            name = f"tenant-{tenant}" if self.tenants > 1 else ""
            yield TraceRequest(at_s, prompt, answer, ids, name, self.block_tokens)
            at_s += rng.exponential() / self.rate_per_s

    def _ids(self, serial: int, prompt: int, beginning: int) -> tuple[int, ...]:
        """Shared ones first; a name is never given twice."""
        count = -(-prompt // self.block_tokens)
        shared = int(count * self.prefix_share)
        first = (beginning + 1) << 32
        own = (1 << 48) + (serial << 12)
        return (*range(first, first + shared), *range(own, own + count - shared))
