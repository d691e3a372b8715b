"""A run of `tripool plan`: reads model, hardware and workload; tables on stdout, files on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tripool.bench.trace import Workload, measure_trace, parse_trace
from tripool.cli.files import read_file, write_file
from tripool.cli.plan import PlanOptions
from tripool.cli.plan_validate import validate
from tripool.errors import InvalidRequest
from tripool.planner.deployment import write_deployment
from tripool.planner.errors import BadModelConfig
from tripool.planner.hardware import Hardware, named_hardware, parse_hardware
from tripool.planner.models import ModelShape, named_model, read_config
from tripool.planner.page import deployment_cells, render_plan
from tripool.planner.probe import describe, probe
from tripool.planner.report import parts_ms, plan_data, why
from tripool.planner.rows import band_of
from tripool.planner.search import Plan, PlanGoal, make_plan

_BROKEN = 1
_WIDE = 200
_PARTS = 4


def run(given: PlanOptions) -> None:
    if given.validate:
        holds = validate(planned_model(given.model), given.rows, given.as_json, console())
        raise typer.Exit(0 if holds else _BROKEN)
    if given.rows is not None:
        raise InvalidRequest("--rows is for --validate", hint="add --validate", param="rows")
    work = _workload(given.trace, given.input_len, given.output_len)
    goal = PlanGoal(
        model=planned_model(given.model), hardware=planned_hardware(given.hardware), chips=given.chips,
        input_tokens=work.input_tokens, output_tokens=work.output_tokens,
        cached_share=work.cached_share if given.cached is None else given.cached, ttft_s=given.ttft / 1e3,
        tpot_s=given.tpot / 1e3, precision=given.precision, accept=given.accept, price_per_hour=given.price,
        currency=given.currency,
    )  # fmt: skip
    found = make_plan(goal)
    if given.html_file is not None:
        write_file(given.html_file, render_plan(goal, found))
    write_file(given.save_file, write_deployment(goal, found.deployments[0]))
    if given.as_json:
        typer.echo(json.dumps(plan_data(goal, found), indent=1))
    else:
        show_plan(goal, found, work.requests_per_s)


def planned_model(name: str) -> ModelShape:
    path = Path(name)
    if path.suffix != ".json" and not path.is_dir():
        return named_model(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(read_file(file))
    except ValueError as error:
        raise BadModelConfig(f"{file} is not JSON: {error}", hint="a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise BadModelConfig(f"{file} is not an object", hint="a Hugging Face config.json")
    return read_config(config, file.parent.name if file.name == "config.json" else file.stem)


def planned_hardware(name: str) -> Hardware:
    if name == "this":
        return parse_hardware(describe(probe()), "probe")
    if name.endswith(".toml"):
        return parse_hardware(read_file(Path(name)), name)
    return named_hardware(name)


def _workload(trace: Path | None, input_len: float | None, output_len: float | None) -> Workload:
    if trace is not None:
        if input_len is not None or output_len is not None:
            raise InvalidRequest("--trace has its own lengths", hint="leave --input-len and --output-len out")
        return measure_trace(parse_trace(read_file(trace).splitlines()))
    return Workload(input_tokens=input_len or 4096.0, output_tokens=output_len or 1024.0)


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
    slower = {"TPOT ms": best.tpot_s * 1e3, "TTFT ms": best.ttft_s * 1e3}
    if best.cost_per_million:
        slower[f"{ask.money}/M out"] = best.cost_per_million
    out.print(band_of(ask.hardware).beside({"requests/s": best.requests_per_s}, slower))
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
