"""`tripool simulate --trace`: what it reads, prints and writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.simulate.supernode.test_runs import DEPLOYMENT


@pytest.fixture
def deployment(tmp_path):
    file = tmp_path / "deployment.toml"
    file.write_text(DEPLOYMENT, "utf-8")
    return str(file)


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 200 * number, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 100 + number]}
        for number in range(10)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(file)


def test_a_trace_with_a_fault_gives_a_table_a_page_and_a_report(tripool, deployment, trace, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    one, other, page = tmp_path / "one.json", tmp_path / "other.json", tmp_path / "one.html"
    asked = ("simulate", "--trace", trace, "--deployment", deployment)
    ran = tripool(*asked, "--fault", "chip:decode-0.1@0.5s+1s", "--json", str(one), "--html", str(page))
    assert ran.code == 0, ran.err
    assert "10: 10 done" in ran.out and "chip:decode-0.1@0.5s+1s" in ran.out and "60.0% of blocks" in ran.out
    data = json.loads(one.read_text("utf-8"))
    assert data["requests"] == {"done": 10, "refused": 0, "failed": 0} and len(data["faults"]) == 1
    assert page.read_text("utf-8").count("<svg") == 6
    assert tripool(*asked, "--rate", "50", "--json", str(other)).code == 0
    both = tripool("simulate", "compare", str(one), str(other), "--html", str(page))
    assert both.code == 0 and "TTFT p50, ms" in both.out and "one" in both.out and "other" in both.out
    assert page.read_text("utf-8").count("<svg") == 6


def test_what_is_in_a_trace(tripool, trace, tmp_path):
    ran = tripool("simulate", "--trace", trace, "--ideal")
    assert ran.code == 0 and "10 requests in 2 s" in ran.out
    assert "60.0% of blocks" in ran.out and "83.8% of tokens" in ran.out
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,30,3\n", "utf-8")
    assert "1 requests in 0 s, 30 tokens in and 3 out" in tripool("simulate", "--trace", str(azure), "--ideal").out


def test_client_sets_and_made_up_requests(tripool, deployment, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "clients"
    folder.mkdir()
    (folder / "chunk-0-trace.csv").write_text("0,2.0,1.0,Gamma,1.0,0.5\n600,2.0,1.0,Gamma,1.0,0.5\n", "utf-8")
    lengths = {"0": {"input_tokens": "{64: 1.0}", "output_tokens": "{5: 1.0}"}}
    (folder / "chunk-0-dataset.json").write_text(json.dumps(lengths), "utf-8")
    drawn = ("--begin", "0", "--length", "60", "--rate", "4", "--seed", "5")
    ran = tripool("simulate", "--trace", str(folder), *drawn, "--deployment", deployment)
    assert ran.code == 0 and "64 tokens in and 5 out" in ran.out, ran.err
    ran = tripool("simulate", "--synthetic", "30", "--rate", "20", "--tenants", "2", "--deployment", deployment)
    assert ran.code == 0 and "30: 30 done" in ran.out, ran.err


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        (("--fault", "flood:decode-0@1+1"), "not understood"),
        (("--faults",), "seeded runs"),
        (("--synthetic", "3"), "makes its own requests"),
    ],
)
def test_what_does_not_go_together_is_refused(tripool, deployment, trace, more, reported):
    ran = tripool("simulate", "--trace", trace, "--deployment", deployment, *more)
    assert ran.code != 0 and reported in ran.err


def test_a_file_that_is_no_report_is_not_compared(tripool, trace):
    ran = tripool("simulate", "compare", trace, trace)
    assert ran.code != 0 and "not a report" in ran.err


@pytest.mark.prove
def test_this_machine_and_its_simulation_side_by_side(tripool, tmp_path, monkeypatch):
    """The bars are bench/simulate.py's; here: that both sides have run, and are not worlds apart."""
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "real.json"
    tripool("simulate", "--compare-real", "--max-requests", "40", "--json", str(out))
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["output tokens per second", "TTFT p50", "TPOT p50"]
    assert all(0.2 < row["simulated"] / row["real"] < 5 for row in rows)
