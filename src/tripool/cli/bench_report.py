"""Output of `tripool bench`: progress on stderr, tables on stdout, files on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tripool.bench.page import render_page
from tripool.bench.report import Report, summary_rows
from tripool.bench.summary import PERCENTILES
from tripool.cli.files import write_file
from tripool.cli.terminal import harmless, progress

if TYPE_CHECKING:
    from tripool.bench.samples import Sample


@contextmanager
def request_progress(total: int, first: str) -> Iterator[tuple[Callable[[str], None], Callable[[Sample], None]]]:
    """Two functions: one sets the description, the other takes each ended request."""
    with progress(first, total, TimeElapsedColumn(), TextColumn("{task.fields[note]}")) as update:
        failed = 0

        def ended(sample: Sample) -> None:
            nonlocal failed
            failed += not sample.ok
            update(advance=1, note=f"{failed:,} failed" if failed else "")

        yield (lambda text: update(description=harmless(text))), ended


def show(report: Report) -> None:
    console, asked = Console(highlight=False), report.asked
    console.print(Text(harmless(f"{asked.model} at {asked.url}: {asked.workload}, {asked.load}"), style="bold"))
    facts = Table.grid(padding=(0, 2))
    for name, value in summary_rows(report):
        facts.add_row(Text(name, style="dim"), Text(value))
    console.print(facts)
    latencies = Table("milliseconds", *("mean", *(f"p{percent}" for percent in PERCENTILES), "max"))
    for column in latencies.columns[1:]:
        column.justify = "right"
    summary = report.summary
    rows = (
        ("first token", summary.ttft_ms),
        ("per token", summary.tpot_ms),
        ("between events", summary.itl_ms),
        ("whole request", summary.e2e_ms),
        ("sent late", summary.late_ms),
    )
    for name, found in rows:
        if found is not None:
            latencies.add_row(name, *found.cells())
    console.print(latencies)
    details = {sample.error: sample.detail for sample in reversed(report.samples) if sample.error is not None}
    for kind, count in summary.errors.items():
        message = f"failed, {count:,} times: {kind}: {details[kind]}"
        console.print(Text(harmless(message), style="red"), soft_wrap=True)
    for warning in summary.warnings:
        console.print(Text(f"note: {warning}", style="yellow"), soft_wrap=True)


def write_files(report: Report, json_file: Path | None, html_file: Path | None) -> None:
    if json_file is not None:
        write_file(json_file, json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n")
    if html_file is not None:
        write_file(html_file, render_page(report))
