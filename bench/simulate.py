"""The trace simulator against the clock: an hour's trace, a million requests, and what more chips cost.

    python bench/simulate.py --trace conversation_trace.jsonl    # with Mooncake's trace; without, one made up like it
    python bench/simulate.py --quick --json out.json             # a tenth of the trace, a fiftieth of the million
    python bench/simulate.py --real                              # also simulation against this machine's own server

Times are CPU seconds of one core. Simulated time, hit rates and latencies are the model's and no part of a bar.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from harness import REPO, Origin, Row, print_table, write_json
from tripool.bench.trace import TraceRequest, measure_trace, parse_trace
from tripool.planner.deployment import DeploymentFile, read_deployment, write_deployment
from tripool.planner.hardware import named_hardware
from tripool.planner.models import named_model
from tripool.planner.search import PlanGoal, make_plan
from tripool.simulate.supernode.layout import lay_out
from tripool.simulate.supernode.run import TraceRun
from tripool.simulate.traces import Synthetic

TRACE_S, MILLION_S, MILLION_GB, GROWTH = 25.0, 420.0, 4.0, 1.3
LIKE_CONVERSATION = Synthetic(
    requests=12_031, rate_per_s=3.4, input_tokens=12_035, output_tokens=343, prefix_share=0.37, tenants=1
)
VIRTUAL_S = 60.0
"""For the growth by chips: every size gets the same load per chip."""


def deployment(chips: int, input_tokens: float, output_tokens: float, cached: float) -> DeploymentFile:
    ask = PlanGoal(
        model=named_model("deepseek-r1"), hardware=named_hardware("ascend-910c"), chips=chips, ttft_s=2.0, tpot_s=0.05,
        input_tokens=input_tokens, output_tokens=output_tokens, cached_share=cached,
    )  # fmt: skip
    found = make_plan(ask).best_split
    assert found is not None
    return read_deployment(write_deployment(ask, found), "plan")


def run(file: DeploymentFile, asks: Iterable[TraceRequest], most_blocks: int | None = None) -> tuple[float, TraceRun]:
    """CPU seconds, and the run as it ended."""
    layout = lay_out(file, named_hardware(file.hardware), named_model(file.model))
    gc.collect()
    gc.disable()
    began_s = time.process_time()
    found = TraceRun(layout, asks, most_blocks=most_blocks)
    found.run()
    spent_s = time.process_time() - began_s
    gc.enable()
    return spent_s, found


def hour(trace: Path | None, share: float) -> dict[str, float]:
    """The conversation trace, or one made up like it, through 384 chips."""
    asks = parse_trace(trace.read_text("utf-8").splitlines()) if trace else []
    asks = asks or list(LIKE_CONVERSATION.draw())
    asks = asks[: max(1, int(len(asks) * share))]
    reuse = measure_trace(asks)
    file = deployment(384, reuse.input_tokens, reuse.output_tokens, reuse.cached_share)
    spent_s, found = run(file, asks, reuse.num_blocks)
    return {"s": spent_s, "requests": len(found.table), "virtual_s": found.timeline.now_s, "tokens": reuse.cached_share,
            "blocks": reuse.cached_block_share, "done": found.table.outcome.count(0)}  # fmt: skip


def million(requests: int) -> dict[str, float]:
    made_up = Synthetic(
        requests=requests, rate_per_s=50.0, input_tokens=512, output_tokens=128, prefix_share=0.25, tenants=4
    )
    file = deployment(384, 512.0, 128.0, 0.0)
    spent_s, found = run(replace(file, cache_gb=min(file.cache_gb, 20_000.0)), made_up.draw())
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"s": spent_s, "gb": peak_gb, "events": found.timeline.num_events, "done": found.table.outcome.count(0),
            "virtual_s": found.timeline.now_s}  # fmt: skip


def per_event(chips: int, seconds: float) -> dict[str, float]:
    """The same instances, more of them, at the same load each."""
    base = deployment(16, 1024.0, 128.0, 0.0)
    times = chips // 16
    file = replace(
        base, chips=chips, cache_gb=base.cache_gb * times,
        prefill=replace(base.prefill, instances=base.prefill.instances * times),
        decode=replace(base.decode, instances=base.decode.instances * times),
    )  # fmt: skip
    rate = 0.2 * base.requests_per_s * times
    made_up = Synthetic(requests=int(rate * seconds), rate_per_s=rate, input_tokens=1024, output_tokens=128)
    spent_s, found = run(file, made_up.draw(), most_blocks=20_000)
    return {"us": 1e6 * spent_s / found.timeline.num_events, "events": found.timeline.num_events}


def alone(task: Callable[..., dict[str, float]], *args: object) -> dict[str, float]:
    """In a process of its own: what it needs of memory is then its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(task, args)


def limit(name: str, ours: float, most: float, unit: str, note: str = "") -> Row:
    return Row(
        name=name, ours=ours, peer=most, unit=unit, target=1.0, lower_is_better=True, note=note or "peer: the bar"
    )


def real() -> list[Row]:
    """`tripool simulate --compare-real`: by how much simulation is off, against what it may be."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "real.json"
        command = [sys.executable, "-m", "tripool", "simulate", "--compare-real", "--json", str(out)]
        subprocess.run(command, check=False, cwd=REPO)
        found = json.loads(out.read_text("utf-8"))["rows"]
    return [
        limit(
            f"simulated against this machine: {row['name']}", 100 * abs(row["difference"]), 100 * row["bar"], "% off",
            f"simulated {row['simulated']:.4g}, real {row['real']:.4g} {row['unit']}",
        )
        for row in found
    ]  # fmt: skip


def sizes(share: float) -> Row:
    # Few chips have few events in a second: they get more seconds.
    costs = {chips: alone(per_event, chips, VIRTUAL_S * share * (8 if chips == 16 else 1)) for chips in (16, 1024)}
    told = (f"{chips} chips: {found['us']:.1f} us, {found['events']:,.0f} events" for chips, found in costs.items())
    growth = costs[1024]["us"] / costs[16]["us"]
    return limit("cost of an event, 1,024 chips over 16", growth, GROWTH, "x", "; ".join(told))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the trace, a fiftieth of the million")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace; without, one made up like it")
    parser.add_argument("--real", action="store_true", help="also --compare-real: about two minutes")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    origin = Origin.now()
    share = 0.1 if options.quick else 1.0
    found = alone(hour, options.trace, share)
    which = "conversation trace" if options.trace else "a trace like the conversation trace"
    note = f"{found['done']:,.0f} of {found['requests']:,.0f} done, {found['virtual_s']:,.0f} s of virtual time"
    rows = [limit(f"{which}, {share:.0%} of it, through 384 chips", found["s"], TRACE_S * share, "s", note)]
    if options.trace and not options.quick:
        hits = (("blocks", found["blocks"], 0.366), ("tokens", found["tokens"], 0.374))
        rows += [
            limit(
                f"ideal prefix hits by {name}: off by", abs(value - told), 0.0005, "", f"{value:.2%}, told {told:.1%}"
            )
            for name, value, told in hits
        ]
    count = 20_000 if options.quick else 1_000_000
    found = alone(million, count)
    note = f"{found['done']:,.0f} done, {found['events']:,.0f} events, {found['virtual_s']:,.0f} s of virtual time"
    rows.append(limit(f"{count:,} made-up requests, 384 chips", found["s"], MILLION_S * count / 1e6, "s", note))
    rows.append(limit(f"{count:,} made-up requests: memory", found["gb"], MILLION_GB, "GB"))
    rows.append(sizes(share))
    if options.real:
        rows += real()
    print_table(rows, origin, "Simulating a deployment")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
