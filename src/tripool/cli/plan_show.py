"""Output of `tripool plan`: tables on stdout, files on request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tripool.cli.files import write_file
from tripool.planner.deployment import write_deployment
from tripool.planner.page import deployment_cells, render_plan
from tripool.planner.report import parts_ms, why
from tripool.planner.rows import Compared, Verdict
from tripool.planner.search import Plan, PlanGoal

_WIDE = 200
_PARTS = 4


def console() -> Console:
    """Wide enough that no row wraps outside of a terminal: in a log, a pipe."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


def show_plan(ask: PlanGoal, plan: Plan, wanted_per_s: float | None) -> None:
    out, best = console(), plan.deployments[0]
    out.print(f"[bold]{ask.model.name} on {ask.chips} x {ask.hardware.title}[/]", markup=True)
    out.print(
        f"{ask.input_tokens:,.0f} tokens in ({ask.cached_share:.1%} cached), {ask.output_tokens:,.0f} out; "
        f"TTFT {ask.ttft_s * 1e3:,.0f} ms, TPOT {ask.tpot_s * 1e3:g} ms; {plan.num_considered:,} combinations"
    )
    table = Table("prefill", "decode")
    for name in ("requests/s", "out tok/s/chip", "TPOT ms", "TTFT ms", f"{ask.money}/M out", "spare", "binds"):
        table.add_column(name, justify="right")
    for found in plan.deployments:
        table.add_row(*deployment_cells(ask, found), str(found.spare_chips), found.bound)
    out.print(table)
    out.print(f"best: {why(best)}")
    lifts = [f"{lever.name} {lever.gain:+.1%}" for lever in best.levers if lever.gain >= 0.005]
    out.print(f"what would raise it: {'; '.join(lifts) if lifts else 'nothing tried changes it by half a per cent'}")
    longest = list(parts_ms(best.decode.step).items())[:_PARTS]
    out.print(
        f"decode step {best.decode.step.seconds * 1e3:.1f} ms: " + ", ".join(f"{n} {ms:.1f}" for n, ms in longest)
    )
    rate = best.requests_per_s * ask.output_tokens
    out.print(
        f"power {best.watts / 1e3:,.1f} kW, {best.watts / rate:.1f} J per output token; transfer plane "
        f"{best.transfer_share:.1%} used; cache pool {best.cache_bytes / 1e9:,.0f} GB for {ask.keep_s / 60:g} minutes"
    )
    if wanted_per_s is not None:
        times = best.requests_per_s / wanted_per_s
        out.print(f"the trace asks for {wanted_per_s:.2f} requests/s on average; this carries {times:,.2f} times that")


def write_plan(ask: PlanGoal, plan: Plan, html_file: Path | None, save_file: Path | None) -> None:
    if html_file is not None:
        write_file(html_file, render_plan(ask, plan))
    if save_file is not None:
        write_file(save_file, write_deployment(ask, plan.deployments[0]))


def show_validation(compared: Sequence[Compared], found: Sequence[Verdict]) -> None:
    out = console()
    table = Table("system", "hardware", "phase")
    for name in ("EP", "batch", "context", "published", "predicted", "error"):
        table.add_column(name, justify="right")
    table.add_column("row")
    for each in compared:
        row, prediction = each.prediction.row, each.prediction
        numbers = (row.ep, row.batch, row.context, row.published, prediction.predicted)
        error = "" if prediction.error is None else f"{prediction.error:+.1%}"
        cells = ("" if value is None else f"{value:,.0f}" for value in numbers)
        name = prediction.hardware.name if prediction.hardware else row.hardware
        table.add_row(row.system, name, row.phase, *cells, error, each.role)
    out.print(table)
    out.print(
        "tok/s per device; rows without a batch (daily averages) or without described hardware: shown, not compared"
    )
    for verdict in found:
        out.print(_line(verdict), markup=True)


def _line(verdict: Verdict) -> str:
    if verdict.median is None or verdict.worst is None:
        return f"{verdict.family}: {verdict.calibration_rows} calibration rows, none to validate"
    median_bar = "" if verdict.median_bar is None else f" (bar {verdict.median_bar:.0%})"
    worst_bar = "" if verdict.worst_bar is None else f" (bar {verdict.worst_bar:.0%})"
    mark = "[green]ok[/]" if verdict.ok else "[red]broken[/]"
    return (
        f"{verdict.family}: {verdict.validation_rows} validation rows, median {verdict.median:.1%}{median_bar}, "
        f"worst {verdict.worst:.1%}{worst_bar}; {verdict.calibration_rows} calibration rows: {mark}"
    )
