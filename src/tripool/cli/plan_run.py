"""A run of `tripool plan`: reads model, hardware and workload; tables on stdout, files on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tripool.bench.trace import TraceRequest, Workload, measure_trace
from tripool.cli.files import read_file, write_file
from tripool.cli.plan import PlanOptions
from tripool.cli.plan_simulate import AUTOMATIC_S, Saturated, saturate, takes_s
from tripool.cli.plan_validate import validate
from tripool.cli.terminal import stderr
from tripool.cli.trace_files import read_trace
from tripool.errors import InvalidRequest
from tripool.planner.deployment import write_deployment
from tripool.planner.errors import BadModelConfig
from tripool.planner.hardware import Hardware, named_hardware, parse_hardware
from tripool.planner.models import ModelShape, named_model, read_config
from tripool.planner.page import deployment_cells, ranked_heads, render_plan
from tripool.planner.probe import describe, probe
from tripool.planner.report import (
    band_words,
    compared_with_shared,
    economy_words,
    parts_ms,
    plan_data,
    sources_words,
    why,
)
from tripool.planner.search import Deployment, Lengths, Plan, PlanGoal, make_plan

_BROKEN = 1
_WIDE = 200
_PARTS = 4
MOST_CACHED = 0.9999
"""Of a trace that asks only what it has asked before."""


def run(given: PlanOptions) -> None:
    if given.validate:
        holds = validate(planned_model(given.model), given.rows, given.as_json, console())
        raise typer.Exit(0 if holds else _BROKEN)
    if given.rows is not None:
        raise InvalidRequest("--rows is for --validate", hint="add --validate", param="rows")
    asks = _requests(given)
    work = measure_trace(asks) if asks else _means(given)
    hardware, plus, other = (given.hardware, "", "") if Path(given.hardware).exists() else given.hardware.partition("+")
    goal = PlanGoal(
        model=planned_model(given.model), hardware=planned_hardware(hardware), chips=given.chips,
        decode_hardware=planned_hardware(other) if plus else None,
        input_tokens=work.input_tokens, output_tokens=work.output_tokens, lengths=lengths_of(work, given.cached),
        cached_share=min(MOST_CACHED, work.cached_share) if given.cached is None else given.cached,
        ttft_s=given.ttft / 1e3, tpot_s=given.tpot / 1e3, precision=given.precision, accept=given.accept,
        price_per_hour=given.price, currency=given.currency,
    )  # fmt: skip
    found = make_plan(goal)
    if given.html_file is not None:
        write_file(given.html_file, render_plan(goal, found))
    _save(given.save_file, goal, found.deployments[0])
    simulated, unsimulated = _simulated(given.simulate, goal, found.deployments[0], asks)
    if given.as_json:
        data = plan_data(goal, found) | {"simulated": simulated.data() if simulated else None}
        typer.echo(json.dumps(data, indent=1))
    else:
        show_plan(goal, found, work.requests_per_s)
        console().print(simulated.words() if simulated else unsimulated)


def _requests(given: PlanOptions) -> list[TraceRequest]:
    """Of the trace, in every format that `simulate` reads; empty without one."""
    if given.trace is None:
        return []
    if given.input_len is not None or given.output_len is not None:
        raise InvalidRequest("--trace has its own lengths", hint="leave --input-len and --output-len out")
    return list(read_trace(given.trace).requests())


def _means(given: PlanOptions) -> Workload:
    return Workload(input_tokens=given.input_len or 4096.0, output_tokens=given.output_len or 1024.0)


def lengths_of(work: Workload, cached: float | None = None) -> Lengths | None:
    """Of a trace; `cached` is the share of every prompt that is cached, whatever the trace repeats."""
    if not work.num_requests:
        return None
    return Lengths(
        input_square=work.input_square, decode_context=work.decode_context, held=work.held,
        cached_square=work.cached_square if cached is None else cached**2 * work.input_square,
        held_spread=work.held_spread, longest=work.longest, longest_input=work.longest_input,
        popular=work.popular_share if cached is None else 0.0,
    )  # fmt: skip


def _save(file: Path | None, goal: PlanGoal, found: Deployment) -> None:
    """One file for each cell; all but the first have a number in their names."""
    for index, cell in enumerate(found.cells if file is not None else ()):
        assert file is not None
        name = file if not index else file.with_name(f"{file.stem}-{index + 1}{file.suffix}")
        write_file(name, write_deployment(goal, found, cell))
        if len(found.cells) > 1:
            stderr().print(f"cell {index + 1} of {len(found.cells)}, {cell.chips} chips: {name}")


def _simulated(
    wanted: bool | None, goal: PlanGoal, found: Deployment, asks: Sequence[TraceRequest]
) -> tuple[Saturated | None, str]:
    """The check, or why there is none."""
    if wanted is False:
        return None, "not simulated"
    if goal.decode_hardware is not None:
        return None, "not simulated: two kinds of hardware are not modelled there"
    cell = next((cell for cell in found.cells if not cell.shared), None)
    if cell is None:
        return None, "not simulated: one pool that does both prefill and decode is not modelled there"
    if goal.cached_share and not asks:
        return None, "not simulated: --cached does not say which prompts share a prefix; a --trace does"
    seconds = takes_s(goal, cell, asks)
    if wanted is None and seconds > AUTOMATIC_S:
        return None, f"not simulated: that takes about {seconds:,.0f} s; --simulate does it"
    return saturate(goal, found, cell, asks), ""


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


def console() -> Console:
    """Wide enough that no row wraps outside of a terminal: in a log, a pipe."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_WIDE)


def show_plan(ask: PlanGoal, plan: Plan, wanted_per_s: float | None) -> None:
    out, best = console(), plan.deployments[0]
    out.print(f"[bold]{ask.model.name} on {ask.chips} x {ask.title}[/]", markup=True)
    out.print(
        f"{ask.input_tokens:,.0f} tokens in ({ask.cached_share:.1%} cached), {ask.output_tokens:,.0f} out; "
        f"TTFT {ask.ttft_s * 1e3:,.0f} ms, TPOT {ask.tpot_s * 1e3:g} ms; {plan.num_considered:,} combinations"
    )
    out.print(f"{band_words(ask, best)}; {'; '.join(map(sources_words, ask.kinds))}")
    table = Table("prefill", "decode")
    for name in ranked_heads(ask):
        table.add_column(name, justify="right")
    for found in plan.deployments:
        table.add_row(*deployment_cells(ask, found))
    out.print(table)
    out.print(f"best: {why(best.main)}")
    out.print(compared_with_shared(plan))
    lifts = [f"{lever.name} {lever.gain:+.1%}" for lever in best.levers if lever.gain >= 0.005]
    out.print(f"what would raise it: {'; '.join(lifts) if lifts else 'nothing tried changes it by half a per cent'}")
    step = best.main.decode.step
    longest = list(parts_ms(step).items())[:_PARTS]
    out.print(f"decode step {step.seconds * 1e3:.1f} ms: " + ", ".join(f"{n} {ms:.1f}" for n, ms in longest))
    out.print(economy_words(ask, best))
    out.print(
        f"transfer plane {best.main.transfer_share:.1%} used; cache pool {best.cache_bytes / 1e9:,.0f} GB for "
        f"{ask.keep_s / 60:g} minutes"
    )
    if wanted_per_s is not None:
        times = best.requests_per_s / wanted_per_s
        out.print(f"the trace asks for {wanted_per_s:.2f} requests/s on average; this carries {times:,.2f} times that")
