"""Summary of samples: percentiles, throughput, goodput, errors by kind, and a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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


PERCENTILES = (50, 90, 95, 99)
LATE_S = 0.050
"""Above this lateness at the 99th percentile, the client measures itself and not the server."""
LENGTHS_OFF = 0.05


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, linear between neighbours."""
    assert ordered
    slice_of = (len(ordered) - 1) * percent / 100
    low = int(slice_of)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (slice_of - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution | None:
        ordered = sorted(seconds)
        if not ordered:
            return None
        mean = sum(ordered) / len(ordered)
        p50, p90, p95, p99 = (percentile(ordered, percent) * 1e3 for percent in PERCENTILES)
        return cls(len(ordered), mean * 1e3, p50, p90, p95, p99, ordered[-1] * 1e3)

    def cells(self) -> list[str]:
        """For a table: mean, the percentiles, largest."""
        return [f"{value:,.2f}" for value in (self.mean, self.p50, self.p90, self.p95, self.p99, self.max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole run. Latencies are of successful requests; rates are over `duration_s`."""

    duration_s: float
    completed: int
    failed: int
    cancelled: int
    """Still open when the run was stopped; not in any other number."""
    errors: dict[str, int]
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    prompt_tokens: int
    cached_tokens: int | None
    """None if the server never reported it."""
    output_tokens: int
    events: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    mean_concurrency: float
    good: int | None
    goodput_per_s: float | None
    late_ms: Distribution | None
    """Lateness of the client against an open loop's schedule."""
    client_lag_ms: Distribution | None
    """Lateness of the client's timers: whether it had the processor when it needed it."""
    warnings: tuple[str, ...] = ()


def summarise(
    samples: Sequence[Sample],
    duration_s: float,
    *,
    goodput: Goodput | None = None,
    cancelled: int = 0,
    client_lags_s: Sequence[float] = (),
) -> Summary:
    served = [sample for sample in samples if sample.ok]
    errors = Counter(sample.error for sample in samples if sample.error is not None)
    cached = [sample.cached_tokens for sample in served if sample.cached_tokens is not None]
    prompt_tokens = sum(_prompt_tokens(sample) for sample in served)
    output_tokens = sum(sample.tokens for sample in served)
    good = sum(map(goodput.keeps, served)) if goodput is not None else None
    span_s = max(duration_s, 1e-9)
    late = Distribution.of(sample.late_s for sample in samples if sample.due_s is not None)
    lags = Distribution.of(client_lags_s)
    return Summary(
        duration_s=duration_s,
        completed=len(served),
        failed=len(samples) - len(served),
        cancelled=cancelled,
        errors=dict(errors.most_common()),
        ttft_ms=Distribution.of(s.ttft_s for s in served if s.ttft_s is not None),
        tpot_ms=Distribution.of(s.tpot_s for s in served if s.tpot_s is not None),
        itl_ms=Distribution.of(gap for sample in served for gap in sample.gaps_s()),
        e2e_ms=Distribution.of(sample.e2e_s for sample in served),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        events=sum(len(sample.events_s) for sample in served),
        requests_per_s=len(served) / span_s,
        output_tokens_per_s=output_tokens / span_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / span_s,
        mean_concurrency=sum(sample.e2e_s for sample in samples) / span_s,
        good=good,
        goodput_per_s=good / span_s if good is not None else None,
        late_ms=late,
        client_lag_ms=lags,
        warnings=tuple(_warnings(served, late, lags)),
    )


def _prompt_tokens(sample: Sample) -> int:
    return sample.prompt_tokens if sample.prompt_tokens is not None else sample.input_tokens


def _warnings(served: Sequence[Sample], late: Distribution | None, lags: Distribution | None) -> Iterable[str]:
    if late is not None and late.p99 > LATE_S * 1e3:
        yield f"this client sent late (p99 {late.p99:.0f} ms): the load was lighter than asked; lower the rate"
    if lags is not None and lags.p99 > LATE_S * 1e3:
        yield f"this client lagged (p99 {lags.p99:.0f} ms): latencies include its own; give it a free core"
    wanted = sum(sample.input_tokens for sample in served)
    counted = sum(_prompt_tokens(sample) for sample in served)
    if wanted and abs(counted / wanted - 1) > LENGTHS_OFF:
        yield f"prompts had {counted:,} tokens where {wanted:,} were meant; completions take exact token ids"
    short = [sample for sample in served if sample.tokens < sample.output_tokens]
    if short:
        yield f"{len(short):,} answers were shorter than asked: the model ended them, or the server knows no ignore_eos"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Equal slices of the run: tokens that arrived per second, and requests that were open on average."""

    slice_s: float
    tokens_per_s: tuple[float, ...]
    concurrency: tuple[float, ...]


def timeline(samples: Sequence[Sample], duration_s: float, *, max_slices: int = 120) -> Timeline:
    # Slices of round lengths, so that the axis below them is readable.
    slice_s = next(s for s in _round_lengths() if s * max_slices >= duration_s)
    num_slices = max(1, -int(-duration_s // slice_s))
    tokens, open_s = [0.0] * num_slices, [0.0] * num_slices

    def slice_of(time_s: float) -> int:
        return min(max(int(time_s / slice_s), 0), num_slices - 1)

    for sample in samples:
        # Accepted drafts share an event: tokens are spread evenly over the events.
        per_event = sample.tokens / len(sample.events_s) if sample.events_s else 0.0
        for time_s in sample.events_s:
            tokens[slice_of(time_s)] += per_event
        for index in range(slice_of(sample.sent_s), slice_of(sample.end_s) + 1):
            overlap_s = min(sample.end_s, (index + 1) * slice_s) - max(sample.sent_s, index * slice_s)
            open_s[index] += max(0.0, overlap_s)
    # The last slice may be cut short by the end of the run.
    lengths = [slice_s] * (num_slices - 1) + [max(duration_s - slice_s * (num_slices - 1), 1e-9)]
    return Timeline(
        slice_s,
        tuple(count / length for count, length in zip(tokens, lengths, strict=True)),
        tuple(time_s / length for time_s, length in zip(open_s, lengths, strict=True)),
    )


def _round_lengths() -> Iterable[float]:
    length = 0.01
    while True:
        yield from (length, 2 * length, 5 * length)
        length *= 10
