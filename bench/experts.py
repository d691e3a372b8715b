"""Expert parallelism: placement of experts, and ranks against one process.

    python bench/experts.py [--quick] [--json FILE] [--only PART]

| part | rows |
|---|---|
| balance | how level `balance` places experts, how fast, and how level serving stays while routing drifts |
| tiny, mla163m | exchange, rates of two ranks and long prompts with that model: see `bench/experts_exchange.py` |

`bench/experts_ranks.py` has the rows about ranks that die. The peer of a placement is the lower bound that no placement
in those slots can beat, that of a time is the promised time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from experts_exchange import model_rows
from harness import REPO, Origin, Row, print_table, write_json
from tripool.experts import ExpertMap, balance, imbalance, least_imbalance
from tripool.experts.balancer import Balancer
from tripool.experts.levels import Levels
from tripool.simulate.supernode.expert_ranks import ExpertRanks

LAYERS, TOP_K = 61, 8
WITHIN_MS, NEAR_BEST, WINDOW_IMBALANCE = 50.0, 1.03, 1.15
WINDOW_TOKENS, WARM_WINDOWS = 1000, 20  # the first plan is carried out
WINDOW_STEPS = 16  # of about 64 tokens: so many experts of a layer can be copied until the next window
SERVING_LAYERS, SEED = 6, 2026
POPULARITY, HEATS = 0.7, (1.5, 3.0, 9.0, 30.0)
Loads = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def lognormal(rng: np.random.Generator, layers: int, experts: int) -> Loads:
    return np.exp(0.7 * rng.standard_normal((layers, experts)))


def zipf(rng: np.random.Generator, layers: int, experts: int) -> Loads:
    return rng.permuted(np.tile(1.0 / np.arange(1.0, experts + 1), (layers, 1)), axis=1)


def one_hot(rng: np.random.Generator, layers: int, experts: int) -> Loads:
    """One expert has 30 times the mean of the others, another one in each layer: a drift seen at 61 moments."""
    loads = lognormal(rng, layers, experts)
    loads[np.arange(layers), np.arange(layers) % experts] = 30.0 * loads.mean(axis=1)
    return loads


def uniform(rng: np.random.Generator, layers: int, experts: int) -> Loads:
    return np.ones((layers, experts))


SKEWS: dict[str, Callable[[np.random.Generator, int, int], Loads]] = {
    "log-normal": lognormal, "one expert 30 x the mean": one_hot, "Zipf": zipf, "uniform": uniform,
}  # fmt: skip
Layout = tuple[str, int, int, int, list[int]]
"""Name, experts, ranks, hosts, slots of each rank."""
LAYOUTS: list[Layout] = [
    ("EP320, 256 + 32 experts, 1 slot", 256, 320, 20, ([1] * 9 + [0]) * 32),  # every tenth rank has the shared expert
    ("EP32, 256 + 32 experts, 9 slots", 256, 32, 4, [9] * 32),
    ("EP8, 256 + 32 experts, 36 slots", 256, 8, 1, [36] * 8),
    ("EP8, 64 + 8 experts, 9 slots", 64, 8, 1, [9] * 8),
    ("EP8, 64 experts, 8 slots", 64, 8, 1, [8] * 8),
    ("EP72, 256 + 32 experts, 4 slots", 256, 72, 9, [4] * 72),
]


def balance_rows(quick: bool) -> Iterator[Row]:
    for layout in LAYOUTS:
        for skew in SKEWS:
            yield placement_row(layout, skew)
    for layout in LAYOUTS[:3]:
        yield simulated_row(layout)
    for layout in LAYOUTS[:3]:
        for anew in (True, False):
            yield time_row(layout, anew, repetitions=5 if quick else 25)
    for layout in LAYOUTS[1:4]:
        for name in DRIFTS:
            yield serving_row(layout, name, windows=4 if quick else 16, seed=SEED)


def placement_row(layout: Layout, skew: str) -> Row:
    """The worst layer, and the bound of the same layer."""
    name, experts, ranks, hosts, slots = layout
    loads = SKEWS[skew](np.random.default_rng(20), LAYERS, experts)
    reached = imbalance(balance(loads, ranks, hosts, slots), loads)
    best = least_imbalance(loads, slots)
    worst = int((reached / best).argmax())
    few = 1 < max(slots) < 8  # the bound is not always reachable: for information
    return Row(
        name=f"busiest rank / mean, {name}, {skew}", ours=float(reached[worst]), peer=float(best[worst]), unit="x",
        target=None if few else NEAR_BEST, lower_is_better=True, note="peer: lower bound; the worst of 61 layers",
        details={"mean of layers": float(reached.mean()), "bound, mean of layers": float(best.mean())},
    )  # fmt: skip


def simulated_row(layout: Layout) -> Row:
    """In a simulated deployment one expert gets more rows, and moves follow: the worst of several factors."""
    name, experts, _, _, slots = layout
    placed = ExpertRanks(experts, sum(slot > 0 for slot in slots), max(slots), POPULARITY)
    heats = {factor: placed.heat(factor) for factor in HEATS}
    worst = max(HEATS, key=lambda factor: heats[factor].balanced / heats[factor].best)
    heat = heats[worst]
    return Row(
        name=f"busiest rank after moves, simulated {name}, hottest expert x {worst:g}",
        ours=heat.balanced, peer=heat.best, unit="x", target=NEAR_BEST, lower_is_better=True,
        note=f"over the busiest before; peer: lower bound; {heat.at_once:.2f} until then, {heat.move_steps} steps",
        details={f"x {factor:g}": each.balanced / each.best for factor, each in heats.items()},
    )  # fmt: skip


def time_row(layout: Layout, anew: bool, repetitions: int) -> Row:
    name, experts, ranks, hosts, slots = layout
    times_ms, old = [], None
    for seed in range(repetitions):
        rng = np.random.default_rng(seed)
        loads = lognormal(rng, LAYERS, experts)
        if not anew:  # each expert's load is another one by a tenth
            old = balance(loads * np.exp(0.1 * rng.standard_normal(loads.shape)), ranks, hosts, slots)
        began = time.perf_counter()
        balance(loads, ranks, hosts, slots, old=old)
        times_ms.append((time.perf_counter() - began) * 1e3)
    how = "anew" if anew else "from an old placement"
    return Row(
        name=f"balance of 61 layers, {name}, {how}", ours=statistics.median(times_ms), peer=WITHIN_MS, unit="ms",
        target=1.0, lower_is_better=True, note="peer: the promised time", details={"all ms": times_ms},
    )  # fmt: skip


def drift(rng: np.random.Generator, experts: int, windows: int, kept: float) -> Iterator[Loads]:
    """Popularity of each layer's experts, window after window: log-normal, `kept` of its logarithm stays each time."""
    logits = 0.7 * rng.standard_normal((SERVING_LAYERS, experts))
    for _ in range(windows):
        yield np.exp(logits)
        logits = kept * logits + 0.7 * np.sqrt(1 - kept**2) * rng.standard_normal(logits.shape)


