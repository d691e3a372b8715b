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

from tripool.errors import InvalidRequest, TripoolError

if TYPE_CHECKING:
    from tripool.bench.endpoint import Api
    from tripool.bench.report import Report
    from tripool.bench.run import Measured
    from tripool.bench.samples import Sample
    from tripool.bench.summary import Goodput
    from tripool.bench.workload import Shot

_INTERRUPTED = 130
_DEFAULT_CONCURRENCY = 8


class NothingMeasured(TripoolError):
    code = "nothing_measured"


Url = Annotated[str, typer.Option(help="Of the server, with or without /v1.")]
ModelName = Annotated[str | None, typer.Option(help="To name in requests; the server's first when not given.")]
EndpointOf = Annotated[
    Literal["chat", "completions"], typer.Option(help="completions takes token ids: lengths are exact.")
]
Trace = Annotated[Path | None, typer.Option(help="Mooncake JSONL, at its own times unless --rate or --concurrency.")]
Speed = Annotated[float, typer.Option(min=0.001, help="Of a trace's times: 2 sends twice as fast.")]
MaxRequests = Annotated[int | None, typer.Option("--max-requests", min=1, help="Of a trace: only the first ones.")]
ScaleTokens = Annotated[float, typer.Option("--scale-tokens", min=0.0001, help="Of a trace: 0.1 shrinks all lengths.")]
BlockTokens = Annotated[int, typer.Option("--block-tokens", min=1, help="Of a trace: tokens that share a hash id.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Keep this many requests open.")]
Rate = Annotated[float | None, typer.Option(min=0.0001, help="Requests per second, as a Poisson process.")]
Requests = Annotated[int | None, typer.Option(min=1, max=10**6, help="How many, without a trace.")]
InputLen = Annotated[int, typer.Option("--input-len", min=1, max=2**20, help="Prompt tokens, without a trace.")]
OutputLen = Annotated[int, typer.Option("--output-len", min=1, max=2**20, help="Answer tokens, without a trace.")]
Limits = Annotated[str | None, typer.Option(help="SLO in ms, as ttft:500,tpot:50 (or e2e:...).")]
RunSeed = Annotated[int, typer.Option(help="The same seed sends the same prompts at the same times.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of full length.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds that one request may take.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Sent as a bearer token.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every number here.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What to send and how fast, with descriptions for the report."""

    shots: list[Shot]
    concurrency: int | None
    workload: str
    arrival: str


def register(app: typer.Typer) -> None:
    @app.command()
    def bench(
        url: Url = "http://127.0.0.1:8000",
        model: ModelName = None,
        endpoint: EndpointOf = "chat",
        trace: Trace = None,
        speed: Speed = 1.0,
        max_requests: MaxRequests = None,
        scale_tokens: ScaleTokens = 1.0,
        block_tokens: BlockTokens = 512,
        concurrency: Concurrency = None,
        rate: Rate = None,
        requests: Requests = None,
        input_len: InputLen = 512,
        output_len: OutputLen = 128,
        goodput: Limits = None,
        seed: RunSeed = 0,
        ignore_eos: IgnoreEos = True,
        timeout: Timeout = 600.0,
        api_key: ApiKey = None,
        json_file: JsonFile = None,
        html_file: HtmlFile = None,
    ) -> None:
        """Measure any OpenAI endpoint under load: a trace replayed, a fixed concurrency, or Poisson arrivals."""
        from tripool.bench import Goodput, random_shots
        from tripool.cli.bench_report import show, write_files
        from tripool.cli.files import check_folder

        for file in (json_file, html_file):
            check_folder(file)
        limits = Goodput.parse(goodput) if goodput is not None else None
        if trace is not None:
            if requests is not None:
                raise InvalidRequest("--requests is for runs without a trace", hint="use --max-requests")
            shots, workload = _from_trace(trace, speed, max_requests, scale_tokens, block_tokens)
        else:
            if (max_requests, speed, scale_tokens) != (None, 1.0, 1.0):
                raise InvalidRequest("--max-requests, --speed and --scale-tokens need --trace", hint="use --requests")
            shots = random_shots(requests or 100, input_tokens=input_len, output_tokens=output_len)
            workload = f"{input_len:,} tokens in, {output_len:,} out"
        load = _arriving(shots, workload, rate, concurrency, seed, speed, timed=trace is not None)
        measure = _Measure(url, model, endpoint, seed, ignore_eos, timeout, api_key)
        report, interrupted = measure.run(load, limits)
        show(report)
        write_files(report, json_file, html_file)
        if interrupted:
            raise typer.Exit(_INTERRUPTED)
        _complain_if_nothing(report)


def _from_trace(
    path: Path, speed: float, max_requests: int | None, scale_tokens: float, block_tokens: int
) -> tuple[list[Shot], str]:
    from tripool.bench import trace_shots
    from tripool.bench.trace import BadTrace, parse_trace

    try:
        with path.open(encoding="utf-8") as lines:
            requests = parse_trace(lines, block_tokens=block_tokens, max_requests=max_requests)
    except OSError as error:
        raise BadTrace(f"cannot read {path}: {error.strerror}", hint="give a Mooncake JSONL file") from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path} is not UTF-8: {error.reason}", hint="give a Mooncake JSONL file") from error
    except BadTrace as error:
        raise BadTrace(f"{path}: {error.message}", hint=error.hint) from error
    shots = trace_shots(requests, speed=speed, scale_tokens=scale_tokens, block_tokens=block_tokens)
    return shots, path.name + (f", lengths × {scale_tokens:g}" if scale_tokens != 1 else "")


def _arriving(
    shots: list[Shot],
    workload: str,
    rate: float | None,
    concurrency: int | None,
    seed: int,
    speed: float,
    *,
    timed: bool,
) -> _Load:
    from tripool.bench.workload import at_times, poisson_arrivals, without_times

    if rate is not None and concurrency is not None:
        raise InvalidRequest("--rate and --concurrency exclude each other", hint="an open loop or a closed one")
    if speed != 1 and (rate is not None or concurrency is not None):
        raise InvalidRequest("--speed is about the trace's own times", hint="leave out --rate and --concurrency")
    if rate is not None:
        due_s = poisson_arrivals(len(shots), rate=rate, seed=seed)
        arrival = f"Poisson, {rate:g}/s"
        return _Load(shots=at_times(shots, due_s), concurrency=None, workload=workload, arrival=arrival)
    if timed and concurrency is None:
        arrival = "at the trace's times" + (f" × {speed:g}" if speed != 1 else "")
        return _Load(shots=shots, concurrency=None, workload=workload, arrival=arrival)
    width = concurrency or _DEFAULT_CONCURRENCY
    return _Load(shots=without_times(shots), concurrency=width, workload=workload, arrival=f"{width} at once")


@dataclass(frozen=True, slots=True)
class _Measure:
    url: str
    model: str | None
    api: Api
    seed: int
    ignore_eos: bool
    timeout_s: float
    api_key: str | None

    def run(self, load: _Load, limits: Goodput | None) -> tuple[Report, bool]:
        """The report, and whether Ctrl-C ended the run early."""
        from tripool.bench.report import Report, RunSettings
        from tripool.bench.summary import summarise, timeline
        from tripool.cli.bench_report import request_progress

        began = datetime.now().astimezone().isoformat(" ", "seconds")
        with request_progress(len(load.shots), "asking the server") as (describe, ended):
            model, measured, interrupted = _run_fast(self._run(load, describe, ended))
        asked = RunSettings(
            url=self.url,
            model=model,
            endpoint=self.api,
            workload=load.workload,
            load=load.arrival,
            requests=len(load.shots),
            seed=self.seed,
            began=began,
        )
        summary = summarise(
            measured.samples,
            measured.duration_s,
            goodput=limits,
            cancelled=measured.cancelled,
            client_lags_s=measured.client_lags_s,
        )
        slices = timeline(measured.samples, measured.duration_s)
        report = Report(asked=asked, summary=summary, timeline=slices, samples=measured.samples, goodput=limits)
        return report, interrupted

    async def _run(
        self, load: _Load, describe: Callable[[str], None], ended: Callable[[Sample], None]
    ) -> tuple[str, Measured, bool]:
        from tripool.bench.endpoint import BodyMaker, find_model, make_prompts
        from tripool.bench.run import Run
        from tripool.bench.wire import Address, HttpClient

        address = Address.parse(self.url)
        client = HttpClient(address, api_key=self.api_key)
        try:
            model = await find_model(client, address, self.model)
            prompts = await make_prompts(client, self.api, model, self.seed)
            describe(model)
            run = Run(
                client,
                BodyMaker(self.api, model, prompts, self.seed, self.ignore_eos),
                timeout_s=self.timeout_s,
                on_end=ended,
            )
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
