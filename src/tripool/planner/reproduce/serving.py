"""Tables of the published rows: prefill, decode, TPOT classes, efficiency against other systems, and cost."""

from __future__ import annotations

from collections.abc import Iterator

from tripool.planner.reproduce.lines import Table, TableLine, Unit, unpublished
from tripool.planner.reproduce.published import RowDetails, detailed_rows, published_series
from tripool.planner.reproduce.system import ACCEPT, CONTEXT, PREFILL_TOKENS, System
from tripool.planner.rows import Compared, Row, compare_rows

CLASSES = (
    # TPOT limit in ms, prompt and answer in tokens, and the published row that it is about
    (50.0, 1024, 1024, "CloudMatrix-Infer SLO 50ms (prompt 1024/out 1024)"),
    (50.0, 2048, 256, "CloudMatrix-Infer SLO 50ms (prompt 2048/out 256)"),
    (50.0, 4096, 0, "CloudMatrix-Infer"),
    (30.0, 4096, 256, "CloudMatrix-Infer SLO 30ms (prompt 4096/out 256)"),
    (15.0, 4096, 256, "CloudMatrix-Infer SLO 15ms (prompt 4096/out 256)"),
)


def compared_rows(system: System) -> list[tuple[Compared, RowDetails]]:
    return [(compare_rows([row], system.model)[0], details) for row, details in detailed_rows()]


def serving_tables(system: System) -> Iterator[Table]:
    rows = compared_rows(system)
    own = [(compared, details) for compared, details in rows if "910C" in compared.prediction.row.hardware]
    yield _prefill(system, own)
    yield _decode(system, own)
    yield _classes(system, own)
    yield _per_tflops(rows)
    yield _cost(system)


def _prefill(system: System, own: list[tuple[Compared, RowDetails]]) -> Table:
    lines = [_rate(compared) for compared, _ in own if compared.prediction.row.phase == "prefill"]
    for prompt in (1024, 2048, 8192):
        rate = PREFILL_TOKENS / system.prefill_s(prompt=prompt)
        lines.append(unpublished(f"prompts of {prompt:,}", "tok/s", rate))
    description = "16 chips, EP32, 16,384 tokens a chip and batch, prompts of 4,096 unless a line says so. Per chip."
    return Table("Prefill throughput", description, tuple(lines))


def _line(
    of: Compared, name: str, unit: Unit, published: float, predicted: float | None, *, note: str = "",
    repeats: bool = False,
) -> TableLine:  # fmt: skip
    """A line about a published row."""
    source = of.prediction.row.source
    return TableLine(
        name=name, unit=unit, role=of.role, published=published, predicted=predicted, source=source, note=note,
        repeats=repeats,
    )  # fmt: skip


def _rate(compared: Compared) -> TableLine:
    row = compared.prediction.row
    return _line(compared, _row_name(row), "tok/s", row.published or 0.0, compared.prediction.predicted)


def _row_name(row: Row) -> str:
    return f"{row.system}, batch {row.batch:.0f}" if row.phase == "decode" and row.batch else row.system


def _decode(system: System, own: list[tuple[Compared, RowDetails]]) -> Table:
    lines = []
    for compared, details in own:
        row, prediction = compared.prediction.row, compared.prediction
        if row.phase != "decode":
            continue
        lines.append(_rate(compared))
        if details.tpot_ms and row.batch and prediction.predicted:
            tpot_ms = row.batch / prediction.predicted * 1e3
            lines.append(_line(compared, "its time per output token", "ms", details.tpot_ms, tpot_ms, repeats=True))
    series = published_series()["iteration_ms"]
    for requests, published_ms in series.values.items():
        batch = requests * system.hardware.ranks
        step_ms = system.decode_step(batch, CONTEXT).seconds * 1e3
        line = TableLine(
            name=f"one step, {requests:.0f} requests a die", unit="ms", published=published_ms, predicted=step_ms,
            role="calibration" if batch == 96 else "validation", source=series.source, repeats=True,
        )  # fmt: skip
        lines.append(line)
    description = (
        f"160 chips, EP320, one draft of which {ACCEPT:.0%} are accepted; batch and throughput per chip; the context "
        "is the prompt and half the answer. Throughput, TPOT and step are one measurement in three forms."
    )
    return Table("Decode throughput at the published batches", description, tuple(lines))


