"""`tripool reproduce`: tables on stdout, files on request, plain answers."""

from __future__ import annotations

import json

import pytest


def test_tables_with_published_predicted_and_error(tripool):
    ran = tripool("reproduce", "cloudmatrix")
    assert ran.code == 0 and not ran.err
    row = next(line for line in ran.out.splitlines() if "SLO 15ms" in line)
    assert "538" in row and "validation" in row and "%" in row
    for title in (
        "Prefill throughput",
        "TPOT classes",
        "Dispatch and combine",
        "Context cache",
        "Model cache",
        "Cost per",
    ):
        assert title in ran.out
    assert "sources: arXiv:2506.12708" in ran.out and "validation lines: median error" in ran.out


def test_files(tripool, tmp_path):
    page, lines = tmp_path / "page.html", tmp_path / "lines.json"
    ran = tripool("reproduce", "--html", str(page), "--json", str(lines))
    assert ran.code == 0 and page.read_text("utf-8").startswith("<!doctype html>")
    reported = json.loads(lines.read_text("utf-8"))
    assert reported["system"] == "cloudmatrix" and reported["validation"]["lines"] > 10


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("abacus",), "known: cloudmatrix"),
        (("cloudmatrix", "--html", "/nowhere/page.html"), "cannot write"),
        (("cloudmatrix", "--json", "/nowhere/lines.json"), "cannot write"),
    ],
)
def test_plain_answers(tripool, argv, said):
    ran = tripool("reproduce", *argv)
    assert ran.code == 2 and said in ran.err
