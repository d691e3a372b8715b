"""`tripool plan --validate`: published rows beside predictions, bars of each family, leave-one-family-out errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tripool.cli.files import read_file
from tripool.planner.models import ModelShape
from tripool.planner.report import unseen_data, validation_data
from tripool.planner.rows import Compared, Verdict, bundled_rows, compare_rows, parse_rows, unseen, verdicts
from tripool.planner.rows.calibrating import LeftOut, leave_family_out
from tripool.planner.rows.judging import (
    HELD_OUT,
    MEDIAN_LEFT_OUT,
    MEDIAN_UNSEEN,
    PLAIN_MODEL,
    SEEN,
    SHARE_UNSEEN,
    TABLES,
    UNSEEN,
    WITHIN_UNSEEN,
    Unseen,
)


def validate(model: ModelShape, rows: Path | None, as_json: bool, out: Console) -> bool:
    """Whether every bar holds."""
    if rows is None:
        table = [row for name in TABLES for row in bundled_rows(name)]
    else:
        table = parse_rows(read_file(rows), str(rows))
    compared = compare_rows(table, model)
    found = verdicts(compared)
    left_out = leave_family_out(table, model) if rows is None and model.name == PLAIN_MODEL else []
    names = (UNSEEN, SEEN, HELD_OUT)
    later, seen, held_out = (compare_rows(bundled_rows(name), model) if rows is None else [] for name in names)
    holds = all(each.ok for each in found) and (not left_out or median_left_out(left_out) <= MEDIAN_LEFT_OUT)
    if as_json:
        typer.echo(
            json.dumps(
                validation_data(compared, found, left_out)
                | {name: unseen_data(each) for name, each in zip(names, (later, seen, held_out), strict=True)}
                | {"ok": holds},
                indent=1,
            )
        )
    else:
        _show_rows([*compared, *later, *seen, *held_out], out)
        _show(found, left_out, out)
        _show_unseen("rows that fixed no constant", unseen(later or compared), out)
        _show_unseen("rows found after those, looked at since", unseen(seen), out)
        _show_unseen("rows found last and predicted once", unseen(held_out), out)
    return holds


def median_left_out(left_out: Sequence[LeftOut]) -> float:
    return median(abs(error) for each in left_out for error in each.errors.values())


def _show_rows(compared: Sequence[Compared], out: Console) -> None:
    table = Table("system", "hardware", "phase")
    for name in ("EP", "batch", "context", "published", "predicted", "error"):
        table.add_column(name, justify="right")
    table.add_column("row")
    for each in compared:
        row, prediction = each.prediction.row, each.prediction
        numbers = (row.ep, row.batch, row.context, prediction.published, prediction.predicted)
        error = "" if prediction.error is None else f"{prediction.error:+.1%}"
        cells = ("" if value is None else f"{value:,.0f}" for value in numbers)
        name = prediction.hardware.name if prediction.hardware else row.hardware
        role = f"{each.role}: {prediction.reason}" if prediction.reason else each.role
        table.add_row(*map(escape, (row.system, name, row.phase, *cells, error, role)))
    out.print(table)
    out.print("tok/s per device; shown: not compared, for the reason beside it")


def _show(found: Sequence[Verdict], left_out: Sequence[LeftOut], out: Console) -> None:
    for verdict in found:
        out.print(_line(verdict), markup=True)
    if left_out:
        _show_left_out(left_out, out)


def _show_left_out(left_out: Sequence[LeftOut], out: Console) -> None:
    table = Table("family left out", "constants", title="with no constant fixed by the family's own rows")
    for name in ("rows", "median", "worst"):
        table.add_column(name, justify="right")
    for each in left_out:
        worst = max(abs(error) for error in each.errors.values())
        table.add_row(each.family, each.fixed_by, str(len(each.errors)), f"{each.median:.1%}", f"{worst:.1%}")
    out.print(table)
    middle = median_left_out(left_out)
    mark = "[green]ok[/]" if middle <= MEDIAN_LEFT_OUT else "[red]broken[/]"
    out.print(f"median of all: {middle:.1%} (bar {MEDIAN_LEFT_OUT:.0%}) {mark}", markup=True)


def _show_unseen(name: str, found: Unseen | None, out: Console) -> None:
    if found is None:
        return
    mark = "[green]ok[/]" if found.ok else "[yellow]not met[/]"
    out.print(
        f"{found.rows} {name}: median {found.median:.1%} (bar {MEDIAN_UNSEEN:.0%}), "
        f"{found.share:.0%} within {WITHIN_UNSEEN:.0%} (bar {SHARE_UNSEEN:.0%}) {mark}",
        markup=True,
    )


def _line(verdict: Verdict) -> str:
    rows = f"{verdict.family}: {verdict.calibration_rows} calibration and {verdict.validation_rows} validation rows"
    if verdict.median is None or verdict.worst is None:
        return f"{rows}: nothing to validate"
    if verdict.worst_bar is None:
        return f"{rows}, median {verdict.median:.1%}, worst {verdict.worst:.1%} (no bar)"
    median_bar = "" if verdict.median_bar is None else f" (bar {verdict.median_bar:.0%})"
    mark = "[green]ok[/]" if verdict.ok else "[red]broken[/]"
    worst = f"worst {verdict.worst:.1%} (bar {verdict.worst_bar:.0%})"
    return f"{rows}, median {verdict.median:.1%}{median_bar}, {worst} {mark}"
