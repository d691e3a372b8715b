"""The exchange of rows between ranks: what it costs, how soon a busy rank answers, and two ranks against two threads.

    python bench/experts_exchange.py [--quick] [--model tiny] [--json FILE]

`bench/experts.py` has these rows too, for the bundled model and for mla163m.

| row | number |
|---|---|
| exchange | one layer over 32 rows, all experts on an idle rank, less the same with its own experts |
| busy rank | 99th percentile of the same layer with one row, while the other rank runs Python, or its own steps |
| share | a step with an exchange of one rank, which sends and waits for nothing, beside the same step without |
| two ranks | output tokens per second of two ranks with one thread each against one process with two |
| microbatches | the same two ranks, steps computed as two microbatches against as one batch |
| prompt | time of a prompt of 2,000 tokens that two ranks of one thread compute together, against one of them alone |

Rows travel in place: the source quantises them into its slab and reads the answers where they were computed, so an
exchange has no copies of its own to subtract. The floor of two ranks follows from what a step reads: the experts that
its rows choose once, but everything else once per rank. Every rank is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from harness import Origin, Row, Worker, print_table, take_turns, write_json
from tripool import LLM, SamplingParams
from tripool.config import EngineConfig
from tripool.engine.load import load_engine
from tripool.experts.layout import Layout
from tripool.experts.prompt_layout import PromptLayout
from tripool.experts.slabs import attach_prompts, attach_slabs, create_slabs
from tripool.kernels.cpu8.exchange import MICROBATCH_ROWS, NativeExchange
from tripool.kernels.cpu8.prompts import NativePrompts
from tripool.kernels.cpu8.sublayers import Moe8

WITHIN_S = 600.0
SLAB_ROWS = 256
EXCHANGE_US, BUSY_US = 30.0, 300.0
BUSY_SINCE_S = 0.5
SHARE = 1.10
PROMPT_TOKENS, MAX_TOKENS = 32, 64
OF_FLOOR, AT_LEAST = 0.87, {1: 0.0, 8: 0.65, 32: 0.78}
LONG_PROMPT, LONG_SHARE = 2000, 0.6


# ---- a rank -------------------------------------------------------------------------------------------------------


class Rank:
    """Answers the questions of the benchmark, one JSON object per line."""

    def __init__(self, model: str, threads: int) -> None:
        self._engine = load_engine(model, EngineConfig(threads=threads, mtp=False))
        self._network = network = self._engine.executor.runner.model
        self._layers = [layer for layer in network.expert_sublayers if isinstance(layer, Moe8)]
        steps = [layer for layer in self._layers if network.mtp is None or layer is not network.mtp.layer.mlp]
        experts = sum(layer.expert_bytes for layer in steps)
        parts = [part for layer in network._layers for part in (layer.attention, layer.mlp)]
        every = sum(part.num_bytes for part in (*parts, network._head))  # without the MTP layer, which is off
        self._bytes = {"experts": experts, "others": every - experts}
        self._prompts: NativePrompts | None = None
        self._exchange: NativeExchange | None = None
        self._layout: Layout | None = None
        self._stop = threading.Event()
        self._busy: threading.Thread | None = None

    def shape(self) -> dict[str, Any]:
        struct = self._layers[0].struct
        sizes = {"experts": struct.experts, "top_k": struct.top_k, "hidden": struct.norm.width}
        return {"layout": {"layers": len(self._layers), **sizes}, "bytes": self._bytes}

    def open(self, path: str, rank: int, microbatch_rows: int = MICROBATCH_ROWS) -> dict[str, Any]:
        if self._exchange is not None:
            self._exchange.close()
        self._layout, memory = attach_slabs(Path(path))
        self._exchange = NativeExchange(self._layout, memory, rank, self._layers, microbatch_rows=microbatch_rows)
        return {}

    def map(self, epoch: int, ranks: list[int]) -> dict[str, Any]:
        """`ranks`: of each expert, the same in every layer."""
        assert self._exchange is not None and self._layout is not None
        table = np.tile(np.array(ranks, np.int32), (self._layout.layers, 1))
        self._exchange.install(epoch, table, [True] * self._layout.ranks)
        return {}

    def prompt_layout(self, ranks: int) -> dict[str, Any]:
        arch = self._network.arch
        widths = {"query_width": arch.query_width, "kv_width": arch.kv_width, "attended_width": arch.attended_width}
        sizes = {"ranks": ranks, "rows": 512, "context": LONG_PROMPT, "hidden": arch.hidden}
        return sizes | widths

    def prompts(self, path: str, rank: int, share: bool) -> dict[str, Any]:
        """Compute prompts together with other ranks, or alone."""
        if self._prompts is not None:
            self._prompts.close()
        self._prompts = NativePrompts(*attach_prompts(Path(path)), rank, self._network.stack) if share else None
        return {}

    def close(self) -> dict[str, Any]:
        assert self._exchange is not None
        self._exchange.close()
        return {}

    def layer_us(self, rows: int, count: int) -> dict[str, Any]:
        layer, took = self._layers[0], []
        x = torch.randn(rows, layer.struct.norm.width, generator=torch.Generator().manual_seed(1))
        for _ in range(count):
            y = x.clone()
            began_ns = time.perf_counter_ns()
            layer(y)
            took.append((time.perf_counter_ns() - began_ns) / 1000)
        return {"us": took}

    def keep_busy(self, kind: str) -> dict[str, Any]:
        """Until `rest`: Python that holds the interpreter, or steps."""
        self._stop.clear()
        work = self._steps if kind == "steps" else self._python
        self._busy = threading.Thread(target=work)
        self._busy.start()
        return {}

    def _python(self) -> None:
        while not self._stop.is_set():
            sum(range(10_000))

    def _steps(self) -> None:
        while not self._stop.is_set():
            self.generate([[7] * PROMPT_TOKENS] * 8, 8)

    def rest(self) -> dict[str, Any]:
        assert self._busy is not None
        self._stop.set()
        self._busy.join(WITHIN_S)
        return {}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        began_s = time.perf_counter()
        began_cpu_s = time.process_time()
        LLM(self._engine).generate(prompts, params)
        return {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}


def serve_rank(model: str, threads: int) -> None:
    rank = Rank(model, threads)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(getattr(rank, question.pop("do"))(**question)), flush=True)


# ---- rows ---------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder, self._count = model, folder, 0

    def start(self, threads: int) -> Worker:
        self._count += 1
        command = [sys.executable, __file__, "--rank", self._model, str(threads)]
        return Worker(command, self._folder / f"rank{self._count}.log")

    @contextmanager
    def ranks(self, count: int) -> Iterator[list[Worker]]:
        workers = [self.start(1) for _ in range(count)]
        path = self._folder / f"slabs{self._count}"
        try:
            shapes = [ask(worker, "shape") for worker in workers]
            create_slabs(path, Layout(ranks=count, slab_rows=SLAB_ROWS, **shapes[0]["layout"]))
            for number, worker in enumerate(workers):
                ask(worker, "open", path=str(path), rank=number)
            yield workers
        finally:
            for worker in workers:
                worker.close()
            path.unlink(missing_ok=True)

    def exchange(self, count: int) -> list[Row]:
        with self.ranks(2) as (one, other):
            experts = ask(one, "shape")["layout"]["experts"]
            epoch = 1
            ask(other, "map", epoch=epoch, ranks=[1] * experts)

            def layer_us(rows: int, holder: int) -> list[float]:
                nonlocal epoch
                epoch += 1
                ask(one, "map", epoch=epoch, ranks=[holder] * experts)
                taken: list[float] = ask(one, "layer_us", rows=rows, count=count)["us"]
                return taken[count // 10 :]

            own, remote = ([statistics.median(layer_us(32, holder)) for _ in range(3)] for holder in (0, 1))
            beyond = statistics.median(remote) - statistics.median(own)
            note = f"{statistics.median(remote):.0f} against {statistics.median(own):.0f} us with its own experts"
            rows = [bound("exchange of 32 rows, beyond the experts' own time", beyond, EXCHANGE_US, note)]
            for kind in ("idle", "python", "steps"):
                if kind != "idle":
                    ask(other, "keep_busy", kind=kind)
                    time.sleep(BUSY_SINCE_S)
                taken = sorted(us for _ in range(5) for us in layer_us(1, 1))
                if kind != "idle":
                    ask(other, "rest")
                p50, p99 = (taken[int(len(taken) * share)] for share in (0.5, 0.99))
                rows.append(bound(f"one row, other rank: {kind}, p99", p99, BUSY_US, f"median {p50:.0f} us"))
            return rows

    def share(self, repetitions: int) -> list[Row]:
        """One rank over its exchange against the same process without it."""
        rows = []
        with self.ranks(1) as (rank,):
            experts = ask(rank, "shape")["layout"]["experts"]
            plain = self.start(1)
            ask(rank, "map", epoch=1, ranks=[0] * experts)
            for at_once in (8, 32):
                walls = take_turns(
                    {"over": walls_of([rank], at_once), "plain": walls_of([plain], at_once)}, repetitions
                )
                name = f"step with dispatch and combine / without, {at_once} at once"
                over, without = walls.median("over"), walls.median("plain")
                rows.append(Row(name=name, ours=over, peer=without, unit="s", target=SHARE, lower_is_better=True))
            plain.close()
        return rows

    def two_ranks(self, repetitions: int) -> list[Row]:
        rows = []
        with self.ranks(2) as pair:
            shape = ask(pair[0], "shape")
            for worker in pair:
                ask(worker, "map", epoch=1, ranks=[expert % 2 for expert in range(shape["layout"]["experts"])])
            both = self.start(2)
            for at_once, least in AT_LEAST.items():
                walls = take_turns({"ranks": walls_of(pair, at_once), "one": walls_of([both], at_once)}, repetitions)
                tokens, floor = at_once * MAX_TOKENS, floor_of(shape, at_once)
                ranks, one = (walls.median(side) for side in ("ranks", "one"))
                assert ranks is not None and one is not None
                rows.append(
                    Row(
                        name=f"two ranks of one thread / one process of two, {at_once} at once",
                        ours=tokens / ranks,
                        peer=tokens / one,
                        unit="tok/s",
                        target=round(max(OF_FLOOR * floor, least), 3),
                        note=f"floor {floor:.2f} of what one process does; {one / ranks / floor:.2f} of the floor",
                        details={"floor": floor, "samples_s": walls.samples},
                    )
                )
            both.close()
            rows.append(self.microbatches(pair, shape, repetitions))
        return rows

    def microbatches(self, pair: Sequence[Worker], shape: dict[str, Any], repetitions: int) -> Row:
        """128 at once are 64 rows on each rank, or two times 32."""
        path, epoch = self._folder / f"slabs{self._count - 1}", 1

        def walls(microbatch_rows: int) -> Callable[[int], float]:
            def wall_s(repetition: int) -> float:
                nonlocal epoch
                epoch += 1
                for number, worker in enumerate(pair):
                    ask(worker, "open", path=str(path), rank=number, microbatch_rows=microbatch_rows)
                for worker in pair:
                    ask(worker, "map", epoch=epoch, ranks=[e % 2 for e in range(shape["layout"]["experts"])])
                return walls_of(pair, 128, 16)(repetition)

            return wall_s

        measured = take_turns({"two": walls(16), "one": walls(0)}, repetitions)
        return Row(
            name="two microbatches / one batch, 128 at once on two ranks",
            ours=measured.median("two"),
            peer=measured.median("one"),
            unit="s",
            target=None,
            lower_is_better=True,
            note=f"in use from {MICROBATCH_ROWS} rows each on",
            details={"samples_s": measured.samples},
        )

    def long_prompt(self, repetitions: int) -> list[Row]:
        """One rank with and without the help of an idle one."""
        one, other = self.start(1), self.start(1)
        path = self._folder / f"prompts{self._count}"
        create_slabs(path, PromptLayout(**ask(one, "prompt_layout", ranks=2)))
        ask(other, "prompts", path=str(path), rank=1, share=True)

        def wall(share: bool) -> Callable[[int], float]:
            def wall_s(repetition: int) -> float:
                random = Random(2 * repetition + share)
                ask(one, "prompts", path=str(path), rank=0, share=share)
                prompt = [random.randrange(100, 8000) for _ in range(LONG_PROMPT)]
                took = ask(one, "generate", prompts=[prompt], max_tokens=1)
                cpu_s[share].append(took["cpu_s"])
                return float(took["wall_s"])

            return wall_s

        cpu_s: dict[bool, list[float]] = {True: [], False: []}
        walls = take_turns({"both": wall(True), "one": wall(False)}, repetitions)
        for worker in (one, other):
            worker.close()
        path.unlink()
        return [
            Row(
                name="prompt of 2,000 tokens over two ranks of one thread / one",
                ours=walls.median("both"),
                peer=walls.median("one"),
                unit="s",
                target=LONG_SHARE,
                lower_is_better=True,
                note=f"CPU of the first: {statistics.median(cpu_s[True]) / statistics.median(cpu_s[False]):.2f}",
                details={"samples_s": walls.samples},
            )
        ]

    def rows(self, quick: bool) -> list[Row]:
        repetitions = 3 if quick else 9
        rows = self.exchange(1000 if quick else 10_000)
        return rows + self.share(repetitions) + self.two_ranks(repetitions) + self.long_prompt(repetitions)


def floor_of(shape: dict[str, Any], at_once: int) -> float:
    """Of two ranks' rate: a step reads the chosen experts once, and what is no expert's twice."""
    chosen = 1 - (1 - shape["layout"]["top_k"] / shape["layout"]["experts"]) ** at_once  # if all are equally likely
    experts, others = chosen * shape["bytes"]["experts"], shape["bytes"]["others"]
    return float((others + experts) / (2 * others + experts))


def model_rows(model: str, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return Bench(model, Path(folder)).rows(quick)


def ask(worker: Worker, what: str, **details: Any) -> dict[str, Any]:
    return worker.ask(within_s=WITHIN_S, do=what, **details)


def walls_of(workers: Sequence[Worker], at_once: int, max_tokens: int = MAX_TOKENS) -> Callable[[int], float]:
    """Wall time of `at_once` answers, spread over the workers."""

    def wall_s(repetition: int) -> float:
        random = Random(repetition)
        prompts = [[random.randrange(100, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(at_once)]
        began_s = time.perf_counter()
        threads = [
            threading.Thread(
                target=ask, args=(worker, "generate"),
                kwargs={"prompts": prompts[number :: len(workers)], "max_tokens": max_tokens},
            )
            for number, worker in enumerate(workers)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        return time.perf_counter() - began_s

    return wall_s


def bound(name: str, us: float, most_us: float, note: str) -> Row:
    return Row(name=name, ours=us, peer=most_us, unit="us", target=1.0, lower_is_better=True, note=note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: a minute")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", nargs=2, metavar=("MODEL", "THREADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        serve_rank(options.rank[0], int(options.rank[1]))
        return 0
    origin = Origin.now()
    rows = model_rows(options.model, options.quick)
    print_table(rows, origin, f"exchange between ranks, {options.model}")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