def passing_heat(rng: np.random.Generator, experts: int, windows: int) -> Iterator[Loads]:
    """One expert has 30 times the mean; over 50 windows its load goes over to the next one, and so on."""
    for turn, popularity in enumerate(drift(rng, experts, windows, 0.998)):
        first, gone = np.arange(SERVING_LAYERS) + turn // 50, turn % 50 / 50
        heat = 30 * popularity.mean(axis=1)
        popularity[np.arange(SERVING_LAYERS), first % experts] += (1 - gone) * heat
        popularity[np.arange(SERVING_LAYERS), (first + 1) % experts] += gone * heat
        yield popularity


Drift = Callable[[np.random.Generator, int, int], Iterator[Loads]]
DRIFTS: dict[str, tuple[Drift, float | None]] = {
    "half new after 350,000 tokens": (lambda *given: drift(*given, 0.998), WINDOW_IMBALANCE),
    "one expert 30 x the mean, the next after 50,000 tokens": (passing_heat, WINDOW_IMBALANCE),
    # For information: each window differs from the one before by 14 % per expert.
    "half new after 35,000 tokens": (lambda *given: drift(*given, 0.98), None),
}


class Dispatch:
    """Sources of an instance that send the rows of a window in steps, each choosing replicas as serving does."""

    def __init__(self, layers: int, ranks: int) -> None:
        self._levels = [[Levels(source, ranks) for source in range(ranks)] for _ in range(layers)]
        self._assigned = np.zeros((layers, ranks), np.int64)

    def window(self, rng: np.random.Generator, likely: Loads, held: ExpertMap) -> tuple[Counts, Counts]:
        """Rows that each expert was routed, and rows that each rank got: (layers, experts), (layers, ranks)."""
        before, holders, steps = self._assigned.copy(), held.holders, WINDOW_STEPS * held.ranks
        routed = np.zeros(likely.shape, np.int64)
        for turn in range(steps):
            tokens = WINDOW_TOKENS * (turn + 1) // steps - WINDOW_TOKENS * turn // steps
            sent = rng.multinomial(tokens * TOP_K, likely)
            routed += sent
            for layer, rows in enumerate(sent):
                levels = self._levels[layer][turn % held.ranks]
                taken = levels.choose(rows.tolist(), holders[layer], self._assigned[layer])
                np.add.at(self._assigned[layer], holders[layer][taken > 0], taken[taken > 0])
        return routed, self._assigned - before


