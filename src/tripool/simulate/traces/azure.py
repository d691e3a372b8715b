"""Azure's LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`, one request a line. They share no prefix."""

from __future__ import annotations

from calendar import timegm
from collections.abc import Iterable
from itertools import islice

from tripool.bench.trace import BadTrace, TraceRequest, token_count

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def parse_azure(lines: Iterable[str], *, max_requests: int | None = None) -> list[TraceRequest]:
    """In order of arrival, the first at 0. Requests without an answer are left out: nothing was generated."""
    rows = ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())
    if next(rows, (0, ""))[1].lstrip("\ufeff") != HEADER:
        raise BadTrace(f"the first line is not {HEADER}", hint="as Azure publishes them")
    answered = (row for number, line in rows if (row := _row(line, number))[1] > 0 and row[2] > 0)
    found = list(islice(answered, max_requests))
    if not found:
        raise BadTrace("the trace holds no requests", hint=f"lines of {HEADER}")
    begin_ns = min(row[0] for row in found)
    return [TraceRequest((at_ns - begin_ns) / 1e9, prompt, answer) for at_ns, prompt, answer in sorted(found)]


def _row(line: str, number: int) -> tuple[int, int, int]:
    try:
        when, prompt, answer = line.split(",")
        counts = {"ContextTokens": int(prompt), "GeneratedTokens": int(answer)}
        at_ns = nanoseconds(when)
    except (ValueError, OverflowError):
        raise BadTrace(f"line {number} is not a time and two counts: {line[:80]!r}", hint=HEADER) from None
    input_tokens, output_tokens = (token_count(counts, name, f"line {number}", least=0) for name in counts)
    return at_ns, input_tokens, output_tokens


def nanoseconds(when: str) -> int:
    """Of `2023-11-16 18:17:03.9799600`, with or without a zone, since 1970."""
    day, _, clock = when.strip().replace("T", " ").removesuffix("Z").partition(" ")
    seconds, _, part = clock.partition("+")[0].partition(".")
    whole = timegm((*map(int, day.split("-")), *map(int, seconds.split(":"))))
    return whole * 10**9 + int(part.ljust(9, "0")[:9])
