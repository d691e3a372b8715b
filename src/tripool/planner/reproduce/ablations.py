"""Ablations: exchange by EP degree, microbatching and MTP on and off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tripool.planner.reproduce.lines import Role, Table, TableLine, Unit, unpublished
from tripool.planner.reproduce.published import Series, published_series
from tripool.planner.reproduce.system import CONTEXT, System

DEGREES = (8, 16, 32, 64, 128, 256)
BATCHES = (8, 16, 24, 32, 64, 96, 128)
MTP_BATCHES = (8, 16, 24, 32, 64, 96)
"""Batches between the smallest and the largest published one at 4,096 tokens of context."""
PROMPTS = (1024, 2048, 4096, 8192)


def ablation_tables(system: System, deepep: System) -> Iterator[Table]:
    yield _exchange(system)
    yield _deepep(deepep)
    yield _decode_microbatching(system)
    yield _prefill_microbatching(system)
    yield _mtp(system)


def point(series: Series, at: float, name: str, unit: Unit, predicted: float, note: str = "") -> TableLine:
    """A line of a published curve; a prediction alone where the curve has no point."""
    published = series.get(at)
    if published is None:
        return unpublished(name, unit, predicted, note)
    role: Role = "fit to this ablation" if series.fitted(at) else "validation"
    return TableLine(
        name=name, unit=unit, role=role, published=published, predicted=predicted, source=series.source, note=note
    )


def _times(system: System) -> list[tuple[int, str, float]]:
    """(EP degree, dispatch or combine, predicted microseconds)."""
    return [
        (ep, name, us)
        for ep in DEGREES
        for name, us in zip(("dispatch", "combine"), system.exchange_us(ep), strict=True)
    ]


def _exchange(system: System) -> Table:
    series = published_series()
    lines = tuple(point(series[f"{name}_us"], ep, f"{name}, EP{ep}", "us", us) for ep, name, us in _times(system))
    description = (
        "128 tokens a rank, evenly routed. Three constants (fixed, per peer, per token) were derived from these four "
        "numbers."
    )
    return Table("Dispatch and combine on CloudMatrix384, by EP degree", description, lines)


def _deepep(deepep: System) -> Table:
    series, times = published_series(), _times(deepep)
    lines = [point(series[f"deepep_{name}_us"], ep, f"{name}, EP{ep}", "us", us) for ep, name, us in times]
    for ep, name, us in times:
        first = series[f"deepep_first_{name}_us"]
        line = TableLine(
            name=f"{name}, EP{ep}, first release", unit="us", role="shown", published=first[ep], predicted=us,
            source=first.source, note="the model is of the later release",
        )  # fmt: skip
        lines.append(line)
    description = (
        "What it is compared with: DeepEP on H800, 128 tokens a rank. Constants were derived from the later release."
    )
    return Table("Dispatch and combine of DeepEP, by EP degree", description, tuple(lines))


def microbatching_gain(system: System, batch: float) -> float:
    return system.decode_rate(batch, CONTEXT, microbatches=2) / system.decode_rate(batch, CONTEXT, microbatches=1) - 1.0


def _decode_microbatching(system: System) -> Table:
    series = published_series()["decode_microbatching"]
    lines = [
        point(series, batch, f"batch {batch}", "gain", microbatching_gain(system, batch), _both(system, batch))
        for batch in BATCHES
    ]
    description = (
        "Throughput of two microbatches over one, 4,096 tokens of context. One constant, the share of the exchange "
        "that cannot be hidden, was chosen by the three published gains together."
    )
    return Table("Microbatching in decode", description, tuple(lines))


def _both(system: System, batch: float) -> str:
    one, two = (system.decode_rate(batch, CONTEXT, microbatches=count) for count in (1, 2))
    return f"{one:,.0f} to {two:,.0f} tok/s"


def prefill_microbatching_gain(system: System, prompt: float) -> float:
    one, two = (system.prefill_s(prompt=prompt, microbatches=count) for count in (1, 2))
    return one / two - 1.0


def _prefill_microbatching(system: System) -> Table:
    series = published_series()["prefill_microbatching"]
    gains = {prompt: prefill_microbatching_gain(system, prompt) for prompt in PROMPTS}
    lines = _ends(series, list(gains.values()), f"prompts of {PROMPTS[0]:,} to {PROMPTS[-1]:,}")
    lines += [unpublished(f"prompts of {prompt:,}", "gain", gain) for prompt, gain in gains.items()]
    description = (
        "Throughput of two microbatches over one. Published is a range; which prompts it spans is not, so the lengths "
        "are ours."
    )
    return Table("Microbatching in prefill", description, tuple(lines))


def _ends(series: Series, gains: Sequence[float], over: str) -> list[TableLine]:
    """A published range: its two ends beside those of the predictions."""
    return [
        point(series, 0, f"smallest gain, {over}", "gain", min(gains)),
        point(series, 1, f"largest gain, {over}", "gain", max(gains)),
    ]


def mtp_gain(system: System, batch: float) -> float:
    return system.decode_rate(batch, CONTEXT) / system.decode_rate(batch, CONTEXT, drafts=0) - 1.0


def _mtp(system: System) -> Table:
    series, layer = published_series()["mtp"], published_series()["mtp_layer_us"]
    gains = {batch: mtp_gain(system, batch) for batch in BATCHES}
    over = f"batch {MTP_BATCHES[0]} to {MTP_BATCHES[-1]}"
    lines = _ends(series, [gains[batch] for batch in MTP_BATCHES], over)
    for drafts, word in enumerate(("no draft", "one draft")):
        layer_us = system.layer_us(96, CONTEXT, drafts)
        lines.append(point(layer, drafts, f"one layer, batch 96, {word}", "us", layer_us))
    lines += [unpublished(f"batch {batch}", "gain", gain) for batch, gain in gains.items()]
    description = (
        "Throughput with one draft (70 % accepted) over none, each with the better number of microbatches, 4,096 "
        "tokens of context. Published is a range, largest at small batch; its batches are not, so those of the TPOT "
        "classes are taken. A layer is of a step with two microbatches."
    )
    return Table("Multi-token prediction", description, tuple(lines))
