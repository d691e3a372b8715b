"""Published rows beside predictions: the bars, who is calibration, and that constants are what calibration gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.planner_tables import refit
from tripool.planner.cost.setup import named_routing
from tripool.planner.errors import BadRows
from tripool.planner.hardware import named_hardware
from tripool.planner.models import named_model
from tripool.planner.rows import (
    CALIBRATION,
    COLUMNS,
    bundled_rows,
    compare_rows,
    hardware_of,
    parse_rows,
    predict,
    verdicts,
)

R1 = named_model("deepseek-r1")
HEAD = ",".join(COLUMNS)


def one(**cells: object) -> str:
    row = {
        "system": "s", "hardware": "H100", "n_devices": 72, "phase": "decode", "precision": "FP8", "ep": 72,
        "batch_per_device": 256, "context_len": 2000, "mtp": 0, "tok_s_per_device": 2785, "source": "x",
    }  # fmt: skip
    return f"{HEAD}\n" + ",".join(str((row | cells)[name]) for name in COLUMNS)


def test_the_bars_hold() -> None:
    found = {each.family: each for each in verdicts(compare_rows(bundled_rows(), R1))}
    assert all(each.ok for each in found.values())
    ascend, h100, h800 = found["910C"], found["H100"], found["H800"]
    assert ascend.calibration_rows <= 3 and ascend.validation_rows >= 4
    assert ascend.median <= 0.05 and ascend.worst <= 0.12
    for gpu in (h100, h800):
        assert gpu.calibration_rows == 1 and gpu.validation_rows >= 1 and gpu.worst <= 0.15


def test_rows_outside_the_table_hold_too() -> None:
    """Published elsewhere, and used for nothing: prefill on H100 by prompt length."""
    errors = [each.prediction.error for each in compare_rows(bundled_rows("further"), R1) if each.role == "validation"]
    assert len(errors) == 2 and max(abs(error) for error in errors) <= 0.05


def test_averages_are_shown_and_not_judged() -> None:
    roles = {each.prediction.row.system: each.role for each in compare_rows(bundled_rows(), R1)}
    assert roles["DeepSeek production"] == roles["DeepSeek production (excl. cache hit)"] == "shown"


def test_constants_are_what_calibration_gives() -> None:
    found, routing = refit(bundled_rows(), R1), named_routing()
    assert found.routing.decode_drift == pytest.approx(routing.decode_drift, rel=0.005)
    assert found.routing.prefill_drift == pytest.approx(routing.prefill_drift, rel=0.005)
    for name, hardware in found.hardware.items():
        assert hardware.prefill_stack == pytest.approx(named_hardware(name).prefill_stack, rel=0.005)


def test_another_large_batch_calibrates_as_well() -> None:
    """Leave one out: fixed by any row of 100 requests a chip or so, the others still hold."""
    rows = bundled_rows()
    ascend = [row for row in rows if row.phase == "decode" and "910C" in row.hardware]
    for row in (row for row in ascend if row.batch >= 96):
        errors = refit(rows, R1, decode_row=row).errors(ascend, R1)
        assert max(abs(error) for error in errors.values()) <= 0.12


def test_calibration_rows_are_in_the_table() -> None:
    assert CALIBRATION.keys() <= {row.key for row in bundled_rows()}


@pytest.mark.parametrize(
    ("told", "drafts", "accept"),
    [("0", 0, 0.0), ("", 0, 0.0), ("1 draft, 0.70 accepted", 1, 0.7), ("simulated 0.6", 1, 0.6), ("yes", 1, None)],
)
def test_how_drafts_are_told(told: str, drafts: int, accept: float | None) -> None:
    (row,) = parse_rows(one(mtp=f'"{told}"'), "rows.csv")
    assert (row.drafts, row.accept) == (drafts, accept)


def test_words_that_matter() -> None:
    (row,) = parse_rows(one(system="perfect EPLB (prompt 1000/out 200)"), "rows.csv")
    assert row.balance == "perfect" and row.context == 1100
    (row,) = parse_rows(one(system="no EPLB", batch_per_device="~128 (stated)", precision="W8A8"), "rows.csv")
    assert row.balance == "none" and row.batch == 128 and row.precision == "int8"


@pytest.mark.parametrize(
    ("told", "name"),
    [("H20", "h20"), ("H200 SXM", "h200"), ("NVIDIA GB200 NVL72", "gb200-nvl72"), ("H800", "h800"),
     ("Ascend 910C (CloudMatrix384)", "ascend-910c"), ("8xH100", "h100"), ("H100-80GB", "h100"),
     ("Ascend910C", "ascend-910c"), ("4 x H800", "h800")],
)  # fmt: skip
def test_hardware_by_the_name_tables_use(told: str, name: str) -> None:
    (row,) = parse_rows(one(hardware=told), "rows.csv")
    assert hardware_of(row).name == name


@pytest.mark.parametrize("told", ["GH100", "H1000", "1910C", "Ascend 910B", "MI300X", ""])
def test_other_hardware_is_not_taken_for_ours(told: str) -> None:
    (row,) = parse_rows(one(hardware=told), "rows.csv")
    assert hardware_of(row) is None


@pytest.mark.parametrize(
    ("told", "batch"), [("1e2", 100), ("2.5k", 2500), ("0.1M", 100_000), ("32 kept", 32), ("1,024", 1024)]
)
def test_numbers_as_tables_write_them(told: str, batch: float) -> None:
    (row,) = parse_rows(one(batch_per_device=f'"{told}"'), "rows.csv")
    assert row.batch == batch


def test_a_header_may_be_written_by_a_spreadsheet() -> None:
    head, row = one().split("\n")
    assert parse_rows("\ufeff" + head.title().replace(",", " , ") + "\n" + row, "rows.csv") == parse_rows(
        one(), "rows.csv"
    )


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.sampled_from(["deepseek-r1", "llama-3-8b", "qwen3-30b-a3b"]),
    st.fixed_dictionaries(
        {},
        optional={
            "hardware": st.sampled_from(["H100", "8xH800", "910C", "GB200 NVL72", "H20", "910B", ""]),
            "n_devices": st.sampled_from(["", "0", "1", "3", "1000000", "0.5", "-4", "16 nodes"]),
            "phase": st.sampled_from(["prefill", "Decode", "both"]),
            "precision": st.sampled_from(["", "INT8", "bf16", "W4A8", "fp4"]),
            "ep": st.sampled_from(["", "0", "1", "7", "320", "100000", "1.5", "EP72"]),
            "batch_per_device": st.sampled_from(["", "0", "0.25", "1", "16384", "1e9", "1e99", "nan"]),
            "context_len": st.sampled_from(["", "0", "1", "128k", "10000000"]),
            "mtp": st.sampled_from(["", "yes", "0.7", "1.5", "2 tokens"]),
            "tok_s_per_device": st.sampled_from(["", "0", "22.3k", "n/a", "-5"]),
        },
    ),
)
def test_any_row_gets_a_number_a_place_or_a_reason(model: str, cells: dict[str, str]) -> None:
    """Never a traceback, and never a prediction that is not a rate."""
    try:
        rows = parse_rows(one(**cells), "rows.csv")
    except BadRows as error:
        told = error
        rows = []
    if not rows:
        assert "rows.csv line 2" in told.message and told.hint
        return
    (compared,) = compare_rows(rows, named_model(model))
    predicted = compared.prediction.predicted
    assert (compared.role == "shown") == (predicted is None)
    assert predicted is None or 0 < predicted < 1e9


@pytest.mark.parametrize("cells", [{"hardware": "Abacus"}, {"batch_per_device": ""}, {"precision": "FP4"}])
def test_what_cannot_be_asked_is_shown(cells: dict[str, str]) -> None:
    (row,) = parse_rows(one(**cells), "rows.csv")
    assert predict(row, R1).error is None
    assert [each.role for each in compare_rows([row], R1)] == ["shown"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("system,hardware\na,b", "phase"),
        (HEAD, "no rows"),
        (one(phase="encode"), "encode"),
        (one(tok_s_per_device=""), "tok_s_per_device"),
        (one(batch_per_device="many"), "batch_per_device"),
        (one(n_devices="0.5"), "n_devices"),
        (one(ep="1.5"), "ep"),
        (one(context_len="1e12"), "context_len"),
    ],
)
def test_odd_tables_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(BadRows, match=named):
        parse_rows(text, "rows.csv")
