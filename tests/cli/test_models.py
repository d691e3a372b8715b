"""What can be served by name."""

from __future__ import annotations

import json


def test_json(tripool):
    rows = {row["name"]: row for row in json.loads(tripool("models", "--format", "json").out)}
    assert rows["tiny"]["architecture"] == "deepseek_v3"
    assert rows["tiny"]["present"] is True
    assert 0 < rows["tiny"]["stored_bytes"] <= 34e6
    assert rows["smollm2"]["architecture"] == "llama"


def test_table(tripool):
    out = tripool("models").out
    assert "tiny" in out
    assert "deepseek_v3" in out
