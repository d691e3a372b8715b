"""Data of the plots: predicted curves and published points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tripool.planner.reproduce.ablations import DEGREES, microbatching_gain, mtp_gain, prefill_microbatching_gain
from tripool.planner.reproduce.pool import INSTANCES, PLANES, cache_throughput, cache_ttft, loading
from tripool.planner.reproduce.published import Series, detailed_rows, published_series
from tripool.planner.reproduce.serving import compared_rows, cost_per_million
from tripool.planner.reproduce.system import System

Pairs = tuple[tuple[float, float], ...]
_NUM_STEPS = 32


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    predicted: Pairs
    published: Pairs = ()


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    levels: tuple[tuple[float, str], ...] = ()
    """Published values without a position on the x axis."""


def figures(system: System, deepep: System) -> list[Figure]:
    return [
        *_decode(system),
        _rows(system),
        _exchange(system, "Dispatch and combine on CloudMatrix384", ""),
        _exchange(deepep, "Dispatch and combine of DeepEP on H800, later release", "deepep_"),
        *_gains(system),
        *_context_cache(system),
        _model_cache(system),
        _cost(system),
    ]


def _evenly(low: float, high: float) -> list[float]:
    return [low + (high - low) * index / _NUM_STEPS for index in range(_NUM_STEPS + 1)]


def _over(xs: Iterable[float], of: Callable[[float], float]) -> Pairs:
    return tuple((x, of(x)) for x in xs)


def _points(series: Series, scale: float = 1.0) -> Pairs:
    return tuple((at, value * scale) for at, value in series.values.items())


def _decode(system: System) -> Iterator[Figure]:
    """One curve for each published context, with the rows of that context."""
    rows = [(row, details) for row, details in detailed_rows() if row.phase == "decode" and "910C" in row.hardware]
    contexts = ((4224.0, "4K context"), (2176.0, "2K"), (1536.0, "1K in, 1K out"))
    batches = range(4, 141, 4)
    times, rates = [], []
    for context, name in contexts:
        # The row without an answer length (4,096) belongs to those of 4,096 and 256.
        own = [
            (row, details) for row, details in rows if row.context and row.batch and abs(row.context - context) <= 128
        ]
        tpots = tuple((row.batch or 0.0, details.tpot_ms or 0.0) for row, details in own)
        published = tuple((row.batch or 0.0, row.published or 0.0) for row, _ in own)
        predicted = [(batch, system.decode_rate(batch, context)) for batch in batches]
        times.append(Curve(name, tuple((batch, batch / rate * 1e3) for batch, rate in predicted), tpots))
        rates.append(Curve(name, tuple(predicted), published))
    yield Figure("Decode: time per output token", "requests per chip", "ms", tuple(times))
    yield Figure("Decode: throughput", "requests per chip", "tok/s per chip", tuple(rates))


def _rows(system: System) -> Figure:
    """All comparable rows: a point above the line is a prediction that is too high."""
    found = [compared for compared, _ in compared_rows(system) if compared.prediction.predicted is not None]
    most = max(max(each.prediction.published or 0.0, each.prediction.predicted or 0.0) for each in found)
    curves = [Curve("equal", ((0.0, 0.0), (most, most)))]
    for role in ("validation", "calibration"):
        pairs = (
            (each.prediction.published or 0.0, each.prediction.predicted or 0.0) for each in found if each.role == role
        )
        curves.append(Curve(role, (), tuple(pairs)))
    return Figure("All rows: predicted against published", "published tok/s per device", "predicted", tuple(curves))


def _exchange(system: System, title: str, prefix: str) -> Figure:
    series = published_series()
    predicted = [(ep, *system.exchange_us(ep)) for ep in DEGREES]
    curves = (
        Curve("dispatch", tuple((ep, us) for ep, us, _ in predicted), _points(series[f"{prefix}dispatch_us"])),
        Curve("combine", tuple((ep, us) for ep, _, us in predicted), _points(series[f"{prefix}combine_us"])),
    )
    return Figure(title, "EP degree", "microseconds", curves)


def _gains(system: System) -> Iterator[Figure]:
    series = published_series()
    batches = range(8, 137, 4)
    line = _over(batches, lambda batch: 100 * microbatching_gain(system, batch))
    published = _points(series["decode_microbatching"], 100)
    yield Figure("Decode: gain of two microbatches", "requests per chip", "%", (Curve("", line, published),))
    line = _over(_evenly(1024, 8192), lambda prompt: 100 * prefill_microbatching_gain(system, prompt))
    ends = _levels(series["prefill_microbatching"])
    yield Figure("Prefill: gain of two microbatches", "prompt tokens", "%", (Curve("", line),), ends)
    line = _over(batches, lambda batch: 100 * mtp_gain(system, batch))
    yield Figure("Gain of one draft (MTP)", "requests per chip", "%", (Curve("", line),), _levels(series["mtp"]))


def _levels(series: Series) -> tuple[tuple[float, str], ...]:
    return tuple(
        (100 * series[at], f"published {word} {series[at]:+.0%}") for at, word in ((0, "smallest"), (1, "largest"))
    )


def _context_cache(system: System) -> Iterator[Figure]:
    series, shares = published_series(), _evenly(0.0, 0.9)
    kinds: Sequence[tuple[str, str, Callable[[float, str], float], Pairs]] = (
        (
            "Context cache: prefill throughput", "times that without reuse",
            lambda share, plane: cache_throughput(system, share, plane), _points(series["cache_throughput"]),
        ),
        (
            "Context cache: time to first token", "% of that without reuse",
            lambda share, plane: 100 * (1.0 + cache_ttft(system, share, plane)),
            tuple((at, 100 * (1.0 + value)) for at, value in series["cache_ttft"].values.items()),
        ),
    )  # fmt: skip
    for title, y_label, of, published in kinds:
        curves = [
            Curve(
                name,
                tuple((100 * share, of(share, plane)) for share in shares),
                tuple((100 * share, value) for share, value in published) if plane == "memory" else (),
            )
            for plane, name in PLANES.items()
        ]
        yield Figure(title, "% of prompt tokens reused", y_label, tuple(curves))


def _model_cache(system: System) -> Figure:
    found, series = loading(system), published_series()["model_cache_s"]
    ways: dict[str, Callable[[float], float]] = {
        "object storage": lambda count: found.object_store_s(int(count)),
        "pool, cold": lambda _: found.pool_cold_s(),
        "pool, warm": lambda _: found.pool_warm_s(),
    }
    curves = tuple(
        Curve(name, _over(range(1, INSTANCES + 1), seconds), ((float(INSTANCES), series[at]),))
        for at, (name, seconds) in enumerate(ways.items())
    )
    return Figure("Loading 671 GB of weights", "instances at once", "seconds", curves)


def _cost(system: System) -> Figure:
    price, per_hour = published_series()["price"], system.hardware.price_per_hour
    assert per_hour is not None, "the bundled description has a price"
    points = []
    for batch in range(8, 129, 4):
        rate = system.decode_rate(batch, 4224.0)
        points.append((batch / rate * 1e3, cost_per_million(per_hour, rate)))
    title, levels = "Decode: yuan per million tokens, 4K context", ((price[2], f"press: about {price[2]:g}"),)
    return Figure(title, "ms per output token", "CNY", (Curve("", tuple(points)),), levels)
