"""`tripool simulate`: a deployment in virtual time, in many seeded runs with faults, or with a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tripool.cli.options import options_from
from tripool.errors import InvalidRequest

HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report here; `simulate compare` reads it.")]


@dataclass(frozen=True, slots=True)
class SeededRuns:
    faults: Annotated[bool, typer.Option("--faults", help="Inject faults: kill, stop, slow, cut, fill, restart.")] = (
        False
    )
    hosts: Annotated[int, typer.Option(min=1, help="Machines; with --faults between several also partitions.")] = 1
    seeds: Annotated[int, typer.Option(min=1, help="How many runs.")] = 100
    first: Annotated[int, typer.Option(min=0, help="The first of their seeds.")] = 0
    events: Annotated[bool, typer.Option("--events", hidden=True)] = False
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all cores when not given.")] = None


@dataclass(frozen=True, slots=True)
class Asked:
    """The workload."""

    seed: Annotated[int | None, typer.Option(min=0, help="One run only; or of what is drawn for a trace.")] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="A file or folder of Mooncake, Azure, ServeGen, RAGPulse, WEKA or LMCache. "
            "Without a file, with --seed: print all."
        ),
    ] = None
    synthetic: Annotated[int | None, typer.Option(min=1, help="This many synthetic requests, no trace.")] = None
    rate: Annotated[
        float | None, typer.Option(min=1e-9, help="Requests per second: of synthetic ones, or of a trace.")
    ] = None
    input_len: Annotated[float, typer.Option(min=1, help="Mean synthetic prompt, tokens.")] = 2048.0
    output_len: Annotated[float, typer.Option(min=1, help="Mean synthetic answer, tokens.")] = 256.0
    prefix_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of a synthetic prompt in common with others.")
    ] = 0.0
    tenants: Annotated[int, typer.Option(min=1, help="Synthetic tenants.")] = 1
    begin: Annotated[float, typer.Option(min=0.0, help="ServeGen: where in its week to begin, in seconds.")] = 36000.0
    length: Annotated[float, typer.Option(min=1.0, help="ServeGen: for how long, in seconds.")] = 3600.0
    sessions_per_minute: Annotated[
        float, typer.Option(min=1e-6, help="WEKA: how many sessions start; when is drawn.")
    ] = 1.0
    tokenizer: Annotated[str, typer.Option(help="LMCache: the model whose tokenizer counts, or its folder.")] = "tiny"
    max_requests: Annotated[int | None, typer.Option(min=1, help="The first ones of the trace only.")] = None

    @property
    def title(self) -> str:
        if self.trace is not None:
            return self.trace.name
        return f"{self.synthetic:,} synthetic requests" if self.synthetic else "synthetic requests"


@dataclass(frozen=True, slots=True)
class Where:
    """The deployment, and what goes wrong in it."""

    deployment: Annotated[Path | None, typer.Option(help="What `tripool plan --save` wrote.")] = None
    model: Annotated[str, typer.Option(help="As for `tripool plan`.")] = "deepseek-r1"
    hardware: Annotated[str, typer.Option(help="As for `tripool plan`.")] = "ascend-910c"
    chips: Annotated[int, typer.Option(min=1, max=10**6, help="How many there are.")] = 384
    ttft: Annotated[float, typer.Option(min=0.001, help="TTFT objective, ms.")] = 2000.0
    tpot: Annotated[float, typer.Option(min=0.001, help="TPOT objective, ms.")] = 50.0
    fault: Annotated[
        list[str] | None, typer.Option(help="Such as chip:decode-0.3@120s+60s; may be given several times.")
    ] = None


class _Simulate(TyperGroup):
    """`--trace` without a file prints a run's events."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        after = [*args[1:], "-"]
        bare = [
            "--events" if arg == "--trace" and following.startswith("-") else arg
            for arg, following in zip(args, after, strict=True)
        ]
        parsed: list[str] = super().parse_args(ctx, bare)
        return parsed


def register(app: typer.Typer) -> None:
    verbs = typer.Typer(cls=_Simulate, invoke_without_command=True)
    app.add_typer(verbs, name="simulate")

    @verbs.callback()
    @options_from(SeededRuns, "runs")
    @options_from(Asked, "asked")
    @options_from(Where, "where")
    def simulate(
        ctx: typer.Context,
        runs: SeededRuns,
        asked: Asked,
        where: Where,
        ideal: Annotated[bool, typer.Option("--ideal", help="Only summarise the trace and its reuse.")] = False,
        html_file: HtmlFile = None,
        json_file: JsonFile = None,
        compare_real: Annotated[
            bool, typer.Option("--compare-real", help="Replay on this machine too, and print the difference.")
        ] = False,
    ) -> None:
        """Run router, schedulers and cache index in seeded simulations, or a trace through a whole deployment."""
        if ctx.invoked_subcommand is not None:
            return
        if asked.trace is None and asked.synthetic is None and not compare_real:
            from tripool.cli.simulate_faults import run

            run(runs, asked.seed)
            return
        if runs.events or runs.faults:
            hint = "--fault KIND:TARGET@START+LENGTH injects faults into a trace's deployment"
            raise InvalidRequest("--faults and a bare --trace are for seeded runs", hint=hint)
        from tripool.cli import simulate_trace

        if asked.trace is not None and asked.synthetic is not None:
            raise InvalidRequest("--synthetic makes its own requests", hint="leave --trace out")
        if compare_real:
            from tripool.cli.simulate_real import compare_with_real

            raise typer.Exit(0 if compare_with_real(asked, json_file) else 1)
        if ideal:
            simulate_trace.show_ideal(asked)
        else:
            simulate_trace.simulate(asked, where, html_file, json_file)

    @verbs.command()
    def compare(
        first: Annotated[Path, typer.Argument(help="A report that `--json` wrote.")],
        second: Annotated[Path, typer.Argument(help="Another.")],
        html_file: HtmlFile = None,
    ) -> None:
        """Two simulated runs beside each other."""
        from tripool.cli.simulate_trace import show_comparison

        show_comparison(first, second, html_file)
