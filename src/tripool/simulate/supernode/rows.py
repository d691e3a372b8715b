"""The few numbers of a simulated run that a person reads first, alone or beside another run's. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Tree = dict[str, Any]


def summary_rows(data: Tree) -> Iterator[tuple[str, str]]:
    requests = data["requests"]
    yield "requests", f"{sum(requests.values()):,}: {', '.join(f'{n:,} {name}' for name, n in requests.items() if n)}"
    yield "virtual time", f"{data['duration_s']:,.0f} s"
    yield "requests per second", f"{data['requests_per_s']:,.2f}"
    yield "output tokens per second", f"{data['output_tokens_per_s']:,.0f}"
    for name, key in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")):
        found = data[key]
        if found is not None:
            yield name, f"p50 {found['p50']:,.1f} ms, p99 {found['p99']:,.1f} ms"
    yield "kept both promises", f"{data['goodput']['share']:.1%}, {data['goodput']['requests_per_s']:,.2f} per second"
    yield "prompt tokens found", ", ".join(f"{share:.1%} in {name}" for name, share in data["hits"].items())
    use = data["use"]
    yield (
        "pools in use",
        f"prefill {use['prefill']:.1%}, decode {use['decode']:.1%} ({use['decode batch']:.1%} of slots)",
    )
    for kind, plane in use["planes"].items():
        yield f"{kind} plane", f"{plane['gb']:,.0f} GB, {100 * plane['share']:.2g} % of what it carries"


_COMPARED = (
    ("requests done", ("requests", "done"), "{:,}"),
    ("requests per second", ("requests_per_s",), "{:,.3f}"),
    ("output tokens per second", ("output_tokens_per_s",), "{:,.1f}"),
    ("TTFT p50, ms", ("ttft_ms", "p50"), "{:,.1f}"),
    ("TTFT p99, ms", ("ttft_ms", "p99"), "{:,.1f}"),
    ("TPOT p50, ms", ("tpot_ms", "p50"), "{:,.2f}"),
    ("TPOT p99, ms", ("tpot_ms", "p99"), "{:,.2f}"),
    ("kept both promises", ("goodput", "share"), "{:.2%}"),
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
            said = ["-" if value is None else form.format(value) for value in (one, other)]
            yield name, said[0], said[1], "-"
        else:
            yield name, form.format(one), form.format(other), f"{(other - one) / one:+.1%}" if one else "-"


def _at(tree: Tree, path: tuple[str, ...]) -> float | None:
    found: Any = tree
    for name in path:
        if found is None:
            return None
        found = found[name]
    return None if found is None else float(found) if not isinstance(found, int) else found
