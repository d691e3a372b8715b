"""How long the published tables take to reproduce, page and JSON included, as one command on one core.

    python bench/reproduce.py [--quick] [--json FILE]
    python bench/reproduce.py --document docs/reproduce.md

The second writes the tables into the document.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Origin, Row, print_table, write_json
from planner_tables import reproduce_document
from tripool.planner.reproduce import cloudmatrix_tables

WITHIN_S = 10.0


def command_s() -> float:
    with tempfile.TemporaryDirectory() as folder:
        files = ["--html", f"{folder}/page.html", "--json", f"{folder}/lines.json"]
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "tripool", "reproduce", "cloudmatrix", *files], check=True, capture_output=True
        )
        return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, not five times")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--document", type=Path, help="write the tables into this document, and end")
    options = parser.parse_args()
    if options.document:
        text = reproduce_document(options.document.read_text("utf-8"), cloudmatrix_tables())
        options.document.write_text(text, "utf-8")
        return 0
    origin = Origin.now()
    seconds = statistics.median(command_s() for _ in range(1 if options.quick else 5))
    rows = [
        Row(
            name="tripool reproduce cloudmatrix, page and JSON", ours=seconds, peer=WITHIN_S, unit="s", target=1.0,
            lower_is_better=True, note="peer: the promised limit",
        )
    ]  # fmt: skip
    print_table(rows, origin, "Reproducing")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
