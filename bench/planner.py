"""How long a plan takes: ours against its promised limits, and against aiconfigurator asked the same question.

    python bench/planner.py [--quick] [--json FILE]
    python bench/planner.py --document docs/planner.md

The second writes the tables of constants and errors into the document. The comparison is one command line each,
interpreter included: DeepSeek-V3 on H200, separate prefill and decode pools, 4,096 tokens in and 1,024 out, first token
within 2 s, then 50 ms per token. aiconfigurator has its own environment:

    python -m venv .venv-aiconfigurator && .venv-aiconfigurator/bin/pip install aiconfigurator==0.12.0
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import REPO, Origin, Row, print_table, write_json
from planner_tables import planner_document
from tripool.planner import DecodeModel, PlanGoal, Setup, make_plan, named_hardware, named_model

PLAN_WITHIN_S, ESTIMATE_WITHIN_MS, TIMES_FASTER = 3.0, 50.0, 10.0
PEER_WITHIN_S = 1800.0
PEER_ENV = REPO / ".venv-aiconfigurator" / "bin" / "aiconfigurator"
INSTALL = "python -m venv .venv-aiconfigurator && .venv-aiconfigurator/bin/pip install aiconfigurator==0.12.0"


def plan_s() -> float:
    """A supernode of 384 chips, levers and front included, on one core."""
    ask = PlanGoal(
        model=named_model("deepseek-r1"), hardware=named_hardware("ascend-910c"), chips=384, input_tokens=4096,
        output_tokens=1024, ttft_s=2.0, tpot_s=0.05,
    )  # fmt: skip
    began = time.process_time()
    make_plan(ask)
    return time.process_time() - began


def estimates_ms() -> tuple[float, float]:
    """One decode step: the first, which also places the experts, and any later one."""
    # A batch that no other part of this program asks about: nothing is remembered from before.
    setup = Setup(ep=304, precision="int8", drafts=1, accept=0.7, microbatches=2)
    model = DecodeModel(named_hardware("ascend-910c"), named_model("deepseek-r1"), setup)
    times = []
    for requests in range(40, 141):
        began = time.perf_counter()
        model.step(requests, 4096)
        times.append((time.perf_counter() - began) * 1e3)
    return times[0], statistics.median(times[1:])


def ours_s(quick: bool) -> float:
    model, gpus = ("llama-3-8b", 8) if quick else ("deepseek-v3", 384)
    command = [
        sys.executable, "-m", "tripool", "plan", "--model", model, "--hardware", "h200", "--chips", str(gpus),
        "--input-len", "4096", "--output-len", "1024", "--ttft", "2000", "--tpot", "50", "--no-simulate",
    ]  # fmt: skip
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def peer_s(quick: bool) -> tuple[float | None, str]:
    """Seconds, or None and why not."""
    model, gpus = ("meta-llama/Meta-Llama-3.1-8B", 8) if quick else ("deepseek-ai/DeepSeek-V3", 384)
    found = str(PEER_ENV) if PEER_ENV.exists() else shutil.which("aiconfigurator")
    if found is None:
        return None, f"aiconfigurator is not installed: {INSTALL}"
    command = [
        found, "cli", "default", "--model-path", model, "--total-gpus", str(gpus), "--system",
        "h200_sxm", "--backend", "sglang", "--serving-mode", "disagg", "--isl", "4096", "--osl", "1024",
        "--ttft", "2000", "--tpot", "50", "--no-color",
    ]  # fmt: skip
    command += [] if quick else ["--enable-wideep"]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PEER_WITHIN_S, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    except subprocess.TimeoutExpired:
        return None, f"aiconfigurator took more than {PEER_WITHIN_S:g} s"
    if done.returncode != 0:
        return None, f"aiconfigurator failed: {done.stderr.strip().splitlines()[-1][:200] if done.stderr else '?'}"
    return time.perf_counter() - began, ""


def limit(name: str, ours: float, most: float, unit: str, note: str = "") -> Row:
    return Row(name=name, ours=ours, peer=most, unit=unit, target=1.0, lower_is_better=True, note=note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the comparison is of Llama-3-8B on 8 GPUs")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--document", type=Path, help="write constants and errors into this document, and end")
    options = parser.parse_args()
    if options.document:
        options.document.write_text(planner_document(options.document.read_text("utf-8")), "utf-8")
        return 0
    origin = Origin.now()
    first_ms, later_ms = estimates_ms()
    full_s = statistics.median(plan_s() for _ in range(1 if options.quick else 3))
    mine_s = statistics.median(ours_s(options.quick) for _ in range(1 if options.quick else 3))
    theirs_s, note = peer_s(options.quick)
    asked = "Llama-3-8B on 8 x H200" if options.quick else "DeepSeek-V3 on 384 x H200"
    rows = [
        limit("full plan, DeepSeek-R1 on 384 x 910C", full_s, PLAN_WITHIN_S, "s", "peer: the promised limit"),
        limit("one estimate, the first", first_ms, ESTIMATE_WITHIN_MS, "ms", "peer: the promised limit"),
        limit("one estimate, any later one", later_ms, ESTIMATE_WITHIN_MS, "ms", "peer: the promised limit"),
        Row(
            name=f"plan from the command line, {asked}, against aiconfigurator", ours=mine_s,
            peer=theirs_s, unit="s", target=1 / TIMES_FASTER, lower_is_better=True, note=note,
        ),
    ]  # fmt: skip
    print_table(rows, origin, "Planning")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
