"""HTML report of a run: headline numbers, latencies, failures, and plots of every request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from tripool.bench.report import Report, summary_rows
from tripool.bench.samples import Sample
from tripool.bench.summary import PERCENTILES, Distribution, percentile
from tripool.page import Plot, html_page, plots, table, tiles

_MAX_POINTS = 3000
_NUM_BARS = 40


def render_page(report: Report) -> str:
    asked = report.asked
    warnings = "".join(f'<p class="warn">Note: {escape(warning)}.</p>' for warning in report.summary.warnings)
    body = (
        f"<h1>{escape(asked.model)} at {escape(asked.url)}</h1>"
        f"<p>{escape(asked.workload)} · {escape(asked.load)} · {escape(asked.endpoint)} · seed {asked.seed} · "
        f"{escape(asked.began)}</p>{warnings}{tiles(summary_rows(report))}"
        f"<h2>Latency, milliseconds</h2>{_latencies(report)}{_errors(report)}"
        f"<h2>Plots</h2>{plots(plot.render() for plot in _plots(report))}"
    )
    return html_page(f"tripool bench: {asked.model}", body)


def _latencies(report: Report) -> str:
    summary = report.summary
    rows: Sequence[tuple[str, Distribution | None]] = (
        ("time to first token (TTFT)", summary.ttft_ms),
        ("time per output token (TPOT)", summary.tpot_ms),
        ("between events (ITL)", summary.itl_ms),
        ("whole request", summary.e2e_ms),
        ("client: sent late", summary.late_ms),
    )
    heads = ["", "mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    return table(heads, [[name, *found.cells()] for name, found in rows if found is not None])


def _errors(report: Report) -> str:
    if not report.summary.errors:
        return ""
    details = {sample.error: sample.detail for sample in reversed(report.samples) if sample.error is not None}
    rows = [[kind, f"{count:,}", details[kind]] for kind, count in report.summary.errors.items()]
    return f'<h2>Failed</h2><div class="errors">{table(["kind", "requests", "first message"], rows)}</div>'


def _plots(report: Report) -> Iterable[Plot]:
    served = sorted((sample for sample in report.samples if sample.ok), key=lambda sample: sample.index)
    limits = dict(report.goodput.limits_ms) if report.goodput is not None else {}
    yield from _histogram("Time to first token", served, lambda s: s.ttft_s, "one", limits.get("ttft"))
    yield from _histogram("Time per output token", served, lambda s: s.tpot_s, "two", limits.get("tpot"))
    yield from _timelines(report)
    yield from _scatters(report, served, limits)


def _histogram(
    title: str, served: Sequence[Sample], of: Callable[[Sample], float | None], kind: str, limit_ms: float | None
) -> Iterable[Plot]:
    values = sorted(value * 1e3 for sample in served if (value := of(sample)) is not None)
    if not values:
        return
    # A few slow requests would squeeze the rest into one bar; they are counted in the last one.
    highest = min(values[-1], 1.5 * percentile(values, 99)) or 1.0
    width = highest / _NUM_BARS
    counts = [0] * _NUM_BARS
    for value in values:
        counts[min(int(value / width), _NUM_BARS - 1)] += 1
    plot = Plot(title, "milliseconds", highest, 1.35 * max(counts), "requests")  # space for labels above the bars
    edges = [index * width for index in range(_NUM_BARS + 1)]
    plot.bars(edges, counts, kind, "{low:.1f} to {high:.1f} ms: {count} requests")
    for percent in (50, 95, 99):
        at = percentile(values, percent)
        plot.rule(at, f"p{percent} {at:,.3g}")
    if limit_ms is not None:
        plot.rule(limit_ms, f"limit {limit_ms:g}", "limit")
    yield plot


def _timelines(report: Report) -> Iterable[Plot]:
    line, end = report.timeline, report.summary.duration_s
    rows = (("Output tokens per second", line.tokens_per_s, "one"), ("Requests open", line.concurrency, "two"))
    for title, values, kind in rows:
        plot = Plot(title, "seconds since the start", end, max(values, default=1.0))
        plot.steps(line.slice_s, values, end, kind)
        yield plot


def _scatters(report: Report, served: Sequence[Sample], limits: dict[str, float]) -> Iterable[Plot]:
    every = -(-len(served) // _MAX_POINTS) or 1
    shown = [sample for sample in served[::every] if sample.ttft_s is not None]
    if not shown:
        return
    which = f", one of {every}" if every > 1 else ""
    highest = max((s.ttft_s or 0.0) * 1e3 for s in shown)
    over_time = Plot(
        f"Each request: first token{which}", "sent, seconds since the start", report.summary.duration_s, highest, "ms"
    )
    title, longest = f"Each request: first token by uncached prompt{which}", max(map(_uncached, shown))
    by_length = Plot(title, "prompt tokens not in the cache", longest, highest, "ms")
    over_time.points(((s.sent_s, (s.ttft_s or 0.0) * 1e3, _hover(s)) for s in shown), "one")
    by_length.points(((_uncached(s), (s.ttft_s or 0.0) * 1e3, _hover(s)) for s in shown), "three")
    failed = [sample for sample in report.samples if not sample.ok][:_MAX_POINTS]
    over_time.points(((s.sent_s, 0.0, f"request {s.index}: {s.error}") for s in failed), "bad")
    for plot in (over_time, by_length):
        if "ttft" in limits:
            plot.level(limits["ttft"], f"limit {limits['ttft']:g}")
        yield plot


def _uncached(sample: Sample) -> int:
    prompt = sample.prompt_tokens if sample.prompt_tokens is not None else sample.input_tokens
    return max(0, prompt - (sample.cached_tokens or 0))


def _hover(sample: Sample) -> str:
    ttft_ms, tpot_s = (sample.ttft_s or 0.0) * 1e3, sample.tpot_s
    tpot = f", {tpot_s * 1e3:.1f} ms per token" if tpot_s is not None else ""
    cached = f" ({sample.cached_tokens:,} cached)" if sample.cached_tokens else ""
    prompt = sample.prompt_tokens if sample.prompt_tokens is not None else sample.input_tokens
    return f"request {sample.index}: {prompt:,} in{cached}, {sample.tokens:,} out, first after {ttft_ms:.1f} ms{tpot}"
