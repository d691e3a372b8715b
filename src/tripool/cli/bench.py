"""`tripool bench`: generates load on any OpenAI endpoint; a table, a JSON file, a page with plots."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tripool.cli.files import check_folder
from tripool.cli.options import options_from
from tripool.errors import InvalidRequest, TripoolError

if TYPE_CHECKING:
    from tripool.bench.report import Report
    from tripool.bench.run import Measured
    from tripool.bench.samples import Sample
    from tripool.bench.summary import Goodput
    from tripool.bench.workload import Shot

_INTERRUPTED = 130
_DEFAULT_CONCURRENCY = 8


class NothingMeasured(TripoolError):
    code = "nothing_measured"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    url: Annotated[str, typer.Option(help="Of the server, with or without /v1.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="To name in requests; the server's first when not given.")] = None
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="completions takes token ids: lengths are exact.")
    ] = "chat"
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake JSONL, at its own times unless --rate or --concurrency.")
    ] = None
    speed: Annotated[float, typer.Option(min=0.001, help="Of a trace's times: 2 sends twice as fast.")] = 1.0
    max_requests: Annotated[int | None, typer.Option(min=1, help="Of a trace: only the first ones.")] = None
    scale_tokens: Annotated[float, typer.Option(min=0.0001, help="Of a trace: 0.1 shrinks all lengths.")] = 1.0
    block_tokens: Annotated[int, typer.Option(min=1, help="Of a trace: tokens that share a hash id.")] = 512
    concurrency: Annotated[int | None, typer.Option(min=1, help="Keep this many requests open.")] = None
    rate: Annotated[float | None, typer.Option(min=0.0001, help="Requests per second, as a Poisson process.")] = None
    requests: Annotated[int | None, typer.Option(min=1, max=10**6, help="How many, without a trace.")] = None
    input_len: Annotated[int, typer.Option(min=1, max=2**20, help="Prompt tokens, without a trace.")] = 512
    output_len: Annotated[int, typer.Option(min=1, max=2**20, help="Answer tokens, without a trace.")] = 128
    goodput: Annotated[str | None, typer.Option(help="SLO in ms, as ttft:500,tpot:50 (or e2e:...).")] = None
    seed: Annotated[int, typer.Option(help="The same seed sends the same prompts at the same times.")] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of full length.")
    ] = True
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that one request may take.")] = 600.0
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number here.")] = None
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")] = None


@dataclass(frozen=True, slots=True)
class _Load:
    """What to send and how fast, with descriptions for the report."""

    shots: list[Shot]
    concurrency: int | None
    workload: str
    arrival: str


def register(app: typer.Typer) -> None:
    @app.command()
    @options_from(BenchOptions)
    def bench(given: BenchOptions) -> None:
        """Measure any OpenAI endpoint under load: a trace replayed, a fixed concurrency, or Poisson arrivals."""
        from tripool.bench import Goodput
        from tripool.cli.bench_report import show, write_files

        for file in (given.json_file, given.html_file):
            check_folder(file)
        limits = Goodput.parse(given.goodput) if given.goodput is not None else None
        report, interrupted = _measure(given, _load(given), limits)
        show(report)
        write_files(report, given.json_file, given.html_file)
        if interrupted:
            raise typer.Exit(_INTERRUPTED)
        _complain_if_nothing(report)


def _load(given: BenchOptions) -> _Load:
    from tripool.bench import random_shots

    if given.trace is not None:
        if given.requests is not None:
            raise InvalidRequest("--requests is for runs without a trace", hint="use --max-requests")
        return _arriving(given, *_from_trace(given, given.trace))
    if (given.max_requests, given.speed, given.scale_tokens) != (None, 1.0, 1.0):
        raise InvalidRequest("--max-requests, --speed and --scale-tokens need --trace", hint="use --requests")
    shots = random_shots(given.requests or 100, input_tokens=given.input_len, output_tokens=given.output_len)
    return _arriving(given, shots, f"{given.input_len:,} tokens in, {given.output_len:,} out")


def _from_trace(given: BenchOptions, path: Path) -> tuple[list[Shot], str]:
    from tripool.bench import trace_shots
    from tripool.bench.trace import BadTrace, parse_trace

    try:
        with path.open(encoding="utf-8") as lines:
            requests = parse_trace(lines, block_tokens=given.block_tokens, max_requests=given.max_requests)
    except OSError as error:
        raise BadTrace(f"cannot read {path}: {error.strerror}", hint="give a Mooncake JSONL file") from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path} is not UTF-8: {error.reason}", hint="give a Mooncake JSONL file") from error
    except BadTrace as error:
        raise BadTrace(f"{path}: {error.message}", hint=error.hint) from error
    scale = given.scale_tokens
    shots = trace_shots(requests, speed=given.speed, scale_tokens=scale, block_tokens=given.block_tokens)
    return shots, path.name + (f", lengths × {scale:g}" if scale != 1 else "")


def _arriving(given: BenchOptions, shots: list[Shot], workload: str) -> _Load:
    from tripool.bench.workload import at_times, poisson_arrivals, without_times

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
    from tripool.bench.report import Report, RunSettings
    from tripool.bench.summary import summarise, timeline
    from tripool.cli.bench_report import request_progress

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
    from tripool.bench.endpoint import BodyMaker, find_model, make_prompts
    from tripool.bench.run import Run
    from tripool.bench.wire import Address, HttpClient

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
