"""Tripool's engine on a CPU against its peers: one run, taking turns, over the same token ids.

    python bench/engine_cpu.py [--quick] [--set float32|int8|all] [--peers NAMES] [--rows PATTERN] [--json FILE]

| workload | requests at once | prompt | answer | number                                                  |
|----------|------------------|--------|--------|---------------------------------------------------------|
| decode   | 1                | 16     | 128    | output tokens over the whole wall                       |
| x8, x32  | 8, 32            | 256    | 64     | output tokens over the whole wall                       |
| prefill  | 2                | 1,024  | 1      | prompt tokens over the whole wall                       |
| prefix   | 1                | 1,024  | 1      | our time to first token: 960 tokens known against none  |

Every side is a process of its own, on all cores, loaded and warmed up before the clock, idle while others run. Prompts
are new in every repetition, so nobody's prefix cache helps. A row that cannot be measured has failed and says why.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random

from harness import Measured, Origin, Row, WorkerFailed, print_table, take_turns, write_json
from sides import PEER_NAMES, SIDES, Loaded, Side, load, wanted_sides

FIRST_ID, LAST_ID = 100, 49_000  # ordinary tokens of both models: nothing special, nothing past the vocabulary
WARM_UP = -1  # the repetition nobody counts


@dataclass(frozen=True)
class Workload:
    name: str
    concurrency: int
    prompt_tokens: int
    max_tokens: int

    @property
    def unit(self) -> str:
        return "prompt tok/s" if self.max_tokens == 1 else "tok/s"

    def rate(self, wall_s: float) -> float:
        tokens = self.prompt_tokens if self.max_tokens == 1 else self.max_tokens
        return self.concurrency * tokens / wall_s

    def prompts(self, repetition: int) -> list[list[int]]:
        random = Random(f"{self.name} {repetition}")
        lengths = [self.prompt_tokens] * self.concurrency
        return [[random.randrange(FIRST_ID, LAST_ID) for _ in range(length)] for length in lengths]

    def prepare(self, loaded: Loaded) -> None:
        loaded.prepare(self.prompts(WARM_UP)[:2], self.concurrency, self.prompt_tokens + self.max_tokens)

    def measure(self, loaded: Loaded, repetition: int) -> float:
        return self.rate(loaded.wall_s(self.prompts(repetition), self.max_tokens))


WORKLOADS = (
    Workload("decode", 1, 16, 128),
    Workload("x8", 8, 256, 64),
    Workload("x32", 32, 256, 64),
    Workload("prefill", 2, 1024, 1),
)
PREFIX = Workload("prefix", 1, 1024, 1)
PREFIX_KNOWN_TOKENS = 960
QUICK_CASES = ("smollm2 decode", "smollm2 x8")

BEST = "best peer"
# (our path, case) -> side to hold against -> least ours / theirs
TARGETS: dict[tuple[str, str], dict[str, float]] = {
    ("float32", "smollm2 decode"): {"transformers": 1.0},
    ("float32", "smollm2 x8"): {"transformers": 1.0},
    ("int8", "smollm2 decode"): {"llama.cpp Q4_1": 0.85, "llama.cpp Q8_0": 1.0},
    ("int8", "smollm2 x8"): {BEST: 1.6},
    ("int8", "smollm2 x32"): {BEST: 1.6},
    ("int8", "smollm2 prefill"): {BEST: 1.4},
    ("int8", "mla163m decode"): {BEST: 0.85},
    ("int8", "mla163m x8"): {BEST: 1.5},
    ("int8", "mla163m prefill"): {BEST: 1.2},
}
PREFIX_TARGETS = {"int8": 0.15}


class Bench:
    """One model's sides, loaded together, measured workload by workload."""

    def __init__(self, model: str, sides: Iterable[Side], threads: int) -> None:
        self.model = model
        self.loaded: dict[str, Loaded] = {}
        self.failed: dict[str, str] = {}
        self.ours: list[str] = []
        self.peers: list[str] = []
        for side in sides:
            (self.ours if side.peer is None else self.peers).append(side.name)
            tell(f"{model}: loading {side.name}")
            try:
                self.loaded[side.name] = load(side, threads)
            except WorkerFailed as failure:
                self._give_up(side.name, str(failure))

    def close(self) -> None:
        for loaded in self.loaded.values():
            loaded.worker.close()

    def compare(self, workload: Workload, repetitions: int) -> list[Row]:
        tell(f"{self.model}: {workload.name}")
        for name in list(self.loaded):
            self._try(name, workload.prepare)
        cos_sin = {name: _turn(workload, loaded) for name, loaded in self.loaded.items()}
        measured = take_turns(cos_sin, repetitions)
        for name, reason in measured.failed.items():
            self._give_up(name, reason)
        return [row for name in self.ours for row in self._rows(name, workload, measured)]

    def compare_prefix(self, repetitions: int) -> list[Row]:
        tell(f"{self.model}: {PREFIX.name}")
        return [self._prefix_row(name, repetitions) for name in self.ours]

    def _try(self, name: str, act: Callable[[Loaded], None]) -> None:
        try:
            act(self.loaded[name])
        except WorkerFailed as failure:
            self._give_up(name, str(failure))

    def _give_up(self, name: str, reason: str) -> None:
        """A side that failed once is out for good: its process may be half dead."""
        tell(f"{self.model}: {name}: {reason}")
        self.failed[name] = reason
        if name in self.loaded:
            self.loaded.pop(name).worker.close()

    def _rows(self, ours: str, workload: Workload, measured: Measured) -> Iterable[Row]:
        targets = TARGETS.get((ours, f"{self.model} {workload.name}"), {})
        if BEST in targets:
            medians = {name: median for name in self.peers if (median := measured.median(name)) is not None}
            # With one peer missing nobody knows which is best: the row has failed.
            best = max(medians, key=medians.__getitem__) if len(medians) == len(self.peers) else None
            yield self._row(ours, best, workload, measured, targets[BEST], versus=f"{BEST} ({best})" if best else BEST)
        for name in self.peers:
            yield self._row(ours, name, workload, measured, targets.get(name), versus=name)

    def _row(
        self, ours: str, peer: str | None, workload: Workload, measured: Measured, target: float | None, *, versus: str
    ) -> Row:
        pair = [self.loaded[name] for name in (ours, peer) if name in self.loaded]
        involved = (ours, peer) if peer else (ours, *self.peers)
        reasons = [f"{name}: {self.failed[name]}" for name in involved if name in self.failed]
        return Row(
            name=f"{self.model} {workload.name}: {ours} / {versus}",
            ours=measured.median(ours),
            peer=measured.median(peer) if peer else None,
            unit=workload.unit,
            target=target,
            note="; ".join(reasons) or _note(*pair),
            details={
                "samples": {name: measured.samples.get(name, []) for name in (ours, peer) if name},
                "sides": {one.side.name: one.said for one in pair},
            },
        )

    def _prefix_row(self, ours: str, repetitions: int) -> Row:
        """Cold, then the same 960 tokens with another end: both our own side, one after the other."""
        cold_ms: list[float] = []
        hit_ms: list[float] = []

        def measure(loaded: Loaded) -> None:
            PREFIX.prepare(loaded)
            for repetition in range(repetitions):
                (cold,) = PREFIX.prompts(repetition)
                (other,) = PREFIX.prompts(repetition + repetitions)
                cold_ms.append(1e3 * loaded.wall_s([cold], 1))
                hit_ms.append(1e3 * loaded.wall_s([cold[:PREFIX_KNOWN_TOKENS] + other[PREFIX_KNOWN_TOKENS:]], 1))

        if ours in self.loaded:
            self._try(ours, measure)
        failed = self.failed.get(ours)
        return Row(
            name=f"{self.model} prefix: {ours} 960 of 1,024 known / cold",
            ours=None if failed else statistics.median(hit_ms),
            peer=None if failed else statistics.median(cold_ms),
            unit="ms to first token",
            target=PREFIX_TARGETS.get(ours),
            lower_is_better=True,
            note=failed or self.loaded[ours].bits,
            details={"samples": {"hit": hit_ms, "cold": cold_ms}},
        )


