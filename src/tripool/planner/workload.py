"""Workload of a trace in the few numbers that a plan needs. Takes parsed requests, opens no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tripool.bench.trace import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    input_tokens: float
    output_tokens: float
    """Means."""
    cached_share: float
    """Share of prompt tokens seen before, with an unlimited cache."""
    requests_per_s: float | None
    """None: one request, or all at once."""
    num_requests: int


def measure_trace(requests: Sequence[TraceRequest], block_tokens: int = TRACE_BLOCK_TOKENS) -> Workload:
    seen: set[int] = set()
    cached = total_in = total_out = 0
    for request in requests:
        total_in += request.input_tokens
        total_out += request.output_tokens
        known = 0
        for block in request.block_ids:
            if block not in seen:
                break
            known += 1
        # The last token is always computed: something has to be sampled from.
        cached += min(known * block_tokens, request.input_tokens - 1)
        seen.update(request.block_ids)
    count = len(requests)
    span_s = requests[-1].arrival_s - requests[0].arrival_s if count > 1 else 0.0
    return Workload(
        input_tokens=total_in / count, output_tokens=total_out / count, cached_share=cached / total_in,
        requests_per_s=(count - 1) / span_s if span_s > 0 else None, num_requests=count,
    )  # fmt: skip
