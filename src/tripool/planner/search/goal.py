"""Goal of a plan: model, hardware, chips, workload and SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite, sqrt

from tripool.errors import InvalidRequest
from tripool.planner.hardware import Hardware
from tripool.planner.models import ModelShape

EIGHT_BITS = ("int8", "fp8")
KV_BLOCK = 64
"""Tokens of KV that are allocated together."""

_LIMITS: dict[str, tuple[str, float, float]] = {
    "chips": ("chips", 1, 10**6),
    "input-len": ("input_tokens", 1, 10**8),
    "output-len": ("output_tokens", 1, 10**8),
    "ttft": ("ttft_s", 1e-6, 10**6),
    "tpot": ("tpot_s", 1e-6, 10**6),
    "cached": ("cached_share", 0.0, 0.9999),
    "accept": ("accept", 0.0, 1.0),
    "price": ("price_per_hour", 0.0, 10**9),
    "keep": ("keep_s", 0.0, 10**9),
}
"""Option: (field, least, most). Fields that are None are not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Moments of a distribution of lengths: what their means hide. In tokens."""

    input_square: float
    """Mean of squared prompt lengths: attention of prefill grows with it."""
    cached_square: float
    """Mean of squared cached prefixes."""
    decode_context: float
    """Mean context of a request, over all steps of decoding: long answers count more often."""
    held: float
    """Mean KV of a request at its end, over all steps of decoding."""
    held_spread: float
    """Standard deviation of that."""
    longest: float
    """Prompt and answer of the longest request."""
    longest_input: float
    popular: float = 0.0
    """Share of cached tokens that every prefill instance has in its own memory, because they come often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGoal:
    model: ModelShape
    hardware: Hardware
    chips: int
    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float
    cached_share: float = 0.0
    """Share of a prompt that is found in the cache pool."""
    lengths: Lengths | None = None
    """None: every request has the mean lengths."""
    precision: str | None = None
    """None: the hardware's 8 bits where it has them, and BF16."""
    accept: float | None = None
    """Share of drafts accepted; None: the model's usual."""
    price_per_hour: float | None = None
    """Per chip; None: what the hardware's description says."""
    currency: str | None = None
    keep_s: float = 600.0
    """How long a finished context should stay in the cache pool."""
    decode_hardware: Hardware | None = None
    """Of decode, where it is not that of prefill; `chips` are both kinds together, in nodes of their own."""

    def __post_init__(self) -> None:
        for option, (field, least, most) in _LIMITS.items():
            value = getattr(self, field)
            if value is not None and not (isfinite(value) and least <= value <= most):
                hint = f"a number from {least:g} to {most:g}"
                raise InvalidRequest(f"--{option} is {value:g}: out of range", hint=hint, param=option)
        for hardware in self.kinds:
            if self.precision is not None and not hardware.supports(self.precision):
                hint = f"it has {', '.join(hardware.flops)}"
                raise InvalidRequest(f"{hardware.title} has no {self.precision}", hint=hint, param="precision")
        if self.price_per_hour is None and len({hardware.currency for hardware in self.kinds}) > 1:
            hint = "--price, for a chip of either kind"
            raise InvalidRequest("the two kinds of hardware have prices in different currencies", hint=hint)

    @property
    def kinds(self) -> tuple[Hardware, ...]:
        """Of prefill, and of decode where it is another."""
        return (self.hardware,) if self.decode_hardware is None else (self.hardware, self.decode_hardware)

    @property
    def of_decode(self) -> PlanGoal:
        """The same goal on the hardware of decode alone."""
        return self if self.decode_hardware is None else replace(self, hardware=self.kinds[-1], decode_hardware=None)

    @property
    def title(self) -> str:
        return " + ".join(hardware.title for hardware in self.kinds)

    @property
    def ranks(self) -> int:
        return self.chips * self.hardware.ranks

    @property
    def precisions(self) -> tuple[str, ...]:
        if self.precision is not None:
            return (self.precision,)
        eight = [name for name in EIGHT_BITS if self.hardware.supports(name)]
        return (*eight[-1:], "bf16")

    @property
    def price(self) -> float | None:
        return self.hardware.price_per_hour if self.price_per_hour is None else self.price_per_hour

    def hourly(self, prefill_chips: int, decode_chips: int) -> tuple[float | None, float | None]:
        """Price of so many chips, and their watts; None where a description does not have them."""
        used = [(side, chips) for side, chips in ((self, prefill_chips), (self.of_decode, decode_chips)) if chips]
        return (
            _total([(side.price, chips) for side, chips in used]),
            _total([(side.hardware.watts, chips) for side, chips in used]),
        )

    @property
    def money(self) -> str:
        return self.currency or self.hardware.currency

    @property
    def cached_tokens(self) -> float:
        return min(self.input_tokens * self.cached_share, self.input_tokens - 1)

    @property
    def popular(self) -> float:
        """Share of the hits that are not read from the cache pool."""
        return self.lengths.popular if self.lengths else 0.0

    @property
    def mean_context(self) -> float:
        """Of a decode step."""
        return self.lengths.decode_context if self.lengths else self.input_tokens + self.output_tokens / 2

    @property
    def longest(self) -> tuple[float, float]:
        """Prompt of the longest, and prompt with answer."""
        if self.lengths:
            return self.lengths.longest_input, self.lengths.longest
        return self.input_tokens, self.input_tokens + self.output_tokens

    def prompts(self, read_share: float) -> tuple[float, float, float]:
        """New tokens of a mean prompt, if that share of its hits is read; and equal prompts (length, cached) in which a
        new token reads as much context as on average here: with unequal lengths that is more than the mean's.
        """
        cached = self.cached_tokens * read_share
        if self.lengths is None:
            return self.input_tokens - cached, self.input_tokens, cached
        fresh = self.input_tokens - cached
        reads = (self.lengths.input_square - read_share**2 * self.lengths.cached_square) / 2 / fresh
        scale = reads / (cached + fresh / 2)
        return fresh, (cached + fresh) * scale, cached * scale

    def fitting_requests(self, kv_tokens: float, state_tokens: float = 0.0) -> float:
        """Requests that a worker with room for `kv_tokens` of KV decodes at once; 0 if not the longest one.
        `state_tokens`: what a request holds whatever its length, in tokens.
        """
        longest = ceil(self.longest[1] / KV_BLOCK) * KV_BLOCK + state_tokens
        if kv_tokens < longest:
            return 0.0
        if self.lengths is None:
            return kv_tokens / longest
        # The sum of n requests stays below n * mean + spread * sqrt(n) most of the time; the rest is preemption.
        mean, spread = self.lengths.held + state_tokens, self.lengths.held_spread
        root = (sqrt(spread**2 + 4 * mean * kv_tokens) - spread) / (2 * mean)
        return max(1.0, root**2)

    def kv_bytes(self) -> float:
        """Moved from prefill to decode for one request."""
        return self.input_tokens * self.model.kv_bytes_per_token()

    def second_token_s(self) -> float:
        """What the transfer of its KV adds to a request's mean time per output token."""
        move_s = self.kv_bytes() / self.hardware.plane("transfer").flow_bytes_per_s
        return move_s / max(1.0, self.output_tokens - 1)


def _total(each: Sequence[tuple[float | None, int]]) -> float | None:
    """Of so many chips of each value; None if one is not known."""
    known = [value * chips for value, chips in each if value is not None]
    return sum(known) if len(known) == len(each) else None
