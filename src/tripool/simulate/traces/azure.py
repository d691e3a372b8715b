"""Azure's LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`, one request a line. They share no prefix."""

from __future__ import annotations

from calendar import timegm
from collections.abc import Iterable

from tripool.bench.trace import BadTrace, TraceRequest

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def parse_azure(lines: Iterable[str], *, max_requests: int | None = None) -> list[TraceRequest]:
    """In order of arrival, the first at 0. Requests without an answer are left out: nothing was generated."""
    rows = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows or rows[0][1].lstrip("\ufeff") != HEADER:
        raise BadTrace(f"the first line is not {HEADER}", hint="as Azure publishes them")
    found: list[tuple[int, int, int]] = []
    for number, line in rows[1:]:
        if max_requests is not None and len(found) >= max_requests:
            break
        row = _row(line, number)
        if row[1] > 0 and row[2] > 0:
            found.append(row)
    if not found:
        raise BadTrace("the trace holds no requests", hint=f"lines of {HEADER}")
    begin_ns = min(row[0] for row in found)
    return [TraceRequest((at_ns - begin_ns) / 1e9, prompt, answer) for at_ns, prompt, answer in sorted(found)]


def _row(line: str, number: int) -> tuple[int, int, int]:
    try:
        when, prompt, answer = line.split(",")
        return nanoseconds(when), int(prompt), int(answer)
    except ValueError:
        raise BadTrace(f"line {number} is not a time and two counts: {line[:80]!r}", hint=HEADER) from None


def nanoseconds(when: str) -> int:
    """Of `2023-11-16 18:17:03.9799600`, with or without a zone, since 1970."""
    day, _, clock = when.strip().replace("T", " ").removesuffix("Z").partition(" ")
    seconds, _, part = clock.partition("+")[0].partition(".")
    whole = timegm((*map(int, day.split("-")), *map(int, seconds.split(":"))))
    return whole * 10**9 + int(part.ljust(9, "0")[:9])
