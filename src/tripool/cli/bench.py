"""`tripool bench`: generates load on any OpenAI endpoint; a table, a JSON file, a page with plots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from tripool.cli.options import options_from


@dataclass(frozen=True, slots=True)
class BenchOptions:
    url: Annotated[str, typer.Option(help="Of the server, with or without /v1.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="To name in requests; the server's first when not given.")] = None
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="completions takes token ids: lengths are exact.")
    ] = "chat"
    trace: Annotated[
        Path | None, typer.Option(help="As for simulate, at its own times unless --rate or --concurrency.")
    ] = None
    speed: Annotated[float, typer.Option(min=0.001, help="Of a trace's times: 2 sends twice as fast.")] = 1.0
    max_requests: Annotated[int | None, typer.Option(min=1, help="Of a trace: only the first ones.")] = None
    scale_tokens: Annotated[float, typer.Option(min=0.0001, help="Of a trace: 0.1 shrinks all lengths.")] = 1.0
    block_tokens: Annotated[int, typer.Option(min=1, help="Of a Mooncake trace: tokens that share a hash id.")] = 512
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


def register(app: typer.Typer) -> None:
    @app.command()
    @options_from(BenchOptions)
    def bench(given: BenchOptions) -> None:
        """Measure any OpenAI endpoint under load: a trace replayed, a fixed concurrency, or Poisson arrivals."""
        from tripool.cli.bench_run import run  # here, so that --help is fast

        run(given)
