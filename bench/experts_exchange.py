"""The exchange of rows between ranks: what it costs, how soon a busy rank answers, and two ranks against two threads.

    python bench/experts_exchange.py [--quick] [--model tiny] [--json FILE]

`bench/experts.py` has these rows too, for the bundled model and for mla163m.

| row | number |
|---|---|
| exchange | a layer over 32 rows, all experts on an idle rank, less the same on the rank itself, less the copies |
| busy rank | 99th percentile of the same layer with one row, while the other rank runs Python, or its own steps |
| share | a step with an exchange of one rank, which sends and waits for nothing, beside the same step without |
| dispatch and combine | of two ranks, beside a step: its layers times the exchange above, with a rank's rows |
| two ranks | output tokens per second of two ranks with one thread each against one process with two |
| microbatches | the same two ranks, steps computed as two microbatches against as one batch |
| prompt | time of a prompt of 2,000 tokens that two ranks of one thread compute together, against one of them alone |

Rows travel in place: the source quantises them into its slab and reads the answers where they were computed. What is
copied all the same are cache lines between two cores: the rows in 8 bits, and one float32 row for each (row, choice).
That is measured apart: two processes hand over as many bytes in turns, and each copy is compared with the same one by a
core that has the lines. The exchange is measured on a layer of the model's sizes with random weights
and no shared expert: there a rank does nothing else while it waits, so all but the experts' own time is the exchange's.

The floor of two ranks follows from what a step reads: everything that is no expert's once per rank and so with one
thread, where one process has two; the experts that its rows choose once, with both. How many those are is counted: an
expert that a share p of the rows chooses is read by a step of n rows with probability 1 - (1 - p)^n. Every rank is a
process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

import experts_rank
from experts_rank import LINE, LONG_PROMPT, PROMPT_TOKENS, WITHIN_S
from harness import Origin, Row, Worker, print_table, take_turns, write_json
from tripool.experts.exchange import SharedView
from tripool.experts.layout import Layout
from tripool.experts.prompt_layout import PromptLayout
from tripool.experts.slabs import attach_slabs, create_slabs
from tripool.kernels.cpu8.exchange import MICROBATCH_ROWS

SLAB_ROWS, COPIES = 256, 300
EXCHANGE_US, BUSY_US = 30.0, 300.0
BUSY_SINCE_S = 0.5
SHARE, SHARED_BY = 1.10, (8, 32)
MAX_TOKENS = 64
OF_FLOOR, AT_LEAST = 0.87, {1: 0.0, 8: 0.65, 32: 0.78}
LONG_SHARE = 0.6


# ---- rows ---------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder, self._count = model, folder, 0
        self._slabs = folder
        self._beyond_us: dict[int, float] = {}
        """By rows: what an exchange takes, all of whose rows another rank answers, beyond the experts' own time."""

    def start(self, threads: int) -> Worker:
        self._count += 1
        command = [sys.executable, experts_rank.__file__, self._model, str(threads)]
        return Worker(command, self._folder / f"rank{self._count}.log")

    @contextmanager
    def ranks(self, count: int, *, bare: bool = False) -> Iterator[list[Worker]]:
        workers = [self.start(1) for _ in range(count)]
        path = self._slabs = self._folder / f"slabs{self._count}"
        try:
            if bare:
                for worker in workers:
                    ask(worker, "bare")
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
        with self.ranks(2, bare=True) as pair:
            layer_us = timed_layer(*pair, count)
            for num_rows in (*(at_once // 2 for at_once in SHARED_BY), 32):
                each = [[statistics.median(layer_us(num_rows, holder)) for holder in (0, 1)] for _ in range(3)]
                own, remote = (statistics.median(column) for column in zip(*each, strict=True))
                self._beyond_us[num_rows] = remote - own
            copies = self.copies_us(pair)
        note = f"{remote:.0f} us, {own:.0f} with its own experts, {copies:.0f} of copies between the cores"
        name = "exchange of 32 rows, beyond the experts' own time and the copies"
        rows = [bound(name, self._beyond_us[32] - copies, EXCHANGE_US, note)]
        with self.ranks(2) as pair:
            layer_us = timed_layer(*pair, count)
            for kind in ("idle", "python", "steps"):
                if kind != "idle":
                    ask(pair[1], "keep_busy", kind=kind)
                    time.sleep(BUSY_SINCE_S)
                taken = sorted(us for _ in range(5) for us in layer_us(1, 1))
                if kind != "idle":
                    ask(pair[1], "rest")
                p50, p99 = (taken[int(len(taken) * share)] for share in (0.5, 0.99))
                rows.append(bound(f"one row, other rank: {kind}, p99", p99, BUSY_US, f"median {p50:.0f} us"))
        return rows

    def copies_us(self, pair: Sequence[Worker]) -> float:
        """What 32 rows and their answers cost as cache lines that move from core to core, both ways."""
        layout = ask(pair[0], "shape")["layout"]
        sizes = [32 * layout["hidden"], 32 * layout["top_k"] * layout["hidden"] * 4]
        path = self._folder / "handed-over"
        path.write_bytes(bytes(LINE + sum(sizes)))
        took_us = [0.0, 0.0]

        def hand_over(rank: int) -> None:
            took_us[rank] = ask(pair[rank], "hand_over_us", path=str(path), sizes=sizes, rank=rank, count=COPIES)["us"]

        in_parallel([partial(hand_over, rank) for rank in range(2)])
        path.unlink()
        return sum(took_us)

    def share(self, repetitions: int) -> list[Row]:
        """One rank over its exchange against the same process without it."""
        rows = []
        with self.ranks(1) as (rank,):
            experts = ask(rank, "shape")["layout"]["experts"]
            plain = self.start(1)
            ask(rank, "map", epoch=1, ranks=[0] * experts)
            for at_once in SHARED_BY:
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
            both, view = self.start(2), SharedView(*attach_slabs(self._slabs))
            for at_once, least in AT_LEAST.items():
                walls = take_turns({"ranks": walls_of(pair, at_once), "one": walls_of([both], at_once)}, repetitions)
                routed = np.asarray(sum(view.routed(rank).astype(np.int64) for rank in range(2)))
                tokens, top_k = at_once * MAX_TOKENS, shape["layout"]["top_k"]
                floor, chosen = floor_of(shape["bytes"], routed, top_k, at_once)
                ranks, one = (walls.median(side) for side in ("ranks", "one"))
                assert ranks is not None and one is not None
                rows.append(
                    Row(
                        name=f"two ranks of one thread / one process of two, {at_once} at once",
                        ours=tokens / ranks,
                        peer=tokens / one,
                        unit="tok/s",
                        target=round(max(OF_FLOOR * floor, least), 3),
                        note=f"floor {floor:.2f} of what one process does ({100 * chosen:.0f} % of experts read); "
                        f"{one / ranks / floor:.2f} of the floor",
                        details={"floor": floor, "chosen": chosen, "samples_s": walls.samples},
                    )
                )
            both.close()
            rows += [self.dispatch_share(pair, at_once, shape["step_layers"], repetitions) for at_once in SHARED_BY]
            rows.append(self.microbatches(pair, shape, repetitions))
        return rows

    def dispatch_share(self, pair: Sequence[Worker], at_once: int, layers: int, repetitions: int) -> Row:
        """Of a step without prompts. It is too much rather than too little: here half of the rows stay, and a rank
        computes its own experts and the shared one while it waits."""
        walls = {str(tokens): walls_of(pair, at_once, tokens) for tokens in (1, MAX_TOKENS)}
        measured = take_turns(walls, repetitions)
        one, all_tokens = (measured.median(side) for side in walls)
        assert one is not None and all_tokens is not None
        step_us = (all_tokens - one) / (MAX_TOKENS - 1) * 1e6
        return Row(
            name=f"dispatch and combine of two ranks / a step, {at_once} at once",
            ours=layers * self._beyond_us[at_once // 2],
            peer=step_us,
            unit="us",
            target=round(SHARE - 1, 2),
            lower_is_better=True,
            note=f"{layers} times {self._beyond_us[at_once // 2]:.0f} us",
            details={"samples_s": measured.samples},
        )

    def microbatches(self, pair: Sequence[Worker], shape: dict[str, Any], repetitions: int) -> Row:
        """128 at once are 64 rows on each rank, or two times 32."""
        path, epoch = self._slabs, 1

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


def timed_layer(one: Worker, other: Worker, count: int) -> Callable[[int, int], list[float]]:
    """us of the first layer on the first rank, with all experts on one of the two."""
    experts, epochs = ask(one, "shape")["layout"]["experts"], itertools.count(1)
    ask(other, "map", epoch=next(epochs), ranks=[1] * experts)

    def layer_us(rows: int, holder: int) -> list[float]:
        ask(one, "map", epoch=next(epochs), ranks=[holder] * experts)
        taken: list[float] = ask(one, "layer_us", rows=rows, count=count)["us"]
        return taken[count // 10 :]

    return layer_us


def floor_of(sizes: dict[str, int], routed: npt.NDArray[np.int64], top_k: int, at_once: int) -> tuple[float, float]:
    """Of two ranks' rate; and the share of the experts that a step reads. `routed`: [layers, experts], rows so far."""
    routed = routed[routed.any(axis=1)]  # the MTP layer is off
    likely = routed * top_k / routed.sum(axis=1, keepdims=True)
    chosen = float((1 - (1 - likely) ** at_once).mean())
    experts, others = chosen * sizes["experts"], sizes["others"]
    return (others + experts) / (2 * others + experts), chosen


def model_rows(model: str, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return Bench(model, Path(folder)).rows(quick)


def ask(worker: Worker, what: str, **details: Any) -> dict[str, Any]:
    return worker.ask(within_s=WITHIN_S, do=what, **details)


def in_parallel(calls: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)


def walls_of(workers: Sequence[Worker], at_once: int, max_tokens: int = MAX_TOKENS) -> Callable[[int], float]:
    """Wall time of `at_once` answers, spread over the workers."""

    def wall_s(repetition: int) -> float:
        random = Random(repetition)
        prompts = [[random.randrange(100, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(at_once)]
        began_s = time.perf_counter()
        shares = [prompts[number :: len(workers)] for number in range(len(workers))]
        questions = zip(workers, shares, strict=True)
        in_parallel([partial(ask, worker, "generate", prompts=own, max_tokens=max_tokens) for worker, own in questions])
        return time.perf_counter() - began_s

    return wall_s


def bound(name: str, us: float, most_us: float, note: str) -> Row:
    return Row(name=name, ours=us, peer=most_us, unit="us", target=1.0, lower_is_better=True, note=note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: a minute")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    origin = Origin.now()
    rows = model_rows(options.model, options.quick)
    print_table(rows, origin, f"exchange between ranks, {options.model}")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
