"""Rows are read as they are written: what is not stated stays unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.rows.conftest import table
from tripool.planner.errors import BadRows
from tripool.planner.models import named_model
from tripool.planner.rows import COLUMNS, compare_rows, parse_rows, predict

HEAD = ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("told", "drafts", "accept"),
    [
        ("0", 0, 0.0), ("no", 0, 0.0), ("off", 0, 0.0), ("", None, None), ("n/a", None, None), ("?", None, None),
        ("1 draft, 0.70 accepted", 1, 0.7), ("simulated 0.6", 1, 0.6), ("yes", 1, None), ("yes (rate n/a)", 1, None),
        ("MTP-1, 85%", 1, 0.85), ("0.7", 1, 0.7), ("1.8", 1, 0.8),
        ("3 drafts, accepted length 2.4", 3, 1.4 / 3), ("2 drafts, accepted length 2.4-2.7", 2, 1.55 / 2),
        ("draft tokens=3, acceptance length 2.18", 2, 1.18 / 2), ("MTP3, accept len 2.37", 3, 1.37 / 3),
        ("steps=2, accept_length: 2.5", 2, 0.75), ("3 drafts", 3, None),
        ("0 drafts", 0, 0.0), ("no MTP", 0, 0.0), ("MTP off", 0, 0.0), ("none stated", None, None),
        ("not disclosed", None, None), ("MTP3 (accept 2.4)", 3, 1.4 / 3), ("2 drafts, 2.5 tokens per step", 2, 0.75),
        ("accept rate 0.7", 1, 0.7), ("1 draft, acceptance 85%", 1, 0.85), ("2", 2, None), ("1", 1, None),
        ("w/o MTP", 0, 0.0), ("MTP not enabled", 0, 0.0), ("speculative decoding: off", 0, 0.0), ("False", 0, 0.0),
        ("not used", 0, 0.0), ("MTP not stated", None, None), ("k=3, AL=2.4", 3, 1.4 / 3), ("EAGLE", 1, None),
    ],
)  # fmt: skip
def test_how_drafts_are_told(row_of, told: str, drafts: int | None, accept: float | None) -> None:
    row = row_of(mtp=told)
    assert row.drafts == drafts
    assert row.accept is None if accept is None else row.accept == pytest.approx(accept)


@pytest.mark.parametrize(
    ("told", "microbatches"),
    [
        ("SGLang decode", None), ("SGLang, no TBO", 1), ("SGLang without two-batch overlap", 1), ("vLLM, DBO off", 1),
        ("SGLang, SBO", 1), ("single-batch overlap", 1), ("SGLang with TBO", 2), ("vLLM dual-batch overlap", 2),
        ("two microbatches", 2), ("no microbatching", 1),
    ],
)  # fmt: skip
def test_microbatches(row_of, told: str, microbatches: int | None) -> None:
    assert row_of(system=told).microbatches == microbatches


@pytest.mark.parametrize(
    ("told", "balance"),
    [
        ("perfect EPLB", "perfect"), ("perfectly balanced", "perfect"), ("no EPLB", "none"), ("EPLB off", "none"),
        ("default EPLB", "balanced"), ("imperfect", "balanced"),
    ],
)  # fmt: skip
def test_balance(row_of, told: str, balance: str) -> None:
    assert row_of(system=told).balance == balance
    assert row_of(source=told).balance == balance


@pytest.mark.parametrize(
    ("precision", "system", "experts", "attention", "kv"),
    [
        ("FP8", "s", "fp8", False, False), ("INT8", "s", "int8", False, False), ("W8A8", "s", "w8a8", False, False),
        ("", "s", None, False, False), ("W4A8", "s", "w4a8", False, False),
        ("W4A16", "s", "int4", False, False), ("MXFP4", "s", "mxfp4", False, False),
        ("NVFP4 + FP8", "s", "fp4", False, False),
        ("NVFP4 experts, FP8 attention", "s", "fp4", True, True),
        ("FP8", "BF16 attention and FP8 experts", "fp8", False, False),
        ("BF16, FP8 KV cache", "s", "bf16", False, True), ("INT4 experts, BF16", "s", "int4", False, False),
        ("FP8 (W8A8)", "s", "fp8", False, False), ("FP8 KV", "s", None, False, True),
        ("", "NVFP4 s", "fp4", False, False),
        ("FP8 weights, FP8 KV", "s", "fp8", False, True), ("FP8", "8-bit KV cache", "fp8", False, True),
        ("FP8", "FP8 MLA", "fp8", True, True), ("BF16", "KV cache in FP8", "bf16", False, True),
    ],
)  # fmt: skip
def test_precisions(row_of, precision: str, system: str, experts: str | None, attention: bool, kv: bool) -> None:
    row = row_of(precision=precision, system=system)
    assert (row.precision, row.eight_bit_attention, row.eight_bit_kv) == (experts, attention, kv)


def test_precisions_may_have_columns(row_of) -> None:
    row = row_of(kv_precision="fp8_e4m3", attention_precision="bf16")
    assert row.eight_bit_kv and not row.eight_bit_attention
    assert row_of(kv_precision="bf16", attention_precision="FP8").eight_bit_attention


def test_batches_and_rates_per_die(row_of) -> None:
    row = row_of(hardware="Ascend 910C", batch_per_device="60 per die", tok_s_per_device="1200/die")
    assert row.batch == 60 and row.batch_per_die and row.published_per_die
    assert row_of(source="batch size per die").batch_per_die
    assert not row_of(source="batch is per NPU = 2 dies for 910C").batch_per_die


@pytest.mark.parametrize(
    ("cells", "model"),
    [
        ({}, ""), ({"system": "Kimi K2 on SGLang"}, "Kimi K2"), ({"system": "LongCat-Flash"}, "LongCat-Flash"),
        ({"source": "DeepSeek-V3.2 blog"}, "DeepSeek-V3.2"), ({"system": "DeepSeek production"}, ""),
        ({"model": ""}, None), ({"model": "?"}, None), ({"model": "Qwen/Qwen3-235B-A22B"}, "Qwen/Qwen3-235B-A22B"),
        ({"model": "", "system": "Kimi-K2"}, "Kimi-K2"),
    ],
)  # fmt: skip
def test_the_model_that_a_row_names(row_of, cells: dict[str, str], model: str | None) -> None:
    assert row_of(**cells).model == model


def test_lengths_and_other_words(row_of) -> None:
    assert row_of(system="perfect EPLB (prompt 1000/out 200)").context == 1100
    assert row_of(output_len=500).context == 2250
    assert row_of(phase="prefill", output_len=500).context == 2000
    assert row_of(batch_per_device="~128 (stated)").batch == 128
    assert row_of(system="prefill TP8", ep="").tp == 8 and row_of(tp=4).tp == 4


def test_a_row_without_a_rate_stays_in_the_table(row_of) -> None:
    for told in ("", "n/a", "0"):
        assert row_of(tok_s_per_device=told).published is None


@pytest.mark.parametrize(
    ("told", "batch"), [("1e2", 100), ("2.5k", 2500), ("0.1M", 100_000), ("32 kept", 32), ("1,024", 1024)]
)
def test_numbers_as_tables_write_them(row_of, told: str, batch: float) -> None:
    assert row_of(batch_per_device=told).batch == batch


def test_a_header_may_be_written_by_a_spreadsheet() -> None:
    head, row = table().split("\r\n")[:2]
    spread = "\ufeff" + head.title().replace(",", " , ") + "\n" + row
    assert parse_rows(spread, "rows.csv") == parse_rows(table(), "rows.csv")


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.sampled_from(["deepseek-r1", "llama-3-8b", "qwen3-30b-a3b"]),
    st.fixed_dictionaries(
        {},
        optional={
            "hardware": st.sampled_from(["H100", "8xH800", "910C", "GB200 NVL72", "H20", "910B", ""]),
            "n_devices": st.sampled_from(["", "0", "1", "3", "1000000", "0.5", "-4", "16 nodes"]),
            "phase": st.sampled_from(["prefill", "Decode", "both"]),
            "precision": st.sampled_from(["", "INT8", "bf16", "W4A8", "fp4", "NVFP4 + FP8 attention"]),
            "ep": st.sampled_from(["", "0", "1", "7", "320", "100000", "1.5", "EP72"]),
            "tp": st.sampled_from(["", "1", "8", "3"]),
            "batch_per_device": st.sampled_from(["", "0", "0.25", "1", "48 per die", "16384", "1e9", "1e99", "nan"]),
            "context_len": st.sampled_from(["", "0", "1", "128k", "10000000"]),
            "mtp": st.sampled_from(["", "yes", "0.7", "1.5", "2 tokens", "3 drafts, accepted length 2.2", "99 drafts"]),
            "tok_s_per_device": st.sampled_from(["", "0", "22.3k", "n/a", "-5"]),
            "model": st.sampled_from(["", "Kimi-K2", "LongCat", "deepseek-v3.2", "gpt-oss-120b"]),
            "system": st.sampled_from(["no TBO", "perfect EPLB", "TP8", "DeepSeek profile-data", "[red]"]),
        },
    ),
)
def test_any_row_gets_a_number_a_place_or_a_reason(model: str, cells: dict[str, str]) -> None:
    """Never a traceback, and never a prediction that is not a rate."""
    (compared,) = compare_rows(parse_rows(table(**cells), "rows.csv"), named_model(model))
    prediction = compared.prediction
    assert (compared.role == "shown") == bool(prediction.reason)
    assert prediction.predicted is None or 0 < prediction.predicted < 1e9


@pytest.mark.parametrize(("text", "named"), [("system,hardware\na,b", "phase"), (HEAD, "no rows"), ("", "no column")])
def test_a_table_that_compares_nothing_is_refused(text: str, named: str) -> None:
    with pytest.raises(BadRows, match=named):
        parse_rows(text, "rows.csv")


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        ({"phase": "encode"}, "encode"), ({"phase": "prefill + decode"}, "neither"), ({"phase": ""}, "phase"),
        ({"batch_per_device": "many"}, "batch_per_device"), ({"batch_per_device": "64-256"}, "a range"),
        ({"n_devices": "0.5"}, "n_devices"), ({"ep": "1.5"}, "ep"), ({"context_len": "1e12"}, "context_len"),
        ({"batch_per_device": "512 global", "n_devices": ""}, "of all devices"),
        ({"system": "SGLang TP8 PP2"}, "pipeline"), ({"system": "vLLM DCP8"}, "context parallelism"),
        ({"phase": "prefill", "batch_per_device": "4"}, "in tokens"),
        ({"phase": "prefill", "batch_per_device": "16384", "source": "at a cache hit rate of 50 %"}, "in a cache"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_shown_and_refuses_nothing_else(cells: dict[str, str], named: str) -> None:
    odd, plain = parse_rows(table(**cells), "rows.csv"), parse_rows(table(), "rows.csv")
    shown, judged = compare_rows([*odd, *plain], named_model("deepseek-r1"))
    assert shown.role == "shown" and named in shown.prediction.reason and shown.prediction.predicted is None
    assert judged.role == "validation"


@pytest.mark.parametrize(
    ("told", "reason"),
    [("> 1800", "a bound"), ("up to 2,785", "a bound"), ("1800-2000", "a range"), ("22.3k per node", "per node"),
     ("45 tok/s/user", "per user"), ("9000 input + output", "prompts and answers"), ("see figure 3", "not a number")],
)  # fmt: skip
def test_a_rate_that_is_none_is_shown_beside_its_prediction(row_of, told: str, reason: str) -> None:
    (compared,) = compare_rows([row_of(tok_s_per_device=told)], named_model("deepseek-r1"))
    assert compared.role == "shown" and reason in compared.prediction.reason and compared.prediction.predicted > 0


@pytest.mark.parametrize(
    ("told", "batch", "die"),
    [("512 global", 512 / 72, False), ("96 per NPU (48 per die)", 96, False), ("96 per NPU = 2 dies", 96, False),
     ("48/die", 48, True), ("bs=128", 128, False), ("256 per GPU", 256, False), ("concurrency 720", 10, False),
     ("64 per DP rank", 64, True)],
)  # fmt: skip
def test_what_a_batch_counts(row_of, told: str, batch: float, die: bool) -> None:
    row = row_of(batch_per_device=told)
    assert row.batch == pytest.approx(batch) and row.batch_per_die is die and not row.unread


@pytest.mark.parametrize(
    ("cells", "ep", "tp"),
    [
        ({"ep": "EP72"}, 72, None), ({"ep": "1", "tp": "8", "n_devices": 8}, None, 8),
        ({"ep": "1", "n_devices": 8}, None, 8), ({"ep": "", "system": "DEP8"}, 8, 1),
        ({"ep": "", "system": "TP8 EP8"}, 8, 8), ({"ep": "", "system": "TEP8"}, 8, 8),
        ({"ep": "8", "tp": "8", "system": "TP8 with DP attention"}, 8, 1), ({"ep": "TP8"}, None, 8),
        ({"ep": "16", "system": "vLLM TP4 DP4"}, 16, 4), ({"ep": "8", "system": "SGLang TP8 DP4"}, 8, 2),
        ({"ep": "n/a", "tp": "4"}, None, 4), ({"ep": "none", "system": "s"}, None, None),
    ],
)  # fmt: skip
def test_parallelism_as_rows_tell_it(row_of, cells: dict[str, object], ep: int | None, tp: int | None) -> None:
    row = row_of(**cells)
    assert (row.ep, row.tp) == (ep, tp)


@pytest.mark.parametrize(
    ("told", "chips"), [("96 (12 nodes)", 96), ("12 nodes", None), ("2 x 8", 16), ("8xH100", 8), ("320 dies", None)]
)
def test_devices_are_neither_nodes_nor_dies(row_of, told: str, chips: int | None) -> None:
    assert row_of(n_devices=told).chips == chips


STRANGE = """Hardware;Phase;Remark;Tok_S_Per_Device;batch per device;Context-Len;Model;Precision;EP;TP;MTP;Notes
# rows of my own

