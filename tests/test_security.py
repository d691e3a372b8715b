"""docs/security.md: every defence and every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]


def test_the_files_it_names_exist() -> None:
    rows = [line for line in (ROOT / "docs" / "security.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    named = 0
    for row in rows:
        folder = ROOT
        for path in map(PurePosixPath, re.findall(r"`([\w/.]+\.py|tests/\w+/)`", row)):
            # A bare file name lies beside the one that was named before it.
            found = [base / path for base in (ROOT, ROOT / "src" / "tripool", folder) if (base / path).exists()]
            assert found, f"{path} in: {row[:80]}"
            folder, named = found[0].parent, named + 1
    assert named > 60
