"""Runs the whole suite as other machines would: with less of the CPU, other thread counts, another order.

    .venv/bin/python tests/matrix.py            all of it, about eight minutes a row on two cores; or name some rows

Rows join conditions that have nothing to do with each other; one that fails is looked at one condition at a time. The
compiled kernels of other instruction sets are moved away while a row runs that is to do without them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "src" / "tripool" / "kernels" / "native"


@dataclass(frozen=True)
class Row:
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ("plain", "avx2", "avx512")
    """Those that stay."""


ROWS = {
    "as-it-is": Row(),
    "plain-4": Row({"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "4"}, ("--shuffle", "1"), kernels=("plain",)),
    "avx2-1": Row(
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"},
        ("--shuffle", "2"),
        kernels=("avx2",),
    ),
}


@contextmanager
def only(kernels: tuple[str, ...]) -> Iterator[None]:
    away = [path for path in KERNELS.glob("_*.so") if path.stem.removeprefix("_") not in kernels]
    for path in away:
        path.rename(path.with_suffix(".away"))
    try:
        yield
    finally:
        for path in away:
            path.with_suffix(".away").rename(path)


def run(row: Row, streams: list[list[str]]) -> list[str]:
    """The last line of each of the two pytests that `make test` runs side by side."""
    # What is packed while kernels are away is no package.
    whole = row.kernels == Row().kernels
    command = [sys.executable, "-m", "pytest", *row.options, *(() if whole else ("--ignore=tests/test_packages.py",))]
    environment = os.environ | row.environment
    with only(row.kernels):
        running = [
            subprocess.Popen([*command, *paths], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for paths in streams
        ]
        outputs = [process.communicate()[0] for process in running]
    return [line for output in outputs for line in output.splitlines() if re.match("FAILED|ERROR|.* in [0-9.]+s", line)]


def main() -> int:
    listed = re.search(r"^BESIDE := \$\(wildcard (.*)\)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert listed is not None
    beside = listed[1].split()
    failed = False
    for name in sys.argv[1:] or ROWS:
        began_s = time.monotonic()
        said = run(ROWS[name], [beside, [f"--ignore={path}" for path in beside]])
        failed |= any(line.startswith(("FAILED", "ERROR")) or "failed" in line or "error" in line for line in said)
        print(f"{name}: {time.monotonic() - began_s:.0f} s", *said, sep="\n    ", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
