"""Published beside predicted: nothing hidden, nothing claimed that is not published, nothing tuned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.planner.hardware import named_hardware
from tripool.planner.reproduce import Table, TableLine, cloudmatrix_tables, summarise
from tripool.planner.reproduce.ablations import ablation_tables, microbatching_gain, mtp_gain
from tripool.planner.reproduce.lines import cells, error_words
from tripool.planner.reproduce.pool import SHARES, cache_throughput, cache_ttft, loading, planes_ratio, pool_tables
from tripool.planner.reproduce.published import detailed_rows, published_series
from tripool.planner.reproduce.serving import serving_tables
from tripool.planner.reproduce.system import cloudmatrix, h800
from tripool.planner.rows import bundled_rows, compare_rows

SYSTEM = cloudmatrix()
TABLES = cloudmatrix_tables()
LINES = [line for table in TABLES for line in table.lines]
INPUTS = {"link_gb_s"}
"""Published, and used to predict: no line of its own."""


def line_of(title: str, name: str) -> TableLine:
    (found,) = (line for table in TABLES if table.title.startswith(title) for line in table.lines if line.name == name)
    return found


# ---- what is published --------------------------------------------------------------------------------------------


def test_every_published_number_has_a_line() -> None:
    shown = {line.published for line in LINES}
    for name, series in published_series().items():
        left = set(series.values.values()) - shown
        if name == "price":
            left -= {series[0]}  # the rate that the other two are told at
        assert not left or name in INPUTS, f"{name} hides {left}"
    for row, told in detailed_rows():
        assert "910C" not in row.hardware or {row.published, told.tok_s_per_tflops} <= shown
        assert told.tok_s_per_tflops in shown


def test_nothing_else_is_called_published() -> None:
    known = {value for series in published_series().values() for value in series.values.values()}
    for row, told in detailed_rows():
        known |= {row.published, row.batch, told.tpot_ms, told.tok_s_per_tflops}
    assert {line.published for line in LINES if line.published is not None} <= known
    assert all(line.source for line in LINES if line.published is not None)


def test_what_a_constant_was_fit_to_is_marked_and_named() -> None:
    fitted = {series.fits for series in published_series().values() if series.fits}
    for name in fitted:
        hardware, _, constant = name.partition(" ")
        assert named_hardware(hardware).facts[constant].kind in ("calibrated", "derived")
    by_ablation = {
        f"ascend-910c {key}" for key, fact in SYSTEM.hardware.facts.items() if fact.source.startswith("ablation:")
    }
    assert by_ablation <= fitted
    assert line_of("Microbatching in decode", "batch 96").role == "fit to this ablation"
    assert line_of("Context cache", "50.0% reused, UB: throughput").role == "fit to this ablation"
    assert line_of("Context cache", "90.0% reused, UB: throughput").role == "validation"


def test_rows_have_the_role_and_the_value_that_validation_gives_them() -> None:
    for compared in compare_rows(bundled_rows(), SYSTEM.model):
        row = compared.prediction.row
        if "910C" in row.hardware:
            (line,) = (
                each for each in LINES if each.published == row.published and not each.repeats and ":" not in each.name
            )
            assert line.role == compared.role and line.predicted == compared.prediction.predicted


@pytest.mark.parametrize(
    "wrong",
    [{"role": "validation"}, {"role": "not published", "published": 1.0}, {"role": "validation", "published": 1.0}],
)
def test_a_line_cannot_claim_what_is_not_published(wrong) -> None:
    with pytest.raises(AssertionError):
        TableLine(name="x", unit="ms", predicted=1.0, **wrong)


# ---- errors -------------------------------------------------------------------------------------------------------


def test_errors_are_relative_and_those_of_gains_are_differences() -> None:
    slow = TableLine(name="a", unit="ms", role="validation", published=10.0, predicted=12.0, source="s")
    gain = TableLine(name="b", unit="gain", role="validation", published=0.10, predicted=0.07, source="s")
    alone = TableLine(name="c", unit="ms", role="not published", predicted=3.0)
    assert (error_words(slow), error_words(gain), error_words(alone)) == ("+20.0%", "-3.0 pt", "")
    assert cells(alone)[2:4] == ["-", "3.00"]


def test_a_measurement_told_twice_counts_once() -> None:
    first = TableLine(name="rate", unit="tok/s", role="validation", published=10.0, predicted=11.0, source="s")
    gain = TableLine(name="gain", unit="gain", role="validation", published=0.1, predicted=0.2, source="s")
    again = replace(first, name="time", predicted=99.0, repeats=True)
    fitted = replace(first, name="fit", predicted=99.0, role="fit to this ablation")
    found = summarise([Table("", "", (first, again, fitted, gain))])
    assert (found.num_validation, found.worst.name, found.num_gains) == (1, "rate", 1)
    assert found.median == pytest.approx(0.1)


def test_another_chip_moves_predictions_and_no_published_number() -> None:
    chip = SYSTEM.hardware
    flops = {name: rate / 2 for name, rate in chip.flops.items()}
    slower = replace(SYSTEM, hardware=replace(chip, flops=flops, cache_bytes_per_s={"memory": 1e9, "service": 1e9}))
    tables = [*serving_tables(slower), *ablation_tables(slower, h800()), *pool_tables(slower)]
    for before, after in zip(TABLES, tables, strict=True):
        told = [(line.name, line.published, line.role, line.source) for line in before.lines]
        assert told == [(line.name, line.published, line.role, line.source) for line in after.lines]
    changed = {table.title for table, other in zip(TABLES, tables, strict=True) if table != other}
    assert {"TPOT classes, batch chosen by the model", "Microbatching in decode", "Multi-token prediction"} <= changed


# ---- the model behind them ----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(limit_ms=st.floats(10.0, 120.0), context=st.integers(256, 8192))
def test_the_chosen_batch_is_the_largest_that_keeps_the_limit(limit_ms: float, context: int) -> None:
    ranks = SYSTEM.hardware.ranks
    found = SYSTEM.largest_within(limit_ms, context, context)
    assert (found is None) == (SYSTEM.tpot_ms(ranks, context) > limit_ms)
    if found is None:
        return
    assert found.tpot_ms <= limit_ms and found.tok_s == pytest.approx(found.batch / found.tpot_ms * 1e3)
    if found.stopped_by == "TPOT":
        assert SYSTEM.tpot_ms(found.batch + ranks, context) > limit_ms


def test_a_class_that_cannot_be_kept_is_said_and_not_predicted() -> None:
    chip = SYSTEM.hardware
    slower = replace(SYSTEM, hardware=replace(chip, layer_s=chip.layer_s * 20))
    lines = [line for table in serving_tables(slower) for line in table.lines if line.name.startswith("15 ms")]
    assert [line.predicted for line in lines] == [None, None] and lines[0].note == "no batch keeps it"
    assert all(error_words(line) == "" and cells(line)[3] == "-" for line in lines)


def test_ablations_have_the_published_sign() -> None:
    assert microbatching_gain(SYSTEM, 8) < 0 < microbatching_gain(SYSTEM, 64)
    gains = [mtp_gain(SYSTEM, batch) for batch in (8, 24, 64, 96)]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0


@pytest.mark.parametrize("plane", ["memory", "service"])
def test_more_reuse_is_faster_on_both_planes(plane) -> None:
    times = [cache_throughput(SYSTEM, share, plane) for share in SHARES]
    waits = [cache_ttft(SYSTEM, share, plane) for share in SHARES]
    assert times[0] == 1.0 and times == sorted(times) and waits == sorted(waits, reverse=True)


def test_the_memory_plane_is_never_slower() -> None:
    assert all(planes_ratio(SYSTEM, share) >= 1.0 for share in SHARES)


def test_the_pool_reads_the_store_once() -> None:
    found = loading(SYSTEM)
    assert found.object_store_s(8) == pytest.approx(8 * found.object_store_s(1))
    assert found.pool_warm_s() < found.pool_cold_s() == pytest.approx(found.object_store_s(1))
    slow_link = replace(found, link_bytes_per_s=found.store_bytes_per_s / 2)
    assert slow_link.pool_cold_s() == slow_link.pool_warm_s()
