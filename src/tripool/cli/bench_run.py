"""A run of `tripool bench`: its load, progress on stderr, tables on stdout, files on request."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tripool.bench.endpoint import BodyMaker, find_model, make_prompts
from tripool.bench.page import render_page
from tripool.bench.report import Report, RunSettings, summary_rows
from tripool.bench.run import Measured, Run
from tripool.bench.samples import Sample
from tripool.bench.summary import PERCENTILES, Goodput, summarise, timeline
from tripool.bench.wire import Address, HttpClient
from tripool.bench.workload import Shot, at_times, poisson_arrivals, random_shots, trace_shots, without_times
from tripool.cli.bench import BenchOptions
from tripool.cli.files import check_folder, write_file
from tripool.cli.terminal import harmless, progress
from tripool.cli.trace_files import TraceOptions, read_trace
from tripool.errors import InvalidRequest, TripoolError

_INTERRUPTED = 130
_DEFAULT_CONCURRENCY = 8


class NothingMeasured(TripoolError, code="nothing_measured"):
    """No request of a load test was served."""


@dataclass(frozen=True, slots=True)
class _Load:
    """What to send and how fast, with descriptions for the report."""

    shots: list[Shot]
    concurrency: int | None
    workload: str
    arrival: str


def run(given: BenchOptions) -> None:
    for file in (given.json_file, given.html_file):
        check_folder(file)
    limits = Goodput.parse(given.goodput) if given.goodput is not None else None
    report, interrupted = _measure(given, _load(given), limits)
    show(report)
    if given.json_file is not None:
        write_file(given.json_file, json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n")
    if given.html_file is not None:
        write_file(given.html_file, render_page(report))
    if interrupted:
        raise typer.Exit(_INTERRUPTED)
    _complain_if_nothing(report)


def _load(given: BenchOptions) -> _Load:
    if given.trace is not None:
        if given.requests is not None:
            raise InvalidRequest("--requests is for runs without a trace", hint="use --max-requests")
        return _arriving(given, *_from_trace(given, given.trace))
    if (given.max_requests, given.speed, given.scale_tokens) != (None, 1.0, 1.0):
        raise InvalidRequest("--max-requests, --speed and --scale-tokens need --trace", hint="use --requests")
    shots = random_shots(given.requests or 100, input_tokens=given.input_len, output_tokens=given.output_len)
    return _arriving(given, shots, f"{given.input_len:,} tokens in, {given.output_len:,} out")


def _from_trace(given: BenchOptions, path: Path) -> tuple[list[Shot], str]:
    options = TraceOptions(max_requests=given.max_requests, seed=given.seed, block_tokens=given.block_tokens)
    requests = list(read_trace(path, options).requests())
    scale = given.scale_tokens
    shots = trace_shots(requests, speed=given.speed, scale_tokens=scale)
    return shots, path.name + (f", lengths × {scale:g}" if scale != 1 else "")


def _arriving(given: BenchOptions, shots: list[Shot], workload: str) -> _Load:
    rate, concurrency, speed = given.rate, given.concurrency, given.speed
    if rate is not None and concurrency is not None:
        raise InvalidRequest("--rate and --concurrency exclude each other", hint="an open loop or a closed one")
    if speed != 1 and (rate is not None or concurrency is not None):
        raise InvalidRequest("--speed is about the trace's own times", hint="leave out --rate and --concurrency")
    if rate is not None:
        due_s = poisson_arrivals(len(shots), rate=rate, seed=given.seed)
        return _Load(at_times(shots, due_s), None, workload, f"Poisson, {rate:g}/s")
    if given.trace is not None and concurrency is None:
        return _Load(shots, None, workload, "at the trace's times" + (f" × {speed:g}" if speed != 1 else ""))
    width = concurrency or _DEFAULT_CONCURRENCY
    return _Load(without_times(shots), width, workload, f"{width} at once")


def _measure(given: BenchOptions, load: _Load, limits: Goodput | None) -> tuple[Report, bool]:
    """The report, and whether Ctrl-C ended the run early."""
    began = datetime.now().astimezone().isoformat(" ", "seconds")
    with request_progress(len(load.shots), "asking the server") as (describe, ended):
        model, measured, interrupted = _run_fast(_run(given, load, describe, ended))
    asked = RunSettings(
        url=given.url, model=model, endpoint=given.endpoint, workload=load.workload, load=load.arrival,
        requests=len(load.shots), seed=given.seed, began=began,
    )  # fmt: skip
    summary = summarise(
        measured.samples, measured.duration_s, goodput=limits, cancelled=measured.cancelled,
        client_lags_s=measured.client_lags_s,
    )  # fmt: skip
    slices = timeline(measured.samples, measured.duration_s)
    report = Report(asked=asked, summary=summary, timeline=slices, samples=measured.samples, goodput=limits)
    return report, interrupted


async def _run(
    given: BenchOptions, load: _Load, describe: Callable[[str], None], ended: Callable[[Sample], None]
) -> tuple[str, Measured, bool]:
    address = Address.parse(given.url)
    client = HttpClient(address, api_key=given.api_key)
    try:
        model = await find_model(client, address, given.model)
        prompts = await make_prompts(client, given.endpoint, model, given.seed)
        describe(model)
        bodies = BodyMaker(given.endpoint, model, prompts, given.seed, given.ignore_eos)
        run = Run(client, bodies, timeout_s=given.timeout, on_end=ended)
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the program at once
            interrupted.set()
            run.stop()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            measured = await run.go(load.shots, concurrency=load.concurrency)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        return model, measured, interrupted.is_set()
    finally:
        client.close()


def _run_fast(work: Coroutine[Any, Any, tuple[str, Measured, bool]]) -> tuple[str, Measured, bool]:
    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):  # not on every system; asyncio's own loop is slower
        from uvloop import new_event_loop

        make_loop = new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(work)


def _complain_if_nothing(report: Report) -> None:
    if report.summary.completed == 0:
        kind = next(iter(report.summary.errors), "no request ended")
        detail = next((sample.detail for sample in report.samples if sample.error == kind), "")
        hint = "is `tripool serve` running?" if kind == "refused" else "the table above counts all kinds"
        raise NothingMeasured(f"no request was served: {kind}: {detail}", hint=hint)


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
