"""`tripool simulate --seeds`: many runs in virtual time, each drawn from a seed and checked."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import TimeElapsedColumn
from rich.table import Table

from tripool.cli.simulate import SeededRuns
from tripool.cli.terminal import progress, stderr

if TYPE_CHECKING:
    from tripool.simulate import Report

_BATCH = 10


@dataclass(frozen=True, slots=True)
class _Broken:
    """A seed whose run broke an invariant, and the invariant."""

    seed: int
    rule: str


@dataclass(slots=True)
class _Total:
    num_runs: int = 0
    num_events: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    """Runs with a fault of each kind."""
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by (kind of fault in their run, outcome); "" stands for all runs."""
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        self.num_runs += 1
        self.num_events += report.num_events
        self.num_requests += report.num_requests
        self.num_tokens += report.num_tokens
        self.faults += report.faults
        self.runs.update(report.faults.keys())
        self.seen += report.seen
        for outcome, count in report.outcomes.items():
            for kind in ("", *report.faults):
                self.outcomes[kind, outcome] += count


def run(runs: SeededRuns, seed: int | None) -> None:
    """Run router, schedulers and cache index in simulation, and check that nothing is lost."""
    total = _Total()
    started_s = time.monotonic()
    if seed is not None:
        results: Iterator[Report | _Broken] = iter([_run(runs, seed, trace=runs.events)])
    else:
        results = _run_all(runs, runs.workers or len(os.sched_getaffinity(0)))
    broken = _follow(results, total, runs.seeds if seed is None else 1)
    if total.num_runs:
        _show(total, time.monotonic() - started_s)
    if broken is not None:
        drawn = (" --faults" if runs.faults else "") + (f" --hosts {runs.hosts}" if runs.hosts > 1 else "")
        replay = f"tripool simulate{drawn} --seed {broken.seed} --trace"
        stderr().print(f"[red]seed {broken.seed} breaks a rule:[/red] {broken.rule}", soft_wrap=True)
        stderr().print(f"replay it: {replay}", soft_wrap=True)
        raise typer.Exit(1)


def _follow(results: Iterator[Report | _Broken], total: _Total, num_runs: int) -> _Broken | None:
    """Count until the first that is broken."""
    with progress("simulating", num_runs, TimeElapsedColumn(), transient=True) as update:
        for result in results:
            if isinstance(result, _Broken):
                return result
            total.add(result)
            update(advance=1)
    return None


def _run_all(runs: SeededRuns, num_workers: int) -> Iterator[Report | _Broken]:
    seeds = range(runs.first, runs.first + runs.seeds)
    batches = [seeds[start : start + _BATCH] for start in range(0, len(seeds), _BATCH)]
    if num_workers == 1 or len(batches) == 1:
        for batch in batches:
            yield from _run_batch(runs, batch)
        return
    # Spawned: a fork would copy whatever threads this process has.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=gc.disable)
    try:
        for results in pool.map(partial(_run_batch, runs), batches):
            yield from results
    finally:
        pool.shutdown(cancel_futures=True)


def _run_batch(runs: SeededRuns, seeds: range) -> list[Report | _Broken]:
    results = [_run(runs, seed) for seed in seeds]
    gc.collect()  # a simulation has many reference cycles; once per batch is enough
    return results


def _run(runs: SeededRuns, seed: int, *, trace: bool = False) -> Report | _Broken:
    from tripool.simulate import simulate  # here, so that --help is fast

    try:
        return simulate(seed, faults=runs.faults, hosts=runs.hosts, trace=typer.echo if trace else None)
    except AssertionError as error:
        return _Broken(seed, str(error) or "an assertion without a message")


def _show(total: _Total, elapsed_s: float) -> None:
    console = Console()
    outcomes = sorted({outcome for _, outcome in total.outcomes}, key=lambda o: -total.outcomes["", o])
    table = Table("fault", title="requests by outcome, in runs with each kind of fault")
    for name in ("injected", "runs", *outcomes):
        table.add_column(name, justify="right")
    for kind in sorted(total.faults):
        counts = [total.faults[kind], total.runs[kind], *(total.outcomes[kind, o] for o in outcomes)]
        table.add_row(kind, *(f"{count:,}" for count in counts))
    everything = [total.faults.total(), total.num_runs, *(total.outcomes["", o] for o in outcomes)]
    table.add_section()
    table.add_row("all runs", *(f"{count:,}" for count in everything))
    console.print(table)
    what = Table("consequences", show_header=True)
    what.add_column("times", justify="right")
    for name, count in sorted(total.seen.items()):
        what.add_row(name, f"{count:,}")
    console.print(what)
    console.print(
        f"{total.num_runs:,} runs, {total.num_requests:,} requests, {total.num_tokens:,} tokens, "
        f"{total.num_events:,} events in {elapsed_s:.1f} s: {total.num_events / elapsed_s:,.0f} events/s"
    )
    console.print("lost tokens 0, repeated 0, changed 0, hung requests 0, leaked blocks 0 (checked in every run)")
