"""`tripool simulate`: a deployment in virtual time, in many seeded runs with faults, or with a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tripool.errors import InvalidRequest

TraceOf = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Mooncake .jsonl, Azure .csv, or a ServeGen folder or archive. Without a file, with --seed: print all.",
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="One run only; or of what is drawn for a trace.")]
SyntheticOf = Annotated[int | None, typer.Option("--synthetic", min=1, help="This many synthetic requests, no trace.")]
Rate = Annotated[float | None, typer.Option(min=1e-9, help="Requests per second: of synthetic ones, or of a trace.")]
PrefixShare = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of a synthetic prompt in common with others.")
]
DeploymentOf = Annotated[Path | None, typer.Option("--deployment", help="What `tripool plan --save` wrote.")]
FaultOf = Annotated[
    list[str] | None, typer.Option("--fault", help="Such as chip:decode-0.3@120s+60s; may be given several times.")
]
BeginS = Annotated[float, typer.Option(min=0.0, help="ServeGen: where in its week to begin, in seconds.")]
Length = Annotated[float, typer.Option(min=1.0, help="ServeGen: for how long, in seconds.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report here; `simulate compare` reads it.")]
Ideal = Annotated[bool, typer.Option("--ideal", help="Only summarise the trace and its reuse.")]
Real = Annotated[bool, typer.Option("--compare-real", help="Replay on this machine too, and print the difference.")]


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
    def simulate(
        ctx: typer.Context,
        faults: Annotated[
            bool, typer.Option("--faults", help="Inject faults: kill, stop, slow, cut, fill, restart.")
        ] = False,
        seeds: Annotated[int, typer.Option(min=1, help="How many runs.")] = 100,
        first: Annotated[int, typer.Option(min=0, help="The first of their seeds.")] = 0,
        seed: Seed = None,
        trace: TraceOf = None,
        events: Annotated[bool, typer.Option("--events", hidden=True)] = False,
        workers: Annotated[int | None, typer.Option(min=1, help="Processes; all cores when not given.")] = None,
        synthetic: SyntheticOf = None,
        rate: Rate = None,
        input_len: Annotated[float, typer.Option(min=1, help="Mean synthetic prompt, tokens.")] = 2048.0,
        output_len: Annotated[float, typer.Option(min=1, help="Mean synthetic answer, tokens.")] = 256.0,
        prefix_share: PrefixShare = 0.0,
        tenants: Annotated[int, typer.Option(min=1, help="Synthetic tenants.")] = 1,
        begin: BeginS = 36000.0,
        length: Length = 3600.0,
        max_requests: Annotated[int | None, typer.Option(min=1, help="The first ones of the trace only.")] = None,
        deployment: DeploymentOf = None,
        model: Annotated[str, typer.Option("--model", help="As for `tripool plan`.")] = "deepseek-r1",
        hardware: Annotated[str, typer.Option("--hardware", help="As for `tripool plan`.")] = "ascend-910c",
        chips: Annotated[int, typer.Option(min=1, max=10**6, help="How many there are.")] = 384,
        ttft: Annotated[float, typer.Option(min=0.001, help="TTFT objective, ms.")] = 2000.0,
        tpot: Annotated[float, typer.Option(min=0.001, help="TPOT objective, ms.")] = 50.0,
        fault: FaultOf = None,
        ideal: Ideal = False,
        html_file: HtmlFile = None,
        json_file: JsonFile = None,
        compare_real: Real = False,
    ) -> None:
        """Run router, schedulers and cache index in seeded simulations, or a trace through a whole deployment."""
        if ctx.invoked_subcommand is not None:
            return
        if trace is None and synthetic is None and not compare_real:
            from tripool.cli.simulate_faults import run

            run(faults, seeds, first, seed, events, workers)
            return
        if events or faults:
            hint = "--fault KIND:TARGET@START+LENGTH injects faults into a trace's deployment"
            raise InvalidRequest("--faults and a bare --trace are for seeded runs", hint=hint)
        from tripool.cli import simulate_trace

        if trace is not None and synthetic is not None:
            raise InvalidRequest("--synthetic makes its own requests", hint="leave --trace out")
        asked = simulate_trace.Asked(
            trace=trace, synthetic=synthetic, rate=rate, input_len=input_len, output_len=output_len,
            prefix_share=prefix_share, tenants=tenants, begin_s=begin, length_s=length, seed=seed or 0,
            max_requests=max_requests,
        )  # fmt: skip
        if compare_real:
            from tripool.cli.simulate_real import compare_with_real

            raise typer.Exit(0 if compare_with_real(asked, json_file) else 1)
        if ideal:
            simulate_trace.show_ideal(asked)
            return
        site = simulate_trace.Where(deployment, model, hardware, chips, ttft, tpot)
        simulate_trace.simulate(asked, site, fault or [], html_file, json_file)

    @verbs.command()
    def compare(
        first: Annotated[Path, typer.Argument(help="A report that `--json` wrote.")],
        second: Annotated[Path, typer.Argument(help="Another.")],
        html_file: HtmlFile = None,
    ) -> None:
        """Two simulated runs beside each other."""
        from tripool.cli.simulate_trace import show_comparison

        show_comparison(first, second, html_file)
