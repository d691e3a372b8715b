"""The tables as plain data, for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tripool.planner.reproduce.lines import Table, TableLine, summarise


def tables_data(tables: Sequence[Table]) -> dict[str, Any]:
    found = summarise(tables)
    return {
        "system": "cloudmatrix",
        "validation": {
            "lines": found.num_validation,
            "median_error": found.median,
            "worst": {"name": found.worst.name, "error": found.worst.error},
            "gains": found.num_gains,
            "worst_gain": {"name": found.worst_gain.name, "error": found.worst_gain.error},
        },
        "tables": [
            {"title": each.title, "description": each.description, "lines": [_line_data(line) for line in each.lines]}
            for each in tables
        ],
    }


def _line_data(line: TableLine) -> dict[str, Any]:
    return {
        "name": line.name,
        "unit": line.unit,
        "published": line.published,
        "predicted": line.predicted,
        "error": line.error,
        "error_is": "difference" if line.unit == "gain" else "relative",
        "line": line.role,
        "repeats": line.repeats,
        "note": line.note,
        "source": line.source,
    }
