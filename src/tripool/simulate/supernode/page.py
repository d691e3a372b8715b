"""A simulated run, or two beside each other, as one HTML file that needs nothing else. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from tripool.page import Plot, html_page, plots, table, tiles
from tripool.simulate.supernode.rows import NOT_IN_TRACE, compared_rows, summary_rows

Tree = dict[str, Any]
_PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")
_PLOTS = (
    ("Requests per second: arrived, and met both SLOs", "", ("arrived_per_s", "good_per_s"), None),
    ("Output tokens per second", "", ("tokens_per_s",), None),
    ("Time to first token: median and p95", "ms", ("ttft_p50_ms", "ttft_p95_ms"), "ttft_ms"),
    ("Time per output token: median and p95", "ms", ("tpot_p50_ms", "tpot_p95_ms"), "tpot_ms"),
    ("Use of the pools: prefill, and slots of the decode batches", "share", ("prefill_use", "batch_use"), None),
    ("Planes: read from the cache pool, prefill to decode", "GB/s", ("memory_gb_s", "transfer_gb_s"), None),
)
_LEGENDS = {
    "arrived_per_s": "arrived", "good_per_s": "good", "ttft_p50_ms": "median", "ttft_p95_ms": "p95",
    "tpot_p50_ms": "median", "tpot_p95_ms": "p95", "prefill_use": "prefill", "batch_use": "decode",
    "memory_gb_s": "cache", "transfer_gb_s": "hand-over",
}  # fmt: skip


def render_run(data: Tree) -> str:
    body = (
        f"<h1>{escape(data['title'])}</h1><p>{escape(data['trace'])} · first token within "
        f"{data['slo']['ttft_ms']:g} ms, then {data['slo']['tpot_ms']:g} ms per token</p>"
        f"{_notes(data)}{tiles(summary_rows(data))}<h2>Latency, milliseconds</h2>{_latencies(data)}{_faults(data)}"
        f"<h2>Over time</h2>{plots(plot.render() for plot in _plots([data]))}<h2>Tenants</h2>{_tenants(data)}"
        "<p>Engines and links are the planner's model; `tripool plan --validate` prints its errors. Router, "
        "schedulers, SLO controller and cache index are those that serve.</p>"
    )
    return html_page(f"tripool simulate: {data['title']}", body)


def render_comparison(first: Tree, second: Tree, names: tuple[str, str]) -> str:
    rows = [[name, *cells] for name, *cells in compared_rows(first, second)]
    body = (
        f"<h1>{escape(names[0])} and {escape(names[1])}</h1><p>{escape(first['title'])} · {escape(first['trace'])}</p>"
        f"<p>{escape(second['title'])} · {escape(second['trace'])}</p>"
        f"{table(['', *names, 'difference'], rows)}"
        f"<h2>Over time</h2>{plots(plot.render() for plot in _plots([first, second], names))}"
    )
    return html_page("tripool simulate: two runs", body)


def _notes(data: Tree) -> str:
    return "".join(f"<p>{escape(note)}</p>" for note in data["notes"])


def _latencies(data: Tree) -> str:
    rows = []
    for name, key in (("time to first token (TTFT)", "ttft_ms"), ("time per output token (TPOT)", "tpot_ms")):
        found = data[key]
        if found is not None:
            rows.append([name, *(f"{found[each]:,.2f}" for each in _PERCENTILES)])
    return table(["", *_PERCENTILES], rows)


def _faults(data: Tree) -> str:
    if not data["faults"]:
        return ""
    rows = []
    for number, each in enumerate(data["faults"], 1):
        waited = each["recovery_ms"]
        times = ("-", "-") if waited is None else (f"{waited['p50']:,.0f}", f"{waited['max']:,.0f}")
        rows.append(
            [f"{number}: {each['fault']}", *(f"{each[name]:,}" for name in ("requests", "recovered", "failed")), *times]
        )
    heads = ["fault", "requests struck", "went on", "failed", "next token after, median ms", "last one, ms"]
    return f"<h2>Faults</h2>{table(heads, rows)}"


def _tenants(data: Tree) -> str:
    rows = []
    for each in data["tenants"]:
        ttft, hits = each["ttft_ms"], each["hits"]
        times = ["-", "-"] if ttft is None else [f"{ttft['p50']:,.0f}", f"{ttft['p99']:,.0f}"]
        counts = [f"{each['requests']:,}", f"{each['done']:,}"]
        shares = (NOT_IN_TRACE if share is None else f"{share:.1%}" for share in hits.values())
        rows.append([each["tenant"], *counts, *times, *shares])
    heads = ["tenant", "requests", "done", "TTFT p50, ms", "TTFT p99, ms", "hits: prefill memory", "hits: cache pool"]
    return table(heads, rows)


def _plots(runs: Sequence[Tree], names: Sequence[str] = ("",)) -> Iterator[Plot]:
    """One run: the lines of each plot. Two: the last line of each, side by side."""
    for title, unit, keys, limit in _PLOTS:
        lines = [(run, key, _LEGENDS.get(key, "")) for run in runs[:1] for key in keys]
        if len(runs) == 2:
            lines = [(run, keys[-1], name) for run, name in zip(runs, names, strict=True)]
            title = f"{title.partition(':')[0]}{': ' + _LEGENDS[keys[-1]] if keys[-1] in _LEGENDS else ''}"
        end_s = max(run["duration_s"] for run, _, _ in lines)
        highest = max((v for run, key, _ in lines for v in run["timeline"][key] if v is not None), default=1.0)
        legend = ", ".join(
            f"{kind}: {said}" for kind, (_, _, said) in zip(("blue", "brown"), lines, strict=False) if said
        )
        plot = Plot(title, f"seconds{' · ' + legend if legend else ''}", end_s, highest, unit)
        for kind, (run, key, _) in zip(("one", "two"), lines, strict=False):
            _line(plot, run["timeline"], key, kind)
        level = runs[0]["slo"][limit] if limit else None
        if level is not None and level <= 1.5 * highest:
            plot.level(level, f"SLO {level:g}")
        for number, struck in enumerate(runs[0]["faults"] if len(runs) == 1 else (), 1):
            plot.rule(float(struck["fault"].partition("@")[2].partition("s")[0]), str(number))
        yield plot


def _line(plot: Plot, timeline: Tree, key: str, kind: str) -> None:
    """From slice to slice; where nothing is known the line has a gap."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for number, value in enumerate(timeline[key]):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(((number + 0.5) * timeline["slice_s"], value))
    for piece in pieces:
        if len(piece) > 1:
            plot.line(piece, kind)
        elif piece:
            (x, y), *_ = piece
            plot.marks.append(f'<circle class="{kind}" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="1.5"/>')
