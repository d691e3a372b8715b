"""`tripool plan`: ranks deployments of a model on so many chips by an SLO, or validates the predictions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tripool.cli.options import options_from


@dataclass(frozen=True, slots=True)
class PlanOptions:
    model: Annotated[str, typer.Option(help="deepseek-r1, kimi-k2, ...; or the path of a config.json.")] = "deepseek-r1"
    hardware: Annotated[
        str,
        typer.Option(help="ascend-910c, h100, ...; `this` probes; a TOML file; two with +: prefill's and decode's."),
    ] = "ascend-910c"
    chips: Annotated[int, typer.Option(min=1, max=10**6, help="How many there are.")] = 384
    input_len: Annotated[float | None, typer.Option(min=1, help="Mean prompt tokens.")] = None
    output_len: Annotated[float | None, typer.Option(min=1, help="Mean answer tokens.")] = None
    trace: Annotated[
        Path | None, typer.Option(help="As for `simulate`: the distribution of lengths and reuse are taken from it.")
    ] = None
    ttft: Annotated[float, typer.Option(min=0.001, help="Time to the first token, ms.")] = 2000.0
    tpot: Annotated[float, typer.Option(min=0.001, help="Time per output token, ms.")] = 50.0
    cached: Annotated[
        float | None, typer.Option(min=0.0, max=0.999, help="Share of prompts found in the cache pool.")
    ] = None
    precision: Annotated[str | None, typer.Option(help="int8, fp8, fp4, int4 (weights alone) or bf16.")] = None
    accept: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of MTP drafts accepted.")] = None
    price: Annotated[float | None, typer.Option(min=0.0, help="Of one chip for one hour.")] = None
    currency: Annotated[str | None, typer.Option(help="Of --price.")] = None
    simulate: Annotated[
        bool | None,
        typer.Option(
            "--simulate/--no-simulate", help="Check the best in the simulator; without: where it takes < 30 s."
        ),
    ] = None
    validate: Annotated[bool, typer.Option("--validate", help="Print published results beside predictions.")] = False
    rows: Annotated[Path | None, typer.Option(help="With --validate: a CSV of the same columns.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")] = None
    save_file: Annotated[Path | None, typer.Option("--save", help="Write the best deployment here, as TOML.")] = None


def register(app: typer.Typer) -> None:
    @app.command()
    @options_from(PlanOptions)
    def plan(given: PlanOptions) -> None:
        """Rank deployments of a model on described hardware, or check the predictions against published results."""
        from tripool.cli.plan_run import run  # here, so that --help is fast

        run(given)
