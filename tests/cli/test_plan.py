"""`tripool plan`: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import json

import pytest

SPLIT = (
    "--model", "llama-3-8b", "--hardware", "h100", "--chips", "8", "--input-len", "2000", "--output-len", "50",
    "--tpot", "8", "--ttft", "1000",
)  # fmt: skip
SMALL = (
    "--model", "qwen3-30b-a3b", "--hardware", "h100", "--chips", "8", "--input-len", "1000", "--output-len", "200",
    "--no-simulate",
)  # fmt: skip


def test_validation_prints_each_row_and_the_bars(tripool):
    ran = tripool("plan", "--validate")
    assert ran.code == 0
    assert "CloudMatrix-Infer perfect EPLB" in ran.out and "calibration" in ran.out and "shown" in ran.out
    assert "910C: 3 calibration and 4 validation rows, median" in ran.out and "(bar 10%)" in ran.out
    assert "family left out" in ran.out and "median of all" in ran.out and "batch not stated" in ran.out


def test_rows_are_read_as_they_are_written(tripool, tmp_path):
    """No rate, no word about MTP, another model, a batch that does not fit: shown with the reason, never refused."""
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "system,hardware,n_devices,phase,precision,ep,batch_per_device,context_len,mtp,tok_s_per_device,source\n"
        "a,H100,72,decode,FP8,72,256,2000,0,,x\n"
        "b,H100,72,decode,FP8,72,256,2000,,2785,x\n"
        "LongCat-Flash,H800,128,decode,FP8,128,64,5000,0,3785,x\n"
        "c,H100,72,decode,FP8,72,4096,8000,0,2785,x\n"
        "d,Ascend 950DT,8,decode,FP8,8,64,2000,0,9,x\n"
    )
    ran = tripool("plan", "--validate", "--rows", str(rows))
    assert ran.code == 0
    for reason in ("no rate published", "MTP not stated", "no description of LongCat-Flash", "does not fit", "no bar"):
        assert reason in ran.out, reason


def test_a_broken_bar_is_an_exit_code(tripool, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text(
        "system,hardware,n_devices,phase,precision,ep,batch_per_device,context_len,mtp,tok_s_per_device,source\n"
        "wonder,H100,72,decode,FP8,72,256,2000,0,9999,nowhere\n"
    )
    ran = tripool("plan", "--validate", "--rows", str(rows))
    assert ran.code == 1 and "wonder" in ran.out and "broken" in ran.out
    ran = tripool("plan", "--validate", "--rows", str(rows), "--json")
    reported = json.loads(ran.out)
    assert ran.code == 1 and not reported["ok"] and reported["rows"][0]["error"] < -0.5


def test_a_plan_with_its_files(tripool, tmp_path):
    page, saved = tmp_path / "plan.html", tmp_path / "deployment.toml"
    ran = tripool("plan", *SMALL, "--html", str(page), "--save", str(saved), "--price", "3", "--currency", "EUR")
    assert ran.code == 0 and "EUR/M out" in ran.out and "what would raise it" in ran.out
    assert "published rows of" in ran.out or "assumed, no published row" in ran.out
    assert "kWh" in ran.out and "chips used" in ran.out and "shared pool" in ran.out
    assert page.read_text().startswith("<!doctype html>") and 'model = "qwen3-30b-a3b"' in saved.read_text()


def test_json_is_all_that_is_printed(tripool):
    ran = tripool("plan", *SMALL, "--json")
    assert ran.code == 0 and json.loads(ran.out)["deployments"][0]["requests_per_s"] > 0


def test_a_trace_gives_the_lengths(tripool, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i * 1000, "input_length": 600, "output_length": 50, "hash_ids": [1, i + 2]} for i in range(9)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = ("--model", "llama-3-8b", "--hardware", "h100", "--chips", "2", "--no-simulate")
    ran = tripool("plan", *small, "--trace", str(trace))
    assert ran.code == 0 and "600 tokens in (75.9% cached), 50 out" in ran.out and "asks for 1.00 requests/s" in ran.out


def test_a_trace_of_another_format(tripool, tmp_path):
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{at:02d}.0000000,{500 + at * 100},{10 + at}" for at in range(20)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    small = ("--model", "llama-3-8b", "--hardware", "h100", "--chips", "2", "--no-simulate")
    ran = tripool("plan", *small, "--trace", str(trace))
    assert ran.code == 0 and "1,450 tokens in (0.0% cached), 20 out" in ran.out


def test_unequal_lengths_are_not_planned_as_their_mean(tripool, tmp_path):
    """Both traces have the same means; in one a few prompts are long, and prefill's attention grows with the square."""
    rates = []
    for name, lengths in {"equal": [8000] * 20, "unequal": [1000] * 18 + [71000] * 2}.items():
        trace = tmp_path / f"{name}.csv"
        rows = [f"2023-11-16 18:15:{at:02d}.0000000,{length},100" for at, length in enumerate(lengths)]
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
        small = ("--model", "llama-3-8b", "--hardware", "h100", "--chips", "8", "--ttft", "60000", "--no-simulate")
        ran = tripool("plan", *small, "--trace", str(trace), "--json")
        rates.append(json.loads(ran.out)["deployments"][0]["requests_per_s"])
    assert rates[1] < 0.9 * rates[0]


def test_the_best_is_checked_in_the_simulator(tripool, tmp_path):
    ran = tripool("plan", *SPLIT, "--json")
    reported = json.loads(ran.out)["simulated"]
    assert ran.code == 0 and reported["simulated_requests_per_s"] > 0 and reported["requests"] >= 200
    ran = tripool("plan", *SPLIT, "--no-simulate", "--json")
    assert json.loads(ran.out)["simulated"] is None


def test_a_config_of_ones_own(tripool, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 128256,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "tie_word_embeddings": True,
    }  # fmt: skip
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    ran = tripool("plan", "--model", str(folder), "--hardware", "h100", "--chips", "1", "--no-simulate")
    assert ran.code == 0 and "my-llama on 1 x NVIDIA H100 SXM" in ran.out


def test_this_machine(tripool):
    asked = ("--input-len", "64", "--output-len", "16", "--ttft", "600000", "--tpot", "60000")
    ran = tripool("plan", "--hardware", "this", "--model", "deepseek-v2-lite", "--chips", "1", *asked)
    assert ran.code in (0, 2) and ("this machine" in ran.out or "does not fit" in ran.err)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--tpot", "1"), "are missing"),
        (("--chips", "2"), "GB are missing"),
        (("--hardware", "abacus"), "known: ascend-910c"),
        (("--model", "nobody"), "known: deepseek-r1"),
        (("--hardware", "missing.toml"), "cannot read missing.toml"),
        (("--rows", "x.csv"), "add --validate"),
        (("--html", "/nowhere/plan.html"), "cannot write"),
        (("--trace", "t.jsonl", "--input-len", "5"), "leave --input-len"),
        (("--input-len", "inf"), "--input-len is inf"),
        (("--output-len", "nan"), "--output-len"),
        (("--price", "inf"), "--price is inf"),
        (("--ttft", "inf"), "--ttft is inf"),
    ],
)
def test_plain_answers(tripool, argv, said):
    ran = tripool("plan", *argv)
    assert ran.code == 2 and said in ran.err
