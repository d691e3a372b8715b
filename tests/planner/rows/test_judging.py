"""Bars per family, calibration by values, and the error bands of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tripool.planner.hardware import hardware_names, named_hardware
from tripool.planner.models import named_model
from tripool.planner.rows import CALIBRATION, band_of, bundled_rows, compare_rows, fixed_by, verdicts
from tripool.planner.rows.judging import BARS, TABLES

R1 = named_model("deepseek-r1")
ROWS = [row for name in TABLES for row in bundled_rows(name)]


@pytest.fixture(scope="module")
def compared():
    return compare_rows(ROWS, R1)


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
def test_every_hardware_has_a_band_or_says_that_it_has_none(name: str, compared) -> None:
    hardware = named_hardware(name)
    band = band_of(hardware)
    own = [each.prediction for each in compared if each.role == "validation" and each.prediction.hardware.name == name]
    assert band.rows == len(own)
    for prediction in own:
        low, high = band.around(prediction.predicted)
        assert low * (1 - 1e-9) <= prediction.published <= high * (1 + 1e-9)
    everyone = [abs(each.prediction.error) for each in compared if each.role == "validation"]
    assert band.within == pytest.approx(max(everyone) if len(own) < 5 else max(abs(each.error) for each in own))
    if not own:
        assert band.words() == "assumed, no published row" and band.around(1.0) is None


def test_figures_of_a_plan_have_limits(compared) -> None:
    band = band_of(named_hardware("h200"))
    low, high = band.around(100.0)
    assert low < 100.0 < high
    soonest, latest = band.around_time(50.0)
    assert soonest < 50.0 < latest and low / 100.0 == pytest.approx(50.0 / latest)
    words = band.beside({"requests/s": 100.0}, {"TPOT ms": 50.0})
    assert "published rows of H200" in words and "requests/s" in words and "TPOT ms" in words
    assert band_of(named_hardware("mi300x")).beside({"requests/s": 1.0}, {}) == "error: assumed, no published row"
