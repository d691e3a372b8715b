"""A simulated run as plain data: latencies, goodput over time, use of pools and planes, hits, faults. No wall clock.

The same run gives the same report, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tripool.bench.summary import percentile
from tripool.simulate.request_table import DONE, OUTCOMES, RequestTable
from tripool.simulate.supernode.faults import Struck
from tripool.simulate.supernode.layout import Layout
from tripool.simulate.supernode.measures import (
    Tree,
    distribution_ms,
    is_good,
    latencies,
    short,
    steady_state,
    tpot_s,
    ttft_s,
)
from tripool.simulate.supernode.run import TraceRun
from tripool.simulate.timeline import FS

VERSION = 1
_MOST_TENANTS = 20


def report_data(run: TraceRun, trace: str, notes: Sequence[str] = ()) -> Tree:
    table, layout = run.table, run.layout
    end_s = max(table.last_s, default=0.0)
    done = [number for number in range(len(table)) if table.outcome[number] == DONE]
    good = {number for number in done if is_good(table, layout, number)}
    tokens = sum(table.output_tokens[number] for number in done)
    return {
        "version": VERSION,
        "title": layout.title,
        "trace": trace,
        "notes": list(notes),
        "deployment": _deployment(layout),
        "requests": {name: table.outcome.count(code) for code, name in enumerate(OUTCOMES)},
        "errors": _errors(table),
        "duration_s": short(end_s),
        "requests_per_s": short(len(done) / end_s if end_s else 0.0),
        "output_tokens_per_s": short(tokens / end_s if end_s else 0.0),
        **latencies(table, done),
        "slo": {"ttft_ms": short(layout.ttft_s * 1e3), "tpot_ms": short(layout.tpot_s * 1e3)},
        "goodput": {
            "requests_per_s": short(len(good) / end_s if end_s else 0.0),
            "share": short(len(good) / max(1, len(table))),
        },
        "steady": steady_state(table, layout, run.slices, good),
        "hits": _hits(run, range(len(table))),
        "tenants": _tenants(run),
        "use": _use(run, end_s),
        "faults": [_fault(each) for each in run.faults.struck],
        "timeline": _timeline(run, done, good),
    }


def _errors(table: RequestTable) -> list[Tree]:
    return [
        {"outcome": OUTCOMES[outcome], "code": code, "requests": count, "example": table.examples[outcome, code]}
        for (outcome, code), count in sorted(table.errors.items(), key=lambda each: (-each[1], each[0]))
    ]


def _deployment(layout: Layout) -> Tree:
    prefill, decode = layout.prefill, layout.decode
    return {
        "chips": layout.chips,
        "prefill": {"instances": prefill.instances, "chips": prefill.chips},
        "decode": {"instances": decode.instances, "chips": decode.chips, "workers": decode.workers},
        "cache": {"members": layout.num_members, "gb": short(layout.num_members * layout.member_slots
                                                              * layout.block_bytes / 1e9)},
    }  # fmt: skip


def _hits(run: TraceRun, numbers: Iterable[int]) -> Tree:
    """Shares of prompt tokens, of requests that are done; None: the trace does not say what prompts share."""
    if not run.names_blocks:
        return {"prefill memory": None, "cache pool": None}
    table = run.table
    prompts = local = fetched = 0
    for number in numbers:
        if table.outcome[number] == DONE:
            prompts += table.input_tokens[number]
            local += table.local_tokens[number]
            fetched += table.fetched_tokens[number]
    total = max(1, prompts)
    return {"prefill memory": short(local / total), "cache pool": short(fetched / total)}


def _tenants(run: TraceRun) -> list[Tree]:
    """Those with most requests; a trace without tenants has one."""
    table = run.table
    groups: dict[int, list[int]] = {}
    for number, tenant in enumerate(table.tenant):
        groups.setdefault(tenant, []).append(number)
    names = list(table.tenants)
    rows = []
    for tenant, numbers in sorted(groups.items(), key=lambda pair: (-len(pair[1]), names[pair[0]]))[:_MOST_TENANTS]:
        done = [number for number in numbers if table.outcome[number] == DONE]
        ttft_ms, hits = distribution_ms(ttft_s(table, number) for number in done), _hits(run, numbers)
        named = {"tenant": names[tenant] or "everybody", "requests": len(numbers), "done": len(done)}
        rows.append(named | {"ttft_ms": ttft_ms, "hits": hits})
    return rows


def _use(run: TraceRun, end_s: float) -> Tree:
    layout, slices = run.layout, run.slices
    end_fs = max(1, round(end_s * FS))
    slots = layout.decode.instances * layout.decode.workers * layout.decode.config.max_running
    moved = {"memory": sum(slices.sums("cache reads")) + sum(slices.sums("cache writes")),
             "transfer": sum(slices.sums("transfer"))}  # fmt: skip
    planes = {
        kind: {"gb": short(moved[kind] / 1e9), "share": short(moved[kind] / (rate * max(end_s, 1e-9)))}
        for kind, rate in layout.links.totals
        if kind in moved
    }
    return {
        "prefill": short(sum(slices.sums("prefill busy")) / (end_fs * layout.prefill.instances)),
        "decode": short(sum(slices.sums("decode busy")) / (end_fs * layout.decode.instances)),
        "decode batch": short(sum(slices.sums("decode rows")) / (end_fs * slots)),
        "planes": planes,
    }


def _fault(struck: Struck) -> Tree:
    return {
        "fault": str(struck.fault),
        "requests": struck.num_requests,
        "recovered": len(struck.waited_s),
        "failed": struck.num_failed,
        "recovery_ms": distribution_ms(struck.waited_s),
    }


def _timeline(run: TraceRun, done: list[int], good: set[int]) -> Tree:
    table, layout, slices = run.table, run.layout, run.slices
    slice_s = slices.slice_fs / FS
    count = 1 + int(max(table.last_s, default=0.0) / slice_s)
    arrived, finished, kept, tokens = ([0.0] * count for _ in range(4))
    firsts: list[list[float]] = [[] for _ in range(count)]
    paces: list[list[float]] = [[] for _ in range(count)]
    for at_s in table.arrived_s:
        arrived[min(count - 1, int(at_s / slice_s))] += 1
    for number in done:
        last = min(count - 1, int(table.last_s[number] / slice_s))
        finished[last] += 1
        kept[last] += number in good
        firsts[int(table.first_s[number] / slice_s)].append(ttft_s(table, number))
        if table.output_tokens[number] > 1:
            paces[last].append(tpot_s(table, number))
        _spread(tokens, slice_s, table.first_s[number], table.last_s[number], table.output_tokens[number])
    slots = layout.decode.instances * layout.decode.workers * layout.decode.config.max_running
    fs = slices.slice_fs

    def share(name: str, whole: float) -> list[float]:
        sums = slices.sums(name)[:count]
        return [short(value / whole) for value in (*sums, *([0] * (count - len(sums))))]

    return {
        "slice_s": short(slice_s),
        "arrived_per_s": [short(value / slice_s) for value in arrived],
        "done_per_s": [short(value / slice_s) for value in finished],
        "good_per_s": [short(value / slice_s) for value in kept],
        "tokens_per_s": [short(value / slice_s) for value in tokens],
        "ttft_p50_ms": [_middle(values, 50) for values in firsts],
        "ttft_p95_ms": [_middle(values, 95) for values in firsts],
        "tpot_p50_ms": [_middle(values, 50) for values in paces],
        "tpot_p95_ms": [_middle(values, 95) for values in paces],
        "prefill_use": share("prefill busy", fs * layout.prefill.instances),
        "decode_use": share("decode busy", fs * layout.decode.instances),
        "batch_use": share("decode rows", fs * slots),
        "memory_gb_s": share("cache reads", slice_s * 1e9),
        "transfer_gb_s": share("transfer", slice_s * 1e9),
    }


def _spread(sums: list[float], slice_s: float, begin_s: float, end_s: float, amount: int) -> None:
    """Tokens of one answer, evenly from its first to its last."""
    first, last = int(begin_s / slice_s), min(len(sums) - 1, int(end_s / slice_s))
    if first == last:
        sums[first] += amount
        return
    for number in range(first, last + 1):
        within_s = min(end_s, (number + 1) * slice_s) - max(begin_s, number * slice_s)
        sums[number] += amount * within_s / (end_s - begin_s)


def _middle(values: list[float], percent: float) -> float | None:
    return short(percentile(sorted(values), percent) * 1e3) if values else None
