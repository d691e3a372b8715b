"""Three classes of promised time per token on one engine: are they kept, and what does keeping them cost?

    python bench/slo.py [--model smollm2] [--overload] [--quick] [--json FILE]     a real engine, this machine's clock
    python bench/slo.py --fake [--overload] [--quick] [--json FILE]             the same scheduler in virtual time

| row | promise |
|---|---|
| each class's answers within its promise, Poisson arrivals at 80 % of capacity | at least 0.99 |
| tokens per second with all classes kept, against the best fixed batch limit of a sweep | at least 1.1 |
| with `--overload`, at 200 % behind the door: admitted answers within their class; refusals | 0.99; p99 50 ms |

The classes are 50, 30 and 15 ms, scaled on a real engine so that the strictest is a few times what one stream alone
takes there; the factor is printed. "steady" mixes them all the time, in "shifting" traffic comes and goes by class.
A fixed limit must suit the strictest class and the longest prompts at all times; the controller's ceiling follows what
is there. For information, a sweep of limits and chunk sizes together: what a patient person could tune by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from harness import Origin, Row, print_table, write_json
from slo_classes import (
    KEPT,
    MIXES,
    Arrival,
    Kind,
    Run,
    Served,
    StepCost,
    best_fixed,
    draw,
    run,
)
from tripool.config import AdmissionConfig, EngineConfig, SchedulerConfig
from tripool.core import SamplingParams, Slo
from tripool.engine.load import load_engine
from tripool.engine.thread import EngineThread
from tripool.errors import TripoolError
from tripool.gateway.admission import AdmissionBackend
from tripool.gateway.backend import Backend
from tripool.router.admission import AdmissionController
from tripool.simulate.rng import Rng

GAIN, REFUSED_MS = 1.1, 50.0
MOST_RUNNING = 96
LOAD, OVERLOAD = 0.8, 2.0
STRICT_STREAMS = 4.0
"""The strictest class, in times per token of one stream alone."""
REAL_LENGTHS = 0.25
"""Of the classes' prompts and answers, so that a sweep ends within minutes on a CPU."""
REAL_COUNT = 240
"""So that the strictest class has some forty answers in each mix."""
REAL_LIMITS: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
CLOSE_WITHIN_S = 30.0


# ---- rows -----------------------------------------------------------------------------------------------------------


def class_rows(where: str, done: Run, factor: float = 1.0) -> list[Row]:
    firsts = sorted(each.ttft_s for each in done.served)
    note = f"first tokens: p95 {firsts[int(0.95 * (len(firsts) - 1))]:.2f} s; {len(firsts)} answers"
    return [
        Row(
            name=f"{where}: {tpot_ms / factor:g} ms class kept",
            ours=kept,
            peer=1.0,
            unit="share",
            target=KEPT,
            note=note,
        )
        for tpot_ms, kept in done.attainment().items()
    ]


def gain_row(name: str, ours: Run, best: Run | None, what: str, target: float | None) -> Row:
    kept = ours.worst >= KEPT
    return Row(
        name=name,
        ours=ours.tokens_per_s if kept else None,
        peer=best.tokens_per_s if best is not None else None,
        unit="tok/s",
        target=target,
        note=what if kept else f"the worst class is kept by {ours.worst:.3f} only",
        details={"ours": ours.attainment(), "best": best.attainment() if best is not None else {}},
    )


def overload_rows(where: str, done: Run, factor: float = 1.0) -> list[Row]:
    told = f"{len(done.refused_s)} refused; {done.in_time():.3f} of the first tokens in time"
    rows = [replace(row, note=told) for row in class_rows(f"{where} at {OVERLOAD:.0%}", done, factor)]
    slow_ms = 1000 * sorted(done.refused_s)[int(0.99 * (len(done.refused_s) - 1))] if done.refused_s else None
    name = f"{where} at {OVERLOAD:.0%}: refusals, p99"
    return [*rows, Row(name=name, ours=slow_ms, peer=REFUSED_MS, unit="ms", target=1.0, lower_is_better=True)]


# ---- virtual time ---------------------------------------------------------------------------------------------------