def _turn(workload: Workload, loaded: Loaded) -> Callable[[int], float]:
    return lambda repetition: workload.measure(loaded, repetition)


def _note(ours: Loaded, peer: Loaded) -> str:
    """Bits of both, how far the answers agree (fast and wrong would show here), and what our rounding cost."""
    equal = sum(_common_prefix(a, b) for a, b in zip(ours.answers, peer.answers, strict=True))
    parts = [f"{ours.bits} / {peer.bits}", f"{equal / sum(map(len, ours.answers)):.0%} same tokens"]
    if "perplexity_change" in ours.said:
        parts.append(f"perplexity {ours.said['perplexity_change']:+.2%}")
    return ", ".join(parts)


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="SmolLM2 alone and at 8, once: about a minute")
    parser.add_argument("--set", choices=("float32", "int8", "all"), default="float32", help="which of our paths")
    parser.add_argument("--peers", help=f"of {','.join(PEER_NAMES)}; default: those the set is held to")
    parser.add_argument("--rows", default="*", metavar="PATTERN", help="such as 'smollm2*' or '* x8'")
    parser.add_argument("--repetitions", type=int, help="default 3; 1 with --quick")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    options.precisions = ("float32", "int8") if options.set == "all" else (options.set,)
    default_peers = "transformers" if options.set == "float32" else ",".join(PEER_NAMES)
    options.peers = (options.peers or default_peers).split(",")
    unknown = set(options.peers) - set(PEER_NAMES)
    if unknown:
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    return options


def cases_of(model: str, pattern: str, quick: bool) -> list[Workload]:
    named = {f"{model} {workload.name}": workload for workload in (*WORKLOADS, PREFIX)}
    return [w for name, w in named.items() if fnmatch(name, pattern) and (name in QUICK_CASES or not quick)]


def main() -> int:
    options = parse()
    origin = Origin.now()
    rows: list[Row] = []
    for model in SIDES:
        cases = cases_of(model, options.rows, options.quick)
        if not cases:
            continue
        bench = Bench(model, wanted_sides(model, options.precisions, options.peers), options.threads)
        try:
            for case in cases:
                count = options.repetitions
                for row in bench.compare_prefix(count) if case is PREFIX else bench.compare(case, count):
                    rows.append(row)
                    tell(f"  {row}")
        finally:
            bench.close()
    title = f"Engine on a CPU: {options.threads} threads, medians of {options.repetitions}"
    print_table(rows, origin, title)
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if rows and all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
