"""Data of the tables: a line is one quantity, published and predicted, with its error; a table is one experiment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal


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


Role = Literal["calibration", "fit to this ablation", "validation", "not published", "shown", "arithmetic"]
ROLES: dict[Role, str] = {
    "calibration": "this row fixed a constant of the cost model",
    "fit to this ablation": "a constant was chosen by this number",
    "validation": "no constant's source names this number",
    "not published": "prediction alone",
    "shown": "not compared: no batch is published, or not what is modelled",
    "arithmetic": "follows from published numbers, no model in it",
}
"""Meaning of each role for a line's error."""

Unit = Literal["tok/s", "requests", "ms", "us", "s", "x", "gain", "tok/s/TFLOPS", "CNY/M", "M tokens/h"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    name: str
    unit: Unit
    role: Role
    published: float | None = None
    predicted: float | None = None
    source: str = ""
    note: str = ""
    repeats: bool = False
    """Another line shows the same measurement; counted once."""

    def __post_init__(self) -> None:
        assert (self.published is None) == (self.role == "not published"), self.name
        assert self.published is None or self.source, f"{self.name} has no source"

    @property
    def error(self) -> float | None:
        """Signed. Relative; for a gain, which is a share already, the difference."""
        if self.published is None or self.predicted is None:
            return None
        return self.predicted - self.published if self.unit == "gain" else self.predicted / self.published - 1.0


def unpublished(name: str, unit: Unit, predicted: float | None, note: str = "") -> TableLine:
    return TableLine(name=name, unit=unit, role="not published", predicted=predicted, note=note)


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    description: str
    """Setup of the experiment, and what is not known about it."""
    lines: tuple[TableLine, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of the validation lines of all tables, each measurement once; gains apart: their errors are
    differences.
    """

    num_validation: int
    median: float
    worst: TableLine
    num_gains: int
    worst_gain: TableLine


def summarise(tables: Iterable[Table]) -> Summary:
    lines = (line for table in tables for line in table.lines)
    held = [line for line in lines if line.role == "validation" and line.error is not None and not line.repeats]
    plain = [line for line in held if line.unit != "gain"]
    gains = [line for line in held if line.unit == "gain"]
    return Summary(
        len(plain), median(size(line) for line in plain), max(plain, key=size), len(gains), max(gains, key=size)
    )


def size(line: TableLine) -> float:
    """Magnitude of its error."""
    return abs(line.error or 0.0)


def value_words(value: float | None, unit: Unit) -> str:
    if value is None:
        return ""
    if unit == "gain":
        return f"{value:+.1%}"
    if unit == "x":
        return f"x {value:.2f}"
    digits = 0 if abs(value) >= 100 or unit == "requests" else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def error_words(line: TableLine) -> str:
    if line.error is None:
        return ""
    return f"{line.error * 100:+.1f} pt" if line.unit == "gain" else f"{line.error:+.1%}"


HEADS = ("", "unit", "published", "predicted", "error", "line", "note", "source")


def cells(line: TableLine) -> list[str]:
    """Cells of a line, as shown in terminal, page and document."""
    published = "-" if line.published is None else value_words(line.published, line.unit)
    predicted = "-" if line.predicted is None else value_words(line.predicted, line.unit)
    unit = "" if line.unit in ("x", "gain") else line.unit
    return [line.name, unit, published, predicted, error_words(line), line.role, line.note, line.source]


def sources(table: Table) -> list[str]:
    return list(dict.fromkeys(line.source for line in table.lines if line.source))


def summary_words(found: Summary) -> str:
    worst, gain = found.worst, found.worst_gain
    return (
        f"{found.num_validation} validation lines: median error {found.median:.1%}, worst {error_words(worst)} "
        f"({worst.name}); {found.num_gains} validation gains: worst off by {error_words(gain)} ({gain.name})"
    )