def scheduling(max_running: int, step_tokens: int = 512) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=4096, max_running=max_running, step_tokens=max(step_tokens, max_running + 1), prefix_reuse=False
    )


def virtual_rows(*, quick: bool, overload: bool) -> list[Row]:
    count, cost, rows = 400 if quick else 1200, StepCost(jitter=0.05, hiccup=0.001), list[Row]()
    for name, phases in MIXES.items():
        backlog = draw(phases, count, Rng(1))
        ours = run(backlog, scheduling(MOST_RUNNING), cost)
        config, best = best_fixed(backlog, (scheduling(limit) for limit in range(4, 15)), cost)
        what = f"best fixed limit: {config.max_running}" if config else "no fixed limit keeps the classes"
        rows.append(gain_row(f"{name}: ours / best fixed limit", ours, best, what, GAIN))
        chunks = (64, 96) if quick else (48, 64, 80, 96, 128, 256)
        tuned = [scheduling(limit, chunk) for chunk in chunks for limit in (range(8, 18, 2) if quick else range(6, 20))]
        config, best = best_fixed(backlog, tuned, cost)
        what = f"best: {config.max_running} of {config.step_tokens} tokens a step" if config else "none keeps them"
        rows.append(gain_row(f"{name}: ours / best limit and chunk by hand", ours, best, what, None))
        per_s = len(ours.served) / ours.wall_s
        rows += class_rows(
            f"{name} at {LOAD:.0%}",
            run(draw(phases, count, Rng(2), per_s=LOAD * per_s), scheduling(MOST_RUNNING), cost),
        )
        if overload:
            arrivals = draw(phases, count, Rng(3), per_s=OVERLOAD * per_s)
            rows += overload_rows(
                name, run(arrivals, scheduling(MOST_RUNNING), cost, admission=AdmissionController(AdmissionConfig()))
            )
    return rows


# ---- a real engine --------------------------------------------------------------------------------------------------


@contextmanager
def engine_thread(model: str, max_running: int, threads: int) -> Iterator[tuple[EngineThread, int]]:
    """And how many tokens the model knows."""
    engine = load_engine(model, EngineConfig(max_running=max_running, threads=threads, prefix_reuse=False))
    thread = EngineThread(engine)
    try:
        yield thread, engine.vocab
    finally:
        thread.close(CLOSE_WITHIN_S)


async def drive(backend: Backend, arrivals: Sequence[Arrival], *, promised: bool = True) -> Run:
    """Every request at its time, each read by a client of its own. `promised`: whether the engine is told so."""
    served: list[Served] = []
    refused: list[float] = []
    began_s = time.perf_counter()

    async def one(arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.perf_counter()))
        asked_s, times, slo = time.perf_counter(), list[float](), arrival.request.slo
        request = arrival.request if promised else replace(arrival.request, slo=Slo())
        try:
            async for _ in backend.stream(request):
                times.append(time.perf_counter())
        except TripoolError:
            refused.append(time.perf_counter() - asked_s)
            return
        mean_s = (times[-1] - times[0]) / max(1, len(times) - 1)
        served.append(Served(slo.tpot_ms, slo.ttft_ms, times[0] - asked_s, mean_s, len(times)))

    await asyncio.gather(*(one(arrival) for arrival in arrivals))
    return Run(tuple(served), time.perf_counter() - began_s, 0, tuple(refused))


