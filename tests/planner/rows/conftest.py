"""A table of one row, with cells replaced."""

from __future__ import annotations

import csv
import io

import pytest

from tripool.planner.rows import COLUMNS, Row, parse_rows

PLAIN = {
    "system": "s", "hardware": "H100", "n_devices": 72, "phase": "decode", "precision": "FP8", "ep": 72,
    "batch_per_device": 256, "context_len": 2000, "mtp": 0, "tok_s_per_device": 2785, "source": "x",
}  # fmt: skip


def table(**cells: object) -> str:
    row = PLAIN | cells
    columns = [*COLUMNS, *(name for name in row if name not in COLUMNS)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerow(row)
    return text.getvalue()


@pytest.fixture
def row_of():
    def make(**cells: object) -> Row:
        (row,) = parse_rows(table(**cells), "rows.csv")
        return row

    return make