def _classes(system: System, own: list[tuple[Compared, RowDetails]]) -> Table:
    by_name = {compared.prediction.row.system: (compared, details) for compared, details in own}
    lines = []
    for limit_ms, prompt, answer, name in CLASSES:
        compared, details = by_name[name]
        row = compared.prediction.row
        assert row.context is not None and row.batch is not None
        found = system.largest_within(limit_ms, row.context, prompt + answer)
        what = _limit_words(limit_ms, prompt, answer)
        batch, rate, used = None, None, "no batch keeps it"
        if found is not None:
            batch, rate, stopped = found.batch, found.tok_s, found.stopped_by
            used = f"published runs at {details.tpot_ms:g} ms, this at {found.tpot_ms:.1f}; stopped by {stopped}"
        lines.append(_line(compared, f"{what}: batch", "requests", row.batch, batch, note=used))
        lines.append(_line(compared, f"{what}: throughput", "tok/s", row.published or 0.0, rate))
    description = (
        "The model chooses the largest batch within the limit, one request a die at a time. Published batches leave "
        "some of the limit unused (24.6 of 30 ms), which the model does not know."
    )
    return Table("TPOT classes, batch chosen by the model", description, tuple(lines))


def _limit_words(limit_ms: float, prompt: int, answer: int) -> str:
    return f"{limit_ms:.0f} ms, {prompt:,} in" + (f", {answer:,} out" if answer else "")


def _per_tflops(rows: list[tuple[Compared, RowDetails]]) -> Table:
    lines = []
    for compared, details in rows:
        row, prediction = compared.prediction.row, compared.prediction
        if details.tok_s_per_tflops is None or prediction.hardware is None or row.precision is None:
            continue
        tflops = prediction.hardware.flops[row.precision] * prediction.hardware.ranks / 1e12
        predicted = None if prediction.predicted is None else prediction.predicted / tflops
        family = prediction.hardware.family
        note = "" if predicted is not None else "no batch: an average over a day"
        name = f"{row.phase}: {_row_name(row)}, {family}"
        published, repeats = details.tok_s_per_tflops, family == "910C"
        lines.append(_line(compared, name, "tok/s/TFLOPS", published, predicted, note=note, repeats=repeats))
    description = (
        "Throughput over the chip's peak at the row's precision (INT8 or FP8). Those of the 910C stand above too."
    )
    return Table("Efficiency against other systems", description, tuple(lines))


def _cost(system: System) -> Table:
    series = published_series()["price"]
    per_hour = system.hardware.price_per_hour
    assert per_hour is not None, "the bundled description has a price"
    rate, millions, yuan = series[0], series[1], series[2]
    lines = [
        TableLine(
            name=f"at {rate:,.0f} tok/s a card: per hour", unit="M tokens/h", role="arithmetic", published=millions,
            predicted=rate * 3600 / 1e6, source=series.source,
        ),
        TableLine(
            name=f"at {rate:,.0f} tok/s a card: per million", unit="CNY/M", role="arithmetic", published=yuan,
            predicted=cost_per_million(per_hour, rate), source=series.source,
        ),
    ]  # fmt: skip
    for limit_ms, prompt, answer, _ in CLASSES:
        found = system.largest_within(limit_ms, prompt + answer / 2, prompt + answer)
        name = f"decode within {_limit_words(limit_ms, prompt, answer)}"
        cost = cost_per_million(per_hour, found.tok_s) if found else None
        note = f"batch {found.batch}, {found.tok_s:,.0f} tok/s" if found else "no batch keeps it"
        lines.append(unpublished(name, "CNY/M", cost, note))
    rate = PREFILL_TOKENS / system.prefill_s()
    cost = cost_per_million(per_hour, rate)
    lines.append(unpublished("prefill, prompts of 4,096", "CNY/M", cost, f"{rate:,.0f} tok/s"))
    description = (
        f"{per_hour:g} yuan per card and hour, as the press has it. Each pool by itself: per million tokens that it "
        "makes (decode) or reads (prefill). For which batch and context the 2,300 hold is not published."
    )
    return Table("Cost per million tokens", description, tuple(lines))


def cost_per_million(price_per_hour: float, tok_s: float) -> float:
    return price_per_hour / (tok_s * 3600) * 1e6