def filled(arrivals: Sequence[Arrival], vocab: int) -> list[Arrival]:
    """With tokens of the model's own, so that no two prompts are alike."""
    random, done = Random(5), []
    for arrival in arrivals:
        request = arrival.request
        tokens = tuple(random.randrange(vocab // 4, vocab) for _ in request.prompt_ids)
        params = SamplingParams(max_tokens=request.params.max_tokens, ignore_eos=True, temperature=0.0)
        done.append(replace(arrival, request=replace(request, prompt_ids=tokens, params=params)))
    return done


def single_stream_ms(thread: Backend, vocab: int) -> float:
    """Median time per token of one answer at a time."""
    kind = Kind(tpot_ms=None, share=1.0, prompt_tokens=100, answer_tokens=64)
    paces = []
    for number in range(5):
        [arrival] = filled(draw([[kind]], 1, Rng(number)), vocab)
        [served] = asyncio.run(drive(thread, [arrival])).served
        paces.append(served.mean_s * 1000)
    return statistics.median(paces[1:])


def scaled(phases: Sequence[Sequence[Kind]], factor: float) -> list[list[Kind]]:
    def one(kind: Kind) -> Kind:
        assert kind.tpot_ms is not None and kind.ttft_ms is not None
        return replace(
            kind,
            tpot_ms=kind.tpot_ms * factor,
            ttft_ms=kind.ttft_ms * max(factor, 1.0),
            prompt_tokens=int(kind.prompt_tokens * REAL_LENGTHS),
            answer_tokens=int(kind.answer_tokens * REAL_LENGTHS),
        )

    return [[one(kind) for kind in kinds] for kinds in phases]


def real_rows(model: str, threads: int, *, quick: bool, overload: bool) -> tuple[list[Row], float]:
    count, limits, mixes = REAL_COUNT, REAL_LIMITS, tuple(MIXES)
    if quick:
        count, limits, mixes = count // 4, limits[::2], ("shifting",)
    rows: list[Row] = []
    with engine_thread(model, MOST_RUNNING, threads) as (thread, vocab):
        factor = STRICT_STREAMS * single_stream_ms(thread, vocab) / 15.0
        for name in mixes:
            kinds = scaled(MIXES[name], factor)
            backlog = filled(draw(kinds, count, Rng(1)), vocab)
            # A server that has run before, not one that has to learn the machine from its first promise.
            asyncio.run(drive(thread, filled(draw(kinds, 40, Rng(9)), vocab), promised=False))
            ours = asyncio.run(drive(thread, backlog))
            print(f"{name}: {ours.tokens_per_s:.0f} tok/s, worst class {ours.worst:.3f}", file=sys.stderr)
            best, what = fixed_sweep(model, threads, limits, backlog)
            rows.append(gain_row(f"{name}: ours / best fixed limit", ours, best, what, GAIN))
            per_s = len(ours.served) / ours.wall_s
            arrivals = filled(draw(kinds, count, Rng(2), per_s=LOAD * per_s), vocab)
            rows += class_rows(f"{name} at {LOAD:.0%}", asyncio.run(drive(thread, arrivals)), factor)
            if overload:
                arrivals = filled(draw(kinds, count, Rng(3), per_s=OVERLOAD * per_s), vocab)
                rows += overload_rows(name, asyncio.run(drive(AdmissionBackend(thread), arrivals)), factor)
    return rows, factor


def fixed_sweep(model: str, threads: int, limits: Sequence[int], backlog: Sequence[Arrival]) -> tuple[Run | None, str]:
    best: tuple[float, Run, int] | None = None
    for limit in limits:
        with engine_thread(model, limit, threads) as (thread, _):
            done = asyncio.run(drive(thread, backlog, promised=False))
        print(f"fixed limit {limit}: {done.tokens_per_s:.0f} tok/s, worst class {done.worst:.3f}", file=sys.stderr)
        if done.worst >= KEPT and (best is None or done.tokens_per_s > best[0]):
            best = done.tokens_per_s, done, limit
    if best is None:
        return None, f"none of the fixed limits {limits} keeps the classes"
    return best[1], f"best fixed limit: {best[2]} of {limits}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="virtual time instead of an engine")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--overload", action="store_true", help="also 200 %% of capacity, behind the door")
    parser.add_argument("--quick", action="store_true", help="fewer requests, a coarser sweep")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    origin = Origin.now()
    if options.fake:
        rows = virtual_rows(quick=options.quick, overload=options.overload)
        title = "Promised classes in virtual time"
    else:
        rows, factor = real_rows(options.model, options.threads, quick=options.quick, overload=options.overload)
        title = f"Promised classes, {options.model}: 50/30/15 ms x {factor:.3g}, {options.threads} threads"
    print_table(rows, origin, title)
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
