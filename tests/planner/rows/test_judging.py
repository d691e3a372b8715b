"""Bars per family, calibration by values, and the error bands of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tripool.planner.hardware import hardware_names, named_hardware
from tripool.planner.models import named_model
from tripool.planner.rows import CALIBRATION, band_of, bundled_rows, compare_rows, fixed_by, unseen, verdicts
from tripool.planner.rows.judging import BARS, HELD_OUT, MEDIAN_UNSEEN, SEEN, SHARE_UNSEEN, TABLES, UNSEEN

R1 = named_model("deepseek-r1")
ROWS = [row for name in TABLES for row in bundled_rows(name)]


@pytest.fixture(scope="module")
def compared():
    return compare_rows(ROWS, R1)


@pytest.fixture(scope="module")
def judged(compared):
    """With the rows that no constant was chosen by."""
    return [*compared, *compare_rows([row for table in (UNSEEN, SEEN, HELD_OUT) for row in bundled_rows(table)], R1)]


def test_the_bars_hold(compared) -> None:
    found = {each.family: each for each in verdicts(compared)}
    assert {family for family, each in found.items() if not each.ok} == set()
    assert found["910C"].worst <= 0.10 and found["910C"].validation_rows >= 4
    assert found["H800"].worst_bar == found["H200"].worst_bar == found["H100"].worst_bar == 0.15
    assert found["H20"].worst_bar == found["GB200"].worst_bar == found["B200"].worst_bar == 0.25
    assert all(found[family].validation_rows for bar in BARS for family in bar.families)


def test_few_rows_are_calibration(compared) -> None:
    roles = [each.prediction.row for each in compared if each.role == "calibration"]
    assert len(roles) == len(CALIBRATION)


def test_calibration_goes_by_values() -> None:
    """A calibration row under another name, or told per die, is still one; another rate is another measurement."""
    row = next(row for row in ROWS if row.system == "CloudMatrix-Infer" and row.phase == "decode")
    assert fixed_by(row) == "routing decode_drift"
    renamed = replace(row, system="our own run", source="")
    assert fixed_by(renamed) == fixed_by(row)
    assert fixed_by(replace(renamed, batch=row.batch / 2, batch_per_die=True)) == fixed_by(row)
    assert fixed_by(replace(renamed, published=row.published * 1.2)) is None
    assert fixed_by(replace(renamed, batch=64.0)) is None


def test_averages_are_shown_and_not_judged(compared) -> None:
    roles = {each.prediction.row.system: each.role for each in compared}
    assert roles["DeepSeek production"] == roles["DeepSeek production (excl. cache hit)"] == "shown"


@pytest.mark.parametrize("name", hardware_names())
def test_every_hardware_has_a_band_or_says_that_it_has_none(name: str, judged) -> None:
    band = band_of(named_hardware(name), R1)
    every = [each.prediction for each in judged if each.role == "validation"]
    own = [each for each in every if each.hardware.name == name]
    assert band.rows == len(own)
    held = [abs(each.error) <= band.within * (1 + 1e-9) for each in own]
    assert sum(held) >= 0.9 * len(own), "nine of ten published rates are in the band"
    if own and len(own) < 5:
        assert all(held) and band.within >= sorted(abs(each.error) for each in every)[int(0.8 * len(every))]
    if not own:
        assert band.words() == "assumed, no published row" and band.around(1.0) is None


def test_figures_of_a_plan_have_limits() -> None:
    band = band_of(named_hardware("h200"), R1)
    low, high = band.around(100.0)
    assert low < 100.0 < high
    soonest, latest = band.around_time(50.0)
    assert soonest < 50.0 < latest and low / 100.0 == pytest.approx(50.0 / latest)
    words = band.beside({"requests/s": 100.0}, {"TPOT ms": 50.0})
    assert "published rows of H200" in words and "requests/s" in words and "TPOT ms" in words


@pytest.mark.parametrize("name", ["ascend-950dt", "ascend-950pr", "h20-3e"])
def test_hardware_without_rows_has_no_limits(name: str) -> None:
    band = band_of(named_hardware(name), R1)
    assert band.beside({"requests/s": 1.0}, {}) == "error: assumed, no published row"


def test_rows_of_other_attention_or_another_description_do_not_count() -> None:
    ascend, h200 = named_hardware("ascend-910c"), named_hardware("h200")
    assert band_of(ascend, R1).rows and not band_of(ascend, named_model("deepseek-v3.2")).rows
    assert band_of(h200, named_model("deepseek-v3.2")).rows
    assert not band_of(replace(h200, hbm_bytes=2 * h200.hbm_bytes), R1).rows


def test_unseen_rows_fix_nothing_and_are_within_the_median() -> None:
    """Found after the model, and kept whatever their errors are."""
    compared = compare_rows(bundled_rows(UNSEEN), R1)
    assert not any(each.role == "calibration" for each in compared)
    found = unseen(compared)
    assert found.rows >= 39 and found.median <= MEDIAN_UNSEEN and found.share >= SHARE_UNSEEN


def test_rows_found_later_fix_nothing_and_widen_the_bands() -> None:
    """They are outside of the bars, and a plan's band says so."""
    seen, held_out = (compare_rows(bundled_rows(name), R1) for name in (SEEN, HELD_OUT))
    assert len(seen) >= 150 and len(held_out) >= 28
    assert not any(each.role == "calibration" for each in [*seen, *held_out])
    assert band_of(named_hardware("b200"), R1).within > 0.2
