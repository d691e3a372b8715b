"""Reads a request's SLO: from its body, its headers, or its key, in this order of precedence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tripool.core import Slo
from tripool.errors import InvalidRequest
from tripool.tenants import Tenant

HEADERS: Mapping[str, str] = {"x-tripool-tpot-ms": "tpot_ms", "x-tripool-ttft-ms": "ttft_ms"}
MAX_PRIORITY = 1000
_MAX_MS = 3_600_000.0

HeaderSlo = Mapping[str, float]
"""Objectives in a request's headers, by the names of the body's fields."""


def read_header_slo(headers: Mapping[str, str]) -> HeaderSlo:
    """`headers` are found by lower-case names."""
    header_slo = {}
    for header, field in HEADERS.items():
        given = headers.get(header)
        if given is not None:
            try:
                header_slo[field] = float(given)
            except ValueError as error:
                raise _wrong(header, given) from error
            _check(header, header_slo[field])
    return header_slo


def read_slo(
    fields: Mapping[str, Any], tenant: Tenant, header_slo: HeaderSlo, job: str = "", *, background: bool = False
) -> Slo:
    """`background`: a line of a batch. It has no objectives."""
    slo: Mapping[str, Any] = fields.get("slo", {})
    for name in slo:
        if name not in ("tpot_ms", "ttft_ms"):
            raise InvalidRequest(f"'slo' has '{str(name)[:100]}'", hint="known: tpot_ms, ttft_ms", param="slo")
    chosen: dict[str, float | None] = {"tpot_ms": tenant.tpot_ms, "ttft_ms": tenant.ttft_ms} | dict(header_slo)
    for name, value in slo.items():
        if value is not None:
            _check(f"slo.{name}", value)
            chosen[name] = float(value)
    priority = fields.get("priority", 0)
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        hint = f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}; lower goes first"
        raise InvalidRequest(f"'priority' is {priority}", hint=hint, param="priority")
    if background:
        chosen = dict.fromkeys(chosen)
    return Slo(
        tpot_ms=chosen["tpot_ms"],
        ttft_ms=chosen["ttft_ms"],
        priority=priority,
        tenant=tenant.name,
        weight=tenant.limits.weight,
        job=job,
        background=background,
    )


def _check(name: str, value: object) -> None:
    # Compared as it is: an integer may be too large for a float.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _MAX_MS:
        raise _wrong(name, value)


def _wrong(name: str, value: object) -> InvalidRequest:
    hint = f"must be a number of milliseconds, above 0 and at most {_MAX_MS:g}"
    return InvalidRequest(f"'{name}' is {str(value)[:100]!r}", hint=hint, param=name)
