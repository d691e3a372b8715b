"""The document's tables are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.planner_tables import planner_document

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planner.md"


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert planner_document(text) == text, "run: python bench/planner.py --document docs/planner.md"


def test_a_changed_number_is_noticed() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert planner_document(text.replace("5,655", "5,656")) == text
    with pytest.raises(AssertionError, match="no place for"):
        planner_document("nothing")