def serving_row(layout: Layout, name: str, windows: int, seed: int) -> Row:
    """Routing drifts; after each window of 1,000 tokens moves are planned as in serving. A step has about 64 tokens, of
    all ranks together; each rank chooses among replicas as serving does.

    A window's value is the busiest rank over the mean by the rows that it got, the mean of the layers, as a step passes
    all of them; the row is the median window. The note says what it would be if replicas were used evenly, and how
    uneven chance alone makes a window then, for a placement that knows the popularity behind it.
    """
    where, experts, ranks, hosts, slots = layout
    popularities, target = DRIFTS[name]
    rng, layers = np.random.default_rng(seed), SERVING_LAYERS
    held, dispatch = ExpertMap.contiguous(layers, experts, ranks), Dispatch(layers, ranks)
    balancer, routed = Balancer(held, TOP_K), np.zeros((layers, experts), np.int64)
    values, evens, floors, copied = [], [], [], 0
    for turn, popularity in enumerate(popularities(rng, experts, windows + WARM_WINDOWS)):
        likely = popularity / popularity.sum(axis=1, keepdims=True)
        if turn < WARM_WINDOWS:
            counts = rng.multinomial(WINDOW_TOKENS * TOP_K, likely)
            copied = balancer.num_copies
        else:
            counts, got = dispatch.window(rng, likely, held)
            values.append(float((got.max(axis=1) / got.sum(axis=1) * ranks).mean()))
            evens.append(float(imbalance(held.table, counts).mean()))
            floors.append(float(imbalance(balance(likely, ranks, hosts, slots), counts).mean()))
        routed = routed + counts
        for _ in range(WINDOW_STEPS):
            held = balancer.step(routed, held) or held
    even, chance = statistics.median(evens), statistics.median(floors)
    each = (balancer.num_copies - copied) / windows / layers
    return Row(
        name=f"busiest rank / mean, windows of 1,000 tokens, {where}, {name}", ours=statistics.median(values), peer=1.0,
        unit="x", target=target, lower_is_better=True,
        note=f"replicas used evenly {even:.3f}, chance alone {chance:.3f}; copies per layer and window {each:.1f}",
        details={"p95": float(np.quantile(values, 0.95)), "even": even, "chance": chance, "copies": each, "seed": seed},
    )  # fmt: skip


def ranks_of(model: str, quick: bool) -> Iterator[Row]:
    path = REPO / "bench" / ".models" / model
    if model != "tiny" and not path.is_dir():
        note = f"python bench/peers/make_models.py makes {model}"
        yield Row(name=f"{model}: ranks", ours=None, peer=None, unit="", target=None, note=note)
        return
    for row in model_rows("tiny" if model == "tiny" else str(path), quick):
        yield replace(row, name=f"{model}: {row.name}")


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "balance": balance_rows,
    "tiny": partial(ranks_of, "tiny"),
    "mla163m": partial(ranks_of, "mla163m"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and windows")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part instead of all")
    options = parser.parse_args()
    origin = Origin.now()
    parts: Sequence[str] = [options.only] if options.only else list(PARTS)
    rows = [row for part in parts for row in PARTS[part](options.quick)]
    print_table(rows, origin, "Experts over ranks")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
