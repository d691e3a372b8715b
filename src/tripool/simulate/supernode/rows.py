"""The summary of a simulated run, alone or beside another run's. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Tree = dict[str, Any]


NOT_IN_TRACE = "not in this trace"


def summary_rows(data: Tree) -> Iterator[tuple[str, str]]:
    requests = data["requests"]
    yield "requests", f"{sum(requests.values()):,}: {', '.join(f'{n:,} {name}' for name, n in requests.items() if n)}"
    for each in data["errors"]:
        yield f"{each['outcome']}, {each['code']}", f"{each['requests']:,}, the first: {each['example']}"
    yield "virtual time", f"{data['duration_s']:,.0f} s"
    steady = data["steady"]
    if steady is None:
        yield "steady state", "none: the trace ends before the deployment is filled"
    else:
        yield "steady state", f"{steady['begin_s']:,.0f} s to {steady['end_s']:,.0f} s, without ramp and drain"
        yield from ((f"{name}, steady", value) for name, value in _rates(steady))
    yield from _rates(data)
    yield "prompt tokens found", hit_words(data["hits"])
    use = data["use"]
    yield (
        "pools in use",
        f"prefill {use['prefill']:.1%}, decode {use['decode']:.1%} ({use['decode batch']:.1%} of slots)",
    )
    for kind, plane in use["planes"].items():
        yield f"{kind} plane", f"{plane['gb']:,.0f} GB, {100 * plane['share']:.2g} % of what it carries"


def _rates(data: Tree) -> Iterator[tuple[str, str]]:
    """Of a whole run, or of its steady state."""
    yield "requests per second", f"{data['requests_per_s']:,.2f}"
    yield "output tokens per second", f"{data['output_tokens_per_s']:,.0f}"
    for name, key in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")):
        found = data[key]
        if found is not None:
            yield name, f"p50 {found['p50']:,.1f} ms, p99 {found['p99']:,.1f} ms"
    yield "met both SLOs", f"{data['goodput']['share']:.1%}, {data['goodput']['requests_per_s']:,.2f} per second"


def hit_words(hits: Tree) -> str:
    known = [f"{share:.1%} in {name}" for name, share in hits.items() if share is not None]
    return ", ".join(known) or NOT_IN_TRACE


_COMPARED = (
    ("requests done", ("requests", "done"), "{:,}"),
    ("requests per second", ("requests_per_s",), "{:,.3f}"),
    ("output tokens per second", ("output_tokens_per_s",), "{:,.1f}"),
    ("TTFT p50, ms", ("ttft_ms", "p50"), "{:,.1f}"),
    ("TTFT p99, ms", ("ttft_ms", "p99"), "{:,.1f}"),
    ("TPOT p50, ms", ("tpot_ms", "p50"), "{:,.2f}"),
    ("TPOT p99, ms", ("tpot_ms", "p99"), "{:,.2f}"),
    ("met both SLOs", ("goodput", "share"), "{:.2%}"),
    ("requests per second, steady", ("steady", "requests_per_s"), "{:,.3f}"),
    ("TTFT p99, steady, ms", ("steady", "ttft_ms", "p99"), "{:,.1f}"),
    ("TPOT p99, steady, ms", ("steady", "tpot_ms", "p99"), "{:,.2f}"),
    ("met both SLOs, steady", ("steady", "goodput", "share"), "{:.2%}"),
    ("found in prefill memory", ("hits", "prefill memory"), "{:.2%}"),
    ("found in the cache pool", ("hits", "cache pool"), "{:.2%}"),
    ("prefill in use", ("use", "prefill"), "{:.2%}"),
    ("decode slots in use", ("use", "decode batch"), "{:.2%}"),
)


def compared_rows(first: Tree, second: Tree) -> Iterator[tuple[str, str, str, str]]:
    """Name, both values, and the second's difference from the first."""
    for name, path, form in _COMPARED:
        one, other = _at(first, path), _at(second, path)
        if one is None or other is None:
            unknown = NOT_IN_TRACE if path[0] == "hits" else "-"
            said = [unknown if value is None else form.format(value) for value in (one, other)]
            yield name, said[0], said[1], "-"
        else:
            yield name, form.format(one), form.format(other), f"{(other - one) / one:+.1%}" if one else "-"


def _at(tree: Tree, path: tuple[str, ...]) -> float | None:
    found: Any = tree
    for name in path:
        if found is None:
            return None
        found = found.get(name)
    return None if found is None else float(found) if not isinstance(found, int) else found
