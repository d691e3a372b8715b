"""Tables of the memory pool: cached contexts on both planes, and loading weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tripool.planner.reproduce.ablations import point
from tripool.planner.reproduce.lines import Table, TableLine, unpublished
from tripool.planner.reproduce.published import published_series
from tripool.planner.reproduce.system import PREFILL_EP, PREFILL_TOKENS, System

SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 0.9)
PLANES = {"memory": "UB", "service": "VPC"}
INSTANCES = 8
OBJECT_STORE, POOL_COLD, POOL_WARM = 0, 1, 2


def pool_tables(system: System) -> Iterator[Table]:
    yield _context_cache(system)
    yield _model_cache(system)


def cache_throughput(system: System, share: float, plane: str) -> float:
    """Prompt tokens per second, reused ones included, relative to no reuse."""
    return system.prefill_s() / system.prefill_s(share, plane=plane)


def cache_ttft(system: System, share: float, plane: str) -> float:
    return system.prefill_s(share, plane=plane) / system.prefill_s() - 1.0


def _context_cache(system: System) -> Table:
    series = published_series()
    lines = []
    for plane, name in PLANES.items():
        # The published multiples are of the memory plane; over the other only the largest ratio is published.
        for share in SHARES:
            times, sooner = cache_throughput(system, share, plane), cache_ttft(system, share, plane)
            batch_s = system.prefill_s(share, plane=plane)
            rate = f"{PREFILL_TOKENS / batch_s:,.0f} tok/s a chip"
            duration = f"{batch_s * 1e3:,.0f} ms a batch"
            at = share if plane == "memory" else -1.0
            lines.append(
                point(series["cache_throughput"], at, f"{share:.1%} reused, {name}: throughput", "x", times, rate)
            )
            lines.append(point(series["cache_ttft"], at, f"{share:.1%} reused, {name}: TTFT", "gain", sooner, duration))
    ratios = {share: planes_ratio(system, share) for share in SHARES}
    most = max(ratios, key=lambda share: ratios[share])
    lines.append(
        point(series["cache_planes"], 1, "UB over VPC, at most", "x", ratios[most], f"here at {most:.0%} reused")
    )
    description = (
        "Prefill of 16,384 prompt tokens a chip (prompts of 4,096), a share of them read from the pool and not "
        "computed. TTFT is the time of a batch, without waiting for its turn. The rate of reading over each plane is a "
        "constant, chosen by one number each."
    )
    return Table("Context cache, by share of prompts reused", description, tuple(lines))


def planes_ratio(system: System, share: float) -> float:
    return cache_throughput(system, share, "memory") / cache_throughput(system, share, "service")


@dataclass(frozen=True)
class Loading:
    """Loads weights into `instances` at once. The store's rate is shared; the pool reads from it once."""

    weights_bytes: float
    store_bytes_per_s: float
    link_bytes_per_s: float

    def object_store_s(self, instances: int) -> float:
        return instances * self.weights_bytes / self.store_bytes_per_s

    def pool_cold_s(self) -> float:
        """The pool forwards weights while it reads them from the store."""
        return max(self.weights_bytes / self.store_bytes_per_s, self.pool_warm_s())

    def pool_warm_s(self) -> float:
        """One copy of the weights through one link for each instance."""
        return self.weights_bytes / self.link_bytes_per_s


def loading(system: System) -> Loading:
    """The store's rate is not published; it is derived from the cold pool's time."""
    series = published_series()
    weights_bytes = float(system.model.total_params)  # INT8: a byte each
    return Loading(weights_bytes, weights_bytes / series["model_cache_s"][POOL_COLD], series["link_gb_s"][1] * 1e9)


def _model_cache(system: System) -> Table:
    series, found = published_series()["model_cache_s"], loading(system)
    every_die_s = system.rank_weight_bytes() / found.link_bytes_per_s
    rate = found.store_bytes_per_s / 1e9
    lines = (
        TableLine(
            name="through the pool, cold", unit="s", role="fit to this ablation", published=series[POOL_COLD],
            predicted=found.pool_cold_s(), source=series.source, note=f"gives the store's rate: {rate:.2f} GB/s",
        ),
        TableLine(
            name=f"object storage, {INSTANCES} instances", unit="s", role="validation", published=series[OBJECT_STORE],
            predicted=found.object_store_s(INSTANCES), source=series.source,
            note=f"each reads everything by itself: {INSTANCES} times the line above",
        ),
        unpublished("object storage, 1 instance", "s", found.object_store_s(1)),
        TableLine(
            name="through the pool, warm: one link an instance", unit="s", role="fit to this ablation",
            published=series[POOL_WARM], predicted=found.pool_warm_s(), source=series.source,
            note="of two readings, chosen knowing the answer",
        ),
        TableLine(
            name="through the pool, warm: every die its part", unit="s", role="shown", published=series[POOL_WARM],
            predicted=every_die_s, source=series.source,
            note=f"EP{PREFILL_EP}: links alone, {system.rank_weight_bytes() / 1e9:.0f} GB a die",
        ),
    )  # fmt: skip
    description = (
        f"{found.weights_bytes / 1e9:,.0f} GB of INT8 weights into {INSTANCES} instances at once. Links read "
        f"{found.link_bytes_per_s / 1e9:.0f} GB/s from a CPU's memory, as measured by applications."
    )
    return Table("Model cache: time to load the weights", description, lines)
