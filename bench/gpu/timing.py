"""What every GPU benchmark here shares: events, graph replays, cold caches, the two ceilings, rows with their roof.

Scripts beside this one run on a machine that has torch and triton and nothing else, from a plain copy of the tree: this
module puts `bench/` and `src/` on the import path, so import it before `tripool`. Knows no kernel.

A row of a bar in microseconds compares a time with that bar; its details hold the roof (the larger of operations over
the matrix rate and bytes over the copy bandwidth, both measured in the same run) and the share of it that was reached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "src"), str(REPO / "bench")]

from harness import Origin, Row, commit, write_json  # noqa: E402

__all__ = [
    "Ceilings", "Origin", "Row", "arguments", "copy_bandwidth", "gpu_origin", "graph_time_us", "matmul_rate",
    "measure_ceilings", "print_rows", "rate_row", "sets_beyond_cache", "time_us", "timed_row", "write_json",
]  # fmt: skip

FLUSH_BYTES = 512 << 20
"""Several times the L2; writing it takes longer than a launch from Python: the timed call is queued in time."""


def time_us(fn: Callable[[], object], *, repetitions: int = 30, warmup: int = 3, flush: bool = True) -> float:
    """Median of single calls, each after the L2 was filled with something else (unless `flush` is off)."""
    for _ in range(warmup):
        fn()
    junk = torch.empty(FLUSH_BYTES if flush else 0, dtype=torch.uint8, device="cuda")
    seqs = []
    for _ in range(repetitions):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        junk.fill_(1)
        start.record()
        fn()
        stop.record()
        seqs.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in seqs) * 1e3


def graph_time_us(calls: Sequence[Callable[[], object]], *, repetitions: int = 20, rounds: int = 1) -> float:
    """Microseconds per call, from replays of one graph that makes all calls in turn, `rounds` times over.

    Give one call per input set, enough sets that they do not fit the L2 together (`sets_beyond_cache`): then each call
    finds its inputs in memory, as it does in a model. The calls must not synchronise with the host.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compiles, and fills the allocator, outside the graph
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    seqs = []
    for _ in range(repetitions):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        seqs.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in seqs) * 1e3 / (rounds * len(calls))


def sets_beyond_cache(bytes_per_set: int, *, most: int = 64) -> int:
    """How many input sets to rotate among, so that a set has left the L2 before its turn comes again."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(most, -(-3 * cache // bytes_per_set) + 1))


def copy_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes per second of a device-to-device copy, counting bytes read and bytes written."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / (time_us(lambda: target.copy_(source), repetitions=10, flush=False) * 1e-6)


def matmul_rate(size: int = 8192) -> float:
    """Operations per second of torch's bf16 product on random data."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / (time_us(lambda: a @ b, repetitions=10, flush=False) * 1e-6)


@dataclass(frozen=True)
class Ceilings:
    """What this very card did in this very run."""

    bytes_per_s: float
    bf16_per_s: float

    def roof_us(self, num_bytes: float, num_ops: float = 0.0, ops_per_s: float | None = None) -> float:
        """No version runs much faster than this."""
        return max(num_bytes / self.bytes_per_s, num_ops / (ops_per_s or self.bf16_per_s)) * 1e6


def measure_ceilings() -> Ceilings:
    return Ceilings(copy_bandwidth(), matmul_rate())


def timed_row(name: str, us: float, roof_us: float, *, bar_us: float | None = None, note: str = "", **more: Any) -> Row:
    """A time against its bar; without a bar, against the roof, for information."""
    details = {"roof_us": roof_us, "share_of_roof": roof_us / us} | more
    peer, target = (roof_us, None) if bar_us is None else (bar_us, 1.0)
    return Row(
        name=name, ours=us, peer=peer, unit="µs", target=target, lower_is_better=True,
        note=note or f"{roof_us / us:.0%} of the roof", details=details,
    )  # fmt: skip


def rate_row(
    name: str, ours: float, peer: float, unit: str, *, target: float | None, note: str = "", **more: Any
) -> Row:
    """A rate (GB/s, TOP/s, tok/s) against a ceiling or a peer's."""
    return Row(name=name, ours=ours, peer=peer, unit=unit, target=target, note=note, details=more)


def gpu_origin(commit_told: str | None = None) -> Origin:
    """A copy of the tree may have lost its history: then the commit is told on the command line."""
    card = torch.cuda.get_device_properties(0)
    import triton

    machine = (
        f"{card.name}, {card.multi_processor_count} SMs, {card.total_memory / 2**30:.0f} GB, "
        f"CUDA {torch.version.cuda}, torch {torch.__version__}, triton {triton.__version__}"
    )
    return Origin(machine, commit_told or commit())


def print_rows(rows: Sequence[Row], origin: Origin) -> None:
    """Plain lines: that machine need not have the packages that draw tables."""
    print(f"{origin.machine} · {origin.commit}")
    for row in rows:
        mark = {True: "ok ", False: "NO ", None: "·  "}[row.ok]
        print(f"{mark}{row}{'' if row.target is None else f' (target {row.target:g})'}  {row.note}", flush=True)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options every GPU benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute: fewer sizes, the decided variants only")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--commit", help="the commit that is measured, where the tree has no history")
    return parser
