"""The tables as plain data for JSON, and as Markdown for `docs/reproduce.md`. Text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tripool.planner.reproduce.lines import HEADS, Line, Table, cells, summarise, summary_words

_BEGIN, _END = "<!-- made: tables -->\n", "<!-- end -->"


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
            {"title": each.title, "said": each.said, "lines": [_line_data(line) for line in each.lines]}
            for each in tables
        ],
    }


def _line_data(line: Line) -> dict[str, Any]:
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


def documented(text: str, tables: Sequence[Table]) -> str:
    """`text` with what stands between its two marks made anew."""
    before, found, rest = text.partition(_BEGIN)
    assert found and _END in rest, "no place for the tables"
    return before + _BEGIN + "\n" + markdown(tables) + "\n" + _END + rest.partition(_END)[2]


def markdown(tables: Sequence[Table]) -> str:
    parts = [f"{summary_words(summarise(tables))}.\n"]
    for each in tables:
        rows = [HEADS, ["---"] * len(HEADS), *map(cells, each.lines)]
        lines = ("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |\n" for row in rows)
        parts.append(f"### {each.title}\n\n{each.said}\n\n{''.join(lines)}")
    return "\n".join(parts)
