"""How long from nothing to the first token, and how much memory beside weights and KV.

    python bench/start.py [--quick] [--json FILE]

Both against a promised limit rather than a peer: seconds from the start of the process, interpreter included, and
resident memory at its highest, less the weights and the KV blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import Origin, Row, print_table, write_json

FIRST_TOKEN_WITHIN_S, MEMORY_BESIDE_MB = 8.0, 600.0

PROGRAM = """
import json, resource, sys, time
from tripool import LLM, SamplingParams
llm = LLM(sys.argv[1], precision=sys.argv[2], kv_gb=0.03)  # little: KV that nobody touched is not resident
stream = llm.stream_chat([{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0, max_tokens=200))
next(stream)
first = time.time()
for _ in stream:
    pass
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
engine = llm._engine
print(json.dumps({"first": first, "peak_mb": peak_mb, "mb": (engine.weight_bytes + engine.kv_bytes) / 2**20}))
"""


def start(model: str, precision: str) -> tuple[float, float]:
    """Seconds to the first token, and megabytes beside weights and KV."""
    began = time.time()
    done = subprocess.run([sys.executable, "-c", PROGRAM, model, precision], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    return said["first"] - began, said["peak_mb"] - said["mb"]


def limit(name: str, ours: float, most: float, unit: str, target: float | None) -> Row:
    return Row(name=name, ours=ours, peer=most, unit=unit, target=target, lower_is_better=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one start of the bundled model")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    origin, rows = Origin.now(), []
    cases = [("tiny", "int8")] if options.quick else [(m, p) for m in ("tiny", "smollm2") for p in ("float32", "int8")]
    for model, precision in cases:
        runs = [start(model, precision) for _ in range(1 if options.quick else 5)]
        first_s, beside_mb = (statistics.median(each) for each in zip(*runs, strict=True))
        first_token = f"{model} {precision}: first token"
        beside = f"{model} {precision}: memory beside weights and KV"
        promised = 1.0 if model == "tiny" else None
        rows += [
            limit(first_token, first_s, FIRST_TOKEN_WITHIN_S, "s", promised),
            limit(beside, beside_mb, MEMORY_BESIDE_MB, "MB", 1.0),
        ]
    print_table(rows, origin, "From nothing to the first token")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
