"""Times on the command line: durations such as `90m`, `12h`, `30d`, or a date, in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from tripool.errors import InvalidRequest

_SPAN = re.compile(r"(\d{1,6})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


def span_s(text: str) -> float | None:
    found = _SPAN.fullmatch(text)
    return None if found is None else int(found[1]) * float(_SECONDS[found[2]])


def later_s(text: str, *, now_s: float, param: str) -> float:
    span = span_s(text)
    return now_s + span if span is not None else _date_s(text, param)


def ago_s(text: str, *, now_s: float, param: str) -> float:
    span = span_s(text)
    return now_s - span if span is not None else _date_s(text, param)


def _date_s(text: str, param: str) -> float:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        hint = "a duration such as 90m, 12h or 30d, or a date such as 2026-12-31"
        raise InvalidRequest(f"'{text[:50]}' is not a time", hint=hint, param=param) from error


def shown(at_s: float | None) -> str:
    return "" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
