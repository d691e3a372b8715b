"""`tripool simulate --trace`: reads a workload, simulates it with progress, shows and writes the results."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TimeElapsedColumn
from rich.table import Table

from tripool.bench.trace import Workload, measure_trace
from tripool.cli.files import read_file, write_file
from tripool.cli.plan_run import MOST_CACHED, lengths_of, planned_hardware, planned_model
from tripool.cli.simulate import Asked, Where
from tripool.cli.terminal import progress
from tripool.cli.trace_files import Trace, TraceOptions, read_trace
from tripool.errors import InvalidRequest
from tripool.planner.deployment import DeploymentFile, read_deployment, write_deployment
from tripool.planner.search import PlanGoal, make_plan
from tripool.simulate.supernode import lay_out, parse_fault, simulate_trace
from tripool.simulate.supernode.page import render_comparison, render_run
from tripool.simulate.supernode.rows import NOT_IN_TRACE, compared_rows, summary_rows
from tripool.simulate.traces import Synthetic

_SLICES = 120


def read_requests(asked: Asked) -> Trace:
    """Synthetic requests are drawn anew for each pass: they are never all in memory."""
    if asked.synthetic is not None:
        made_up = Synthetic(
            requests=asked.synthetic, rate_per_s=asked.rate or 10.0, input_tokens=asked.input_len,
            output_tokens=asked.output_len, prefix_share=asked.prefix_share, tenants=asked.tenants,
            seed=asked.seed or 0,
        )  # fmt: skip
        return Trace("synthetic", made_up.draw)
    assert asked.trace is not None
    return read_trace(asked.trace, trace_options(asked))


def trace_options(asked: Asked) -> TraceOptions:
    return TraceOptions(
        max_requests=asked.max_requests, rate=asked.rate, seed=asked.seed or 0, begin_s=asked.begin,
        length_s=asked.length, sessions_per_minute=asked.sessions_per_minute, tokenizer=asked.tokenizer,
    )  # fmt: skip


def show_ideal(asked: Asked) -> None:
    trace, console = read_requests(asked), Console()
    console.print(_summary(measure_trace(trace.requests())), soft_wrap=True)
    for note in trace.notes:
        console.print(note, soft_wrap=True)


def _summary(found: Workload) -> str:
    reuse = f"{found.cached_block_share:.1%} of blocks, {found.cached_share:.1%} of tokens"
    return (
        f"{found.num_requests:,} requests in {found.span_s:,.0f} s, {found.input_tokens:,.0f} tokens in and "
        f"{found.output_tokens:,.0f} out on average; asked before: {reuse if found.names_blocks else NOT_IN_TRACE}"
    )


def simulate(asked: Asked, where: Where, html_file: Path | None, json_file: Path | None) -> None:
    trace = read_requests(asked)
    work = measure_trace(trace.requests())
    file = _deployment(where, work)
    hardware, model = planned_hardware(file.hardware), planned_model(file.model)
    layout = lay_out(file, hardware, model, block_tokens=work.block_tokens)
    struck = [parse_fault(text, layout) for text in where.fault or []]
    began_s = time.process_time()
    console = Console()
    console.print(f"{layout.title}; {asked.title}: {_summary(work)}", soft_wrap=True)
    for note in trace.notes:
        console.print(note, soft_wrap=True)
    with progress("simulating", work.num_requests, TimeElapsedColumn(), transient=True) as update, uncollected():
        data = simulate_trace(
            layout, trace.requests(), trace=asked.title, notes=trace.notes, faults=struck, most_blocks=work.num_blocks,
            slice_s=max(0.5, work.span_s / _SLICES), progress=lambda done: update(completed=done),
        )  # fmt: skip
    write_file(json_file, json.dumps(data, indent=1) + "\n")
    write_file(html_file, render_run(data))
    _show(console, data)
    console.print(f"simulated in {time.process_time() - began_s:.1f} s")


@contextmanager
def uncollected() -> Iterator[None]:
    """A run makes few reference cycles, and collections get slower the more objects there are."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _deployment(where: Where, work: Workload) -> DeploymentFile:
    if where.deployment is not None:
        return read_deployment(read_file(where.deployment), str(where.deployment))
    ask = PlanGoal(
        model=planned_model(where.model), hardware=planned_hardware(where.hardware), chips=where.chips,
        input_tokens=work.input_tokens, output_tokens=work.output_tokens, lengths=lengths_of(work),
        cached_share=min(MOST_CACHED, work.cached_share), ttft_s=where.ttft / 1e3, tpot_s=where.tpot / 1e3,
    )  # fmt: skip
    found = make_plan(ask).best_split
    if found is None:
        hint = "give more chips, or a --deployment"
        raise InvalidRequest("these chips hold no prefill instance beside a decode instance", hint=hint)
    file = read_deployment(write_deployment(ask, found), "plan")
    return replace(file, model=where.model, hardware=where.hardware)


def _show(console: Console, data: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for name, value in summary_rows(data):
        table.add_row(name, value)
    for each in data["faults"]:
        waited = each["recovery_ms"]
        times = (
            "" if waited is None else f", next token after {waited['p50']:,.0f} ms, the last after {waited['max']:,.0f}"
        )
        table.add_row(each["fault"], f"struck {each['requests']:,}, {each['failed']:,} failed{times}")
    console.print(table)


def show_comparison(first: Path, second: Path, html_file: Path | None) -> None:
    one, other = _load(first), _load(second)
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    table = Table("", names[0], names[1], "difference")
    for row in compared_rows(one, other):
        table.add_row(*row)
    Console().print(table)
    write_file(html_file, render_comparison(one, other, names))


def _load(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_file(file))
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.get("version") != 1 or "timeline" not in data:
        hint = "`tripool simulate --trace ... --json FILE` writes one"
        raise InvalidRequest(f"{file} is not a report of a simulated run", hint=hint)
    return data