H200;Decode;;3000;480;2000;Kimi-K2-Instruct;FP8;96;;no;"12 nodes, ""no TBO""; PD"
8xH100;decode;;2785;256;2000;DeepSeek-R1;FP8;72;;0;with TBO
Hardware;Phase;Remark;Tok_S_Per_Device;batch per device;Context-Len;Model;Precision;EP;TP;MTP;Notes
B200;decode;;537;8;1536;Llama-3.3-70B-Instruct;FP8;;1;;"a cell
of two lines"
"""


def test_a_file_as_a_stranger_writes_it() -> None:
    """Other order and spelling of columns, semicolons, comments, no column for names or sources."""
    kimi, r1, llama = parse_rows(STRANGE, "rows.csv")
    assert (kimi.batch, kimi.context, kimi.ep, kimi.drafts) == (480, 2000, 96, 0)
    assert (kimi.microbatches, r1.microbatches, llama.microbatches) == (1, 2, None) and (llama.tp, llama.drafts) == (
        1,
        None,
    )
    compared = compare_rows([kimi, r1, llama], named_model("deepseek-v3"))
    assert [each.role for each in compared] == ["validation"] * 3
    assert (
        compared[0].prediction.predicted
        == predict(replace(kimi, model="Kimi-K2"), named_model("deepseek-r1")).predicted
    )


@pytest.mark.parametrize(
    ("told", "prompt", "answer"),
    [("TRT-LLM 1k/8k", 1024, 8192), ("ISL 2000 / OSL 100", 2000, 100), ("2000 in / 100 out", 2000, 100),
     ("s (input 512, output 256 tokens)", 512, 256), ("in 8K out 1K", 8192, 1024)],
)  # fmt: skip
def test_lengths_in_a_name(row_of, told: str, prompt: float, answer: float) -> None:
    row = row_of(system=told, context_len="")
    assert (row.prompt, row.answer, row.context) == (prompt, answer, prompt + answer / 2)


def test_the_software_may_have_a_column(row_of) -> None:
    assert row_of(framework="SGLang", version="0.5.6").software == "s SGLang 0.5.6"
