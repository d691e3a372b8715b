"""Constants are what calibration rows give, and a family left out is still predicted."""

from __future__ import annotations

from statistics import median

import pytest

from tripool.planner.cost.setup import named_routing
from tripool.planner.hardware import named_hardware
from tripool.planner.models import named_model
from tripool.planner.rows import bundled_rows
from tripool.planner.rows.calibrating import leave_family_out, refit
from tripool.planner.rows.judging import MEDIAN_LEFT_OUT, TABLES
from tripool.planner.rows.predicting import named_software

R1 = named_model("deepseek-r1")
ROWS = [row for name in TABLES for row in bundled_rows(name)]


def test_constants_are_what_calibration_gives() -> None:
    found, routing = refit(ROWS, R1), named_routing()
    assert found.routing.decode_drift == pytest.approx(routing.decode_drift, rel=0.005)
    assert found.routing.prefill_drift == pytest.approx(routing.prefill_drift, rel=0.005)
    for name, hardware in found.hardware.items():
        assert hardware.prefill_stack == pytest.approx(named_hardware(name).prefill_stack, rel=0.005)
        assert hardware.agree_s == pytest.approx(named_hardware(name).agree_s, rel=0.005)
        assert hardware.layer_s == pytest.approx(named_hardware(name).layer_s, rel=0.005)
        assert hardware.host_s == pytest.approx(named_hardware(name).host_s, rel=0.005)
    for name, constants in found.software.items():
        assert constants == pytest.approx(named_software()[name], rel=0.005)


def test_two_published_figures_of_one_overhead_agree() -> None:
    """What a row leaves for SGLang's scheduling is what its overlap of it was published to hide."""
    software, step_us = named_software(), named_hardware("h200").step_s * 1e6
    assert step_us + software["sglang to 0.5.7"]["agree_us"] == pytest.approx(software["sglang"]["draft_us"], rel=0.05)


def test_another_large_batch_calibrates_as_well() -> None:
    """Leave one out: fixed by any row of 100 requests a chip or so, the others still hold."""
    ascend = [row for row in ROWS if row.phase == "decode" and "910C" in row.hardware]
    for row in (row for row in ascend if row.batch >= 96):
        errors = refit(ROWS, R1, decode_row=row).errors(ascend, R1)
        assert max(abs(error) for error in errors.values()) <= 0.12


def test_a_family_left_out() -> None:
    found = leave_family_out(ROWS, R1)
    assert {"910C", "H100", "H800", "H200", "H20", "GB200", "B200"} <= {each.family for each in found}
    assert median(abs(error) for each in found for error in each.errors.values()) <= MEDIAN_LEFT_OUT
