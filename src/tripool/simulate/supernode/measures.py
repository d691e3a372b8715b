"""Latencies of a simulated run's requests, and its steady state: the run without ramp and drain. Pure.

The ramp lasts from the first arrival as long as nine of ten requests take from arrival to last token: until then the
deployment holds fewer requests than the trace keeps in it. The drain begins at the last arrival.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tripool.bench.summary import Distribution, percentile
from tripool.simulate.request_table import DONE, RequestTable
from tripool.simulate.supernode.layout import Layout
from tripool.simulate.supernode.links import Slices
from tripool.simulate.timeline import FS

_LEAST_REQUESTS = 20
"""That arrive in a steady state; of fewer no percentile says much."""

Tree = dict[str, Any]


def short(value: float) -> float:
    """Six digits: what is beyond says nothing."""
    return float(f"{value:.6g}")


def ttft_s(table: RequestTable, number: int) -> float:
    return table.first_s[number] - table.arrived_s[number]


def tpot_s(table: RequestTable, number: int) -> float:
    return (table.last_s[number] - table.first_s[number]) / max(1, table.output_tokens[number] - 1)


def is_good(table: RequestTable, layout: Layout, number: int) -> bool:
    in_time = ttft_s(table, number) <= layout.ttft_s
    return in_time and (table.output_tokens[number] < 2 or tpot_s(table, number) <= layout.tpot_s)


def distribution_ms(seconds: Iterable[float]) -> Tree | None:
    found = Distribution.of(seconds)
    return None if found is None else {name: short(value) for name, value in asdict(found).items()}


def latencies(table: RequestTable, done: Iterable[int]) -> Tree:
    done = list(done)
    return {
        "ttft_ms": distribution_ms(ttft_s(table, number) for number in done),
        "tpot_ms": distribution_ms(tpot_s(table, number) for number in done if table.output_tokens[number] > 1),
    }


def steady_state(table: RequestTable, layout: Layout, slices: Slices, good: set[int]) -> Tree | None:
    """None: the trace is over before its ramp is. Rates are of what ends within; latencies, of what arrives within."""
    spans_s = sorted(table.last_s[n] - table.arrived_s[n] for n in range(len(table)) if table.outcome[n] == DONE)
    if not spans_s:
        return None
    begin_s, end_s = min(table.arrived_s) + percentile(spans_s, 90), max(table.arrived_s)
    arrived = [number for number, at_s in enumerate(table.arrived_s) if begin_s <= at_s <= end_s]
    if len(arrived) < _LEAST_REQUESTS or end_s <= begin_s:
        return None
    length_s, tokens, ended, ended_good = end_s - begin_s, 0.0, 0, 0
    for number, last_s in enumerate(table.last_s):
        if table.outcome[number] == DONE and last_s >= begin_s:
            first_s = table.first_s[number]
            within_s = min(last_s, end_s) - max(first_s, begin_s)
            if first_s <= end_s:
                tokens += table.output_tokens[number] * (within_s / (last_s - first_s) if last_s > first_s else 1.0)
            if last_s <= end_s:
                ended, ended_good = ended + 1, ended_good + (number in good)
    return {
        "begin_s": short(begin_s),
        "end_s": short(end_s),
        "requests": len(arrived),
        "requests_per_s": short(ended / length_s),
        "output_tokens_per_s": short(tokens / length_s),
        **latencies(table, (number for number in arrived if table.outcome[number] == DONE)),
        "goodput": {
            "requests_per_s": short(ended_good / length_s),
            "share": short(sum(number in good for number in arrived) / len(arrived)),
        },
        "use": _use(layout, slices, begin_s, end_s),
    }


def _use(layout: Layout, slices: Slices, begin_s: float, end_s: float) -> Tree | None:
    """Of the pools, over the slices of time that are within; None: there is none."""
    first, last = -int(-begin_s * FS // slices.slice_fs), int(end_s * FS // slices.slice_fs)
    if last <= first:
        return None
    span_fs = (last - first) * slices.slice_fs
    decode = layout.decode
    whole = {
        "prefill": ("prefill busy", layout.prefill.instances),
        "decode": ("decode busy", decode.instances),
        "decode batch": ("decode rows", decode.instances * decode.workers * decode.config.max_running),
    }
    return {key: short(sum(slices.sums(name)[first:last]) / (span_fs * most)) for key, (name, most) in whole.items()}
