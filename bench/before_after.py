"""This tree against an earlier one of the same project, taking turns in one run: engine, serving, gateway, cache.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python bench/before_after.py ../before [--quick] [--parts engine,cache] [--json FILE]

Both trees run in this environment, each with its own `bench/peers` programs. A row fails where the median of the pairs
is worse than the bar by more than the row's spread: half of what the middle half of the pairs covers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop

import gateway
from cache import BATCH, BLOCK_BYTES, NUM_BLOCKS, START_WITHIN_S, WORK_WITHIN_S, Store
from engine_cpu import PREFIX, PREFIX_KNOWN_TOKENS, WARM_UP, WORKLOADS, Workload, tell
from harness import REPO, Origin, Row, Worker, print_table, take_turns, write_json
from serving import SERVE, HttpSide, ours
from sides import LOAD_WITHIN_S, LOGS, MODELS, Loaded, Side

WORSE = 0.03
"""How much worse a row may be beyond its spread."""
MODEL_PATHS = {"smollm2": "smollm2", "mla163m": str(MODELS / "mla163m")}
ENGINES = (("smollm2", "float32"), ("smollm2", "int8"), ("mla163m", "int8"))
QUICK_ENGINES = (("smollm2", "int8"),)
GATEWAY_SERVER = "import sys; sys.path.insert(0, sys.argv[2]); import gateway; exec(gateway.SERVER)"

Turn = Callable[[int], float]


@contextmanager
def source_of(tree: Path) -> Iterator[None]:
    """Processes started inside import that tree's code."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tree / "src")
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class Comparison:
    """Collects rows of an earlier tree and this one."""

    def __init__(self, before: Path, repetitions: int, *, quick: bool) -> None:
        self.trees = {"before": before, "after": REPO}
        self.quick = quick
        self.rows: list[Row] = []
        self._repetitions = repetitions
        LOGS.mkdir(parents=True, exist_ok=True)

    def compare(self, name: str, unit: str, turns: dict[str, Turn], *, lower_is_better: bool = False) -> None:
        measured = take_turns(turns, self._repetitions)
        assert not measured.failed, measured.failed
        after, before = measured.samples["after"], measured.samples["before"]
        ratios = [one / other for one, other in zip(after, before, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        spread = (high - low) / 2
        bound = 1 + WORSE + spread if lower_is_better else 1 - WORSE - spread
        row = Row(
            name=name, ours=statistics.median(before) * middle, peer=statistics.median(before), unit=unit,
            target=round(bound, 4), lower_is_better=lower_is_better, note=f"spread {spread:.1%}",
            details={"samples": measured.samples},
        )  # fmt: skip
        tell(f"  {row}, {row.note}")
        self.rows.append(row)

    def workers(self, stack: ExitStack, program: str) -> dict[str, Worker]:
        started = {}
        for name, tree in self.trees.items():
            with source_of(tree):
                command = [sys.executable, str(tree / "bench" / "peers" / program)]
                started[name] = Worker(command, LOGS / f"{program} {name}.log")
            stack.callback(started[name].close)
        return started


def compare_engines(found: Comparison, threads: int) -> None:
    for model, precision in QUICK_ENGINES if found.quick else ENGINES:
        with ExitStack() as stack:
            loaded = {}
            for name, worker in found.workers(stack, "ours.py").items():
                told = {"model": MODEL_PATHS[model], "threads": threads, "precision": precision}
                said = worker.ask(do="load", within_s=LOAD_WITHIN_S, **told)
                worker.wait_idle()
                loaded[name] = Loaded(Side(name, "ours.py", model, precision=precision), worker, said)
            for workload in WORKLOADS[:2] if found.quick else WORKLOADS:
                if precision == "float32" and workload.concurrency > 2:
                    continue  # minutes a run, and the same code as the others
                for side in loaded.values():
                    workload.prepare(side)
                turns = {name: _measured(workload, side) for name, side in loaded.items()}
                found.compare(f"engine: {model} {precision} {workload.name}", workload.unit, turns)
                assert len({str(side.answers) for side in loaded.values()}) == 1, "other tokens than before"


def _measured(workload: Workload, side: Loaded) -> Turn:
    return lambda repetition: workload.measure(side, repetition)


def compare_serving(found: Comparison, threads: int) -> None:
    for how in SERVE:
        with ExitStack() as stack:
            servers: dict[str, HttpSide] = {}
            for name, tree in found.trees.items():
                with source_of(tree):
                    servers[name] = stack.enter_context(ours(how, "smollm2", threads))
            for workload in WORKLOADS[1:2] if found.quick else WORKLOADS:
                for server in servers.values():
                    server.rate(workload, WARM_UP)
                turns = {name: _served(workload, server) for name, server in servers.items()}
                found.compare(f"serving: {how} {workload.name}", workload.unit, turns)
            turns = {name: _known(server) for name, server in servers.items()}
            found.compare(f"serving: {how}, 960 of 1,024 tokens known", "ms", turns, lower_is_better=True)


def _served(workload: Workload, server: HttpSide) -> Turn:
    return lambda repetition: server.rate(workload, repetition)


def _known(server: HttpSide) -> Turn:
    def turn(repetition: int) -> float:
        (cold,), (other,) = PREFIX.prompts(repetition), PREFIX.prompts(repetition + 1000)
        server.wall_s([cold], 1)
        return 1e3 * server.wall_s([cold[:PREFIX_KNOWN_TOKENS] + other[PREFIX_KNOWN_TOKENS:]], 1)

    return turn


def compare_gateways(found: Comparison) -> None:
    with ExitStack() as stack:
        servers = {}
        for name, tree in found.trees.items():
            with source_of(tree):
                running = gateway.serving(GATEWAY_SERVER, "0.0", str(tree / "bench"))
                servers[name] = stack.enter_context(running)
        requests, tokens = (100, 50) if found.quick else (256, 200)

        def first_token(server: gateway.Server) -> Turn:
            def turn(_: int) -> float:
                load = gateway.load(server.url, concurrency=1, requests=requests, output_tokens=4)
                times_ms = gateway.summary_of(uvloop.run(load)).ttft_ms
                assert times_ms is not None
                return times_ms.p50

            return turn

        def rate(server: gateway.Server, of: str) -> Turn:
            def turn(_: int) -> float:
                began_s = server.cpu_s()
                load = gateway.load(server.url, concurrency=64, requests=requests, output_tokens=tokens)
                summary = gateway.summary_of(uvloop.run(load))
                cpu_us = 1e6 * (server.cpu_s() - began_s) / summary.output_tokens
                return cpu_us if of == "cpu" else summary.output_tokens_per_s

            return turn

        for server in servers.values():
            first_token(server)(0)
        down = {"lower_is_better": True}
        found.compare("gateway: first token", "ms", {n: first_token(s) for n, s in servers.items()}, **down)
        found.compare("gateway: streamed tokens", "tokens/s", {n: rate(s, "rate") for n, s in servers.items()})
        found.compare("gateway: time per token", "µs", {n: rate(s, "cpu") for n, s in servers.items()}, **down)


def compare_caches(found: Comparison) -> None:
    with ExitStack() as stack:
        stores = {}
        for name, worker in found.workers(stack, "store_ours.py").items():
            blocks = {"num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES}
            hosted = worker.ask(do="host", within_s=START_WITHIN_S)
            worker.ask(do="put", within_s=WORK_WITHIN_S, **blocks)
            worker.ask(do="join", place=hosted["place"], batch=BATCH, within_s=START_WITHIN_S, **blocks)
            stores[name] = Store(worker, hosted["version"])
        for batch in (1, BATCH):
            repeat = (32 if found.quick else 256) // batch
            turns = {name: _got(store, batch, repeat) for name, store in stores.items()}
            for turn in turns.values():
                turn(WARM_UP)
            found.compare(f"cache: {batch} blocks of 1 MB", "µs", turns, lower_is_better=True)


def _got(store: Store, batch: int, repeat: int) -> Turn:
    return lambda _: store.us("get", batch, repeat)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the earlier tree, its kernels compiled in place")
    parser.add_argument("--quick", action="store_true", help="a few rows, three pairs each")
    parser.add_argument("--parts", default="cache,gateway,engine,serving", help="of cache,gateway,engine,serving")
    parser.add_argument("--repetitions", type=int, help="pairs of each row: default 9; 3 with --quick")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    origin = Origin.now()
    found = Comparison(
        options.before.resolve(), options.repetitions or (3 if options.quick else 9), quick=options.quick
    )
    parts = {
        "cache": lambda: compare_caches(found),
        "gateway": lambda: compare_gateways(found),
        "engine": lambda: compare_engines(found, options.threads),
        "serving": lambda: compare_serving(found, options.threads),
    }
    for part in options.parts.split(","):
        tell(part)
        parts[part]()
    print_table(found.rows, origin, "This tree (ours) beside the one before (peer), medians of pairs")
    if options.json:
        write_json(found.rows, origin, options.json)
    return 0 if all(row.ok for row in found.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
