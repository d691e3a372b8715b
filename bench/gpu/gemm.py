"""INT8 products on one GPU over DeepSeek-V3's shapes: every tiling checked, then timed, beside torch's own calls.

    python bench/gpu/gemm.py [--quick] [--json FILE] [--sweep FILE] [--commit ID] [--only wide,narrow,stream,...]

Without --quick all candidate tilings compete, and `--sweep` keeps every time; with it only what `choose` says runs.
`stream` in --only tries the streamed product for few rows, and prints what to add to `MEASURED` beside `choose`.
Variants are compiled side by side first. What could wait for ever is tried in a process of its own (`gemm_check.py`).
Rows and times are written as they come: a run that is cut short keeps what it had.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import gemm_streams
import torch
from gemm_check import Operands, Wrong, check, check_experts, grouped_check, works
from timing import (
    Ceilings,
    Row,
    arguments,
    gpu_origin,
    graph_time_us,
    measure_ceilings,
    print_rows,
    rate_row,
    sets_beyond_cache,
    time_us,
    timed_row,
    write_json,
)
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.triton.gate import route
from tripool.kernels.triton.grouped_gemm import choose_grouped, grouped_gemm, make_plan
from tripool.kernels.triton.int8_gemm import arrivals
from tripool.kernels.triton.norm_quant import rms_norm_quant, swiglu_quant
from tripool.kernels.triton.permute import permute, sort_by_expert, unpermute
from tripool.kernels.triton.tilings import Narrow, Resident, Stream, Tiling, Wide, choose

SHAPES = [
    (7168, 2112), (1536, 24576), (512, 32768), (16384, 7168), (7168, 4096), (2048, 7168), (7168, 36864), (18432, 7168),
]  # fmt: skip
LARGE = {(16384, 7168), (7168, 4096), (7168, 36864), (18432, 7168)}
"""Deep enough that the matrix units, not the writes, are the limit: these have the bar in TOP/s."""
MANY, FEW, MIDDLE = 16384, (16, 32), (64, 128, 256)
EXPERTS = 8
PLAIN = Narrow(256, 128, 128, 1, 8, 4, band=8)
SMALLER = Narrow(128, 128, 128, 1, 8, 4, band=16)
WIDES = [Wide(), Wide(band=16), Wide(256, 128), Wide(256, 128, band=4), Wide(256, 128, band=16)]
MIDDLES = [
    Wide(128, 128, num_stages=3, num_warps=4, per_sm=2), Wide(128, 128, num_stages=3, per_sm=2), Wide(),
    Wide(128, 64, num_warps=4, per_sm=2), Wide(128, 64, per_sm=2),
]  # fmt: skip
FEW_BY_EXPERT = [
    Narrow(m, n, k, splits, warps)
    for m in (32, 64, 128)
    for n, k, warps in ((64, 256, 4), (128, 128, 4), (128, 128, 8))
    for splits in (1, 2)
]
Competing = Callable[[int, int, int], list[Tiling]]
CANNOT = (CompilationError, OutOfResources, PTXASError)
SMALL_BYTES = 40_000_000
"""Weights of which so few bytes are read that launching and ending count: there more variants compete."""


def few_candidates(m: int, n: int, k: int, early: bool) -> list[Tiling]:
    """What is still in question: starting early for all; for small weights also the depth of the ring, and splits."""
    bases = [choose(m, n, k)]
    if n * k < SMALL_BYTES:
        cuts = [(64, 256, 4), (64, 256, 6), (128, 128, 6), (64, 128, 8)]
        tiles = -(-n // 64)
        bases += [
            Narrow(m, block_n, block_k, splits, 4, stages)
            for block_n, block_k, stages in cuts
            for splits in (1, 2, 4, 8)
            if splits == 1 or (tiles * splits <= 4 * 132 and k // block_k >= 2 * splits)
        ]
    return [replace(base, early=e) for base in dict.fromkeys(bases) for e in ((0, 1, 2) if early else (0,))]


def middle_candidates(m: int, n: int, k: int, wide: bool, early: bool) -> list[Tiling]:
    at_once = (0, 1, 2) if early else (0,)
    found: list[Tiling] = [replace(choose(m, n, k), early=e) for e in at_once]
    found += [Narrow(128 if m > 64 else 64, block_n, 128, 1, 4, 4, early=at_once[-1]) for block_n in (64, 128)]
    if wide and m > 64:
        wides = [*MIDDLES, *([Wide(256, 128), Wide(256, 64)] if m > 128 else [])]
        found += [replace(t, early=e) for t in wides for e in at_once[:2]]
    return list(dict.fromkeys(found))


# ---- compiling ahead -----------------------------------------------------------------------------------------------


def compile_one(tiling: Tiling, by_expert: bool) -> str:
    """A small call with the same specialisation as the large ones fills the cache on disk."""
    try:
        if by_expert:
            grouped_check([130, 0, 257, 64], 528, 272, tiling)
        else:
            deep = 4096 if not isinstance(tiling, Resident) else tiling.splits * (tiling.stages + tiling.held) * 256
            rows = 512 if not isinstance(tiling, Resident) else tiling.block_m
            Operands.draw(rows, 512, deep).run(tiling=tiling)
        torch.cuda.synchronize()
    except CANNOT as refusal:
        return f"{tiling}: {type(refusal).__name__}"
    return ""


def compile_ahead(dense: Iterable[Tiling], by_expert: Iterable[Tiling]) -> None:
    began = time.monotonic()
    forms = [(form, False) for form in dict.fromkeys(map(one_of_a_kind, dense))]
    forms += [(form, True) for form in dict.fromkeys(map(one_of_a_kind, by_expert))]
    if not forms:
        return
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        refused = [line for line in pool.map(compile_one, *zip(*forms, strict=True)) if line]
    print(f"{len(forms)} variants compiled in {time.monotonic() - began:.0f} s; refused: {refused}", flush=True)


def one_of_a_kind(tiling: Tiling) -> Tiling:
    """The same code serves any number of splits, and of programs."""
    if isinstance(tiling, Narrow):
        return replace(tiling, splits=min(tiling.splits, 2))
    if isinstance(tiling, Resident):
        return tiling
    return replace(tiling, per_sm=1, programs=0)


# ---- timing --------------------------------------------------------------------------------------------------------


class Sweep:
    """Keeps every time, on disk too; `best` of the tilings that compile and are right."""

    WORTH_IT = 0.98

    def __init__(self, path: Path | None) -> None:
        self.times: list[dict[str, object]] = []
        self.path = path

    def best(self, name: str, tilings: Iterable[Tiling], time_one: Callable[[Tiling], float]) -> tuple[Tiling, float]:
        found: list[tuple[float, Tiling]] = []
        for tiling in tilings:
            try:
                us = time_one(tiling)
            except CANNOT:
                continue
            except Wrong as wrong:
                print(f"WRONG, not timed: {wrong}", flush=True)
                continue
            found.append((us, tiling))
            self.times.append({"case": name, "tiling": str(tiling), "us": us})
        if self.path:
            self.path.write_text(json.dumps(self.times, indent=0) + "\n")
        us, tiling = min(found, key=lambda pair: pair[0])
        return tiling, us

    def suggest(self, m: int, n: int, k: int, tiling: Tiling, us: float, now_us: float) -> None:
        """A line for `MEASURED`, where it is worth one."""
        if us < self.WORTH_IT * now_us:
            line = f"    ({m}, {n}, {k}): {gemm_streams.spelt(tiling)},"
            print(f"{line}  # {us:.1f} µs, not {now_us:.1f}", flush=True)


def many_rows(ceilings: Ceilings, sweep: Sweep, quick: bool, wide: bool) -> Iterator[Row]:
    for k, n in SHAPES:
        one = Operands.draw(MANY, n, k)
        expected, out = one.expected(), torch.empty(MANY, n, dtype=torch.bfloat16, device="cuda")

        def timed(tiling: Tiling, one=one, out=out, expected=expected) -> float:
            out.fill_(float("nan"))
            check(one.run(out=out, tiling=tiling), expected, tiling)
            return time_us(lambda: one.run(out=out, tiling=tiling), repetitions=15)

        candidates = [choose(MANY, n, k), *([] if quick else [PLAIN, *(WIDES if wide else [])])]
        tiling, us = sweep.best(f"{MANY} x {k} -> {n}", candidates, timed)
        ops = 2.0 * MANY * n * k
        peer = ops / time_us(lambda one=one: torch._int_mm(one.x, one.w.T), repetitions=15) / 1e6
        fp8 = ops / time_us(one.fp8_row_wise(), repetitions=15) / 1e6
        note = f"{tiling}; fp8 row-wise {fp8:.0f}"
        more = {"us": us, "fp8_row_wise": fp8, "roof_us": ceilings.roof_us(MANY * k + n * k + 2.0 * MANY * n)}
        rate = ops / us / 1e6
        yield rate_row(f"M={MANY} {k}->{n} vs _int_mm", rate, peer, "TOP/s", target=1.2, note=note, **more)
        if (k, n) in LARGE:
            yield rate_row(f"M={MANY} {k}->{n} vs 1,000", rate, 1000.0, "TOP/s", target=1.0, note=note)


def few_rows(m: int, ceilings: Ceilings, sweep: Sweep, quick: bool, competing: Competing) -> Iterator[Row]:
    arrived = arrivals("cuda")
    for k, n in SHAPES:
        sets = [Operands.draw(m, n, k) for _ in range(sets_beyond_cache(n * k, most=24))]
        expected = [one.expected() for one in sets[:2]]
        outs = [torch.empty(m, n, dtype=torch.bfloat16, device="cuda") for _ in sets]

        def timed(tiling: Tiling, sets=sets, outs=outs, expected=expected) -> float:
            for one, out, exact in zip(sets, outs, expected, strict=False):
                out.fill_(float("nan"))
                check(one.run(out=out, arrived=arrived, tiling=tiling), exact, tiling)
            each = {"arrived": arrived, "tiling": tiling}
            calls = [lambda one=one, out=out: one.run(out=out, **each) for one, out in zip(sets, outs, strict=True)]
            us = graph_time_us(calls, repetitions=10 if not quick else 20)
            for out, exact in zip(outs, expected, strict=False):
                check(out, exact, ("replayed", tiling))
            return us

        now, name = choose(m, n, k), f"{m} x {k} -> {n}"
        tiling, us = sweep.best(name, [now, *competing(m, n, k)], timed)
        if not quick and isinstance(tiling, Stream):  # timed again: the best of many was also lucky
            tiling, us = sweep.best(name, [replace(tiling, early=early) for early in gemm_streams.EARLIES], timed)
        if not quick and tiling != now:
            sweep.suggest(m, n, k, tiling, us, timed(now))
        moved = n * k + m * k + 2.0 * m * n
        note = f"{tiling} {us:.1f} µs"
        if m <= 32:
            rate = moved / us / 1e3
            yield rate_row(
                f"M={m} {k}->{n} of copy", rate, ceilings.bytes_per_s / 1e9, "GB/s", target=0.7, note=note, us=us
            )
            continue
        int8 = graph_time_us([one.torch_int8 for one in sets], repetitions=10)
        fp8 = graph_time_us([one.fp8_row_wise() for one in sets], repetitions=10)
        ops = 2.0 * m * n * k
        note += f"; int8 {ops / int8 / 1e6:.0f}, fp8 {ops / fp8 / 1e6:.0f}, {ceilings.roof_us(moved) / us:.0%} of copy"
        best = ops / min(int8, fp8) / 1e6
        yield rate_row(f"M={m} {k}->{n} vs torch", ops / us / 1e6, best, "TOP/s", target=1.0, note=note, us=us)


def grouped(ceilings: Ceilings, sweep: Sweep, quick: bool, wide: bool) -> Iterator[Row]:
    """Sorted rows of a prompt, unevenly spread; and buffers of fixed height, filled to a tenth, as in decoding."""
    uneven = [4096 + 997 * (e - EXPERTS // 2) for e in range(EXPERTS)]
    few = [17, 0, 96, 64, 33, 128, 5, 80]
    for k, n in ((7168, 4096), (2048, 7168)):
        for counts, height in ((uneven, 0), (few, 1024)):
            rows = sum(counts) if not height else height * EXPERTS
            starts = [sum(counts[:e]) if not height else e * height for e in range(EXPERTS)]
            where = [torch.tensor(v, dtype=torch.int32, device="cuda") for v in (starts, counts)]
            sets = [Operands.draw(rows, n, k, EXPERTS) for _ in range(1 if not height else 2)]
            out, arrived = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda"), arrivals("cuda", 1 << 20)

            def timed(
                tiling: Tiling, where=where, starts=starts, counts=counts, sets=sets, out=out, arrived=arrived
            ) -> float:
                plan = make_plan(*where, len(out), tiling)
                calls = [lambda o=o: grouped_gemm(o.x, o.x_scale, o.w, o.w_scale, plan, out, arrived) for o in sets]
                out.fill_(float("nan"))
                calls[0]()
                check_experts(out, sets[0], starts, counts, tiling)
                return time_us(calls[0], repetitions=15) if len(sets) == 1 else graph_time_us(calls)

            chosen = choose_grouped(sum(counts) // EXPERTS, n, k, EXPERTS)
            many = [PLAIN, SMALLER, *(WIDES if wide else [])]
            candidates = [chosen, *([] if quick else (FEW_BY_EXPERT if height else many))]
            tiling, us = sweep.best(f"grouped {counts} {k} -> {n}", candidates, timed)
            ops, total = 2.0 * sum(counts) * n * k, sum(counts)
            if not height:
                yield rate_row(
                    f"grouped {total} rows {k}->{n}",
                    ops / us / 1e6,
                    850.0,
                    "TOP/s",
                    target=1.0,
                    note=f"{tiling} {us:.0f} µs",
                )
                continue
            roof = ceilings.roof_us((EXPERTS - 1) * n * k + total * (k + 2.0 * n))  # one expert has no rows
            yield timed_row(f"masked {total} rows {k}->{n}", us, roof, note=f"{tiling}; {roof / us:.0%} of copy")


def row_kernels(ceilings: Ceilings) -> Iterator[Row]:
    """What stands between products: all bound by memory."""
    m, hidden, top_k = MANY, 7168, 8
    x, residual = (torch.randn(m, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = torch.rand(hidden, dtype=torch.bfloat16, device="cuda")
    cases: list[tuple[str, Callable[[], object], float]] = [
        ("norm + quantise", lambda: rms_norm_quant(x, weight, 1e-6), 3.0 * m * hidden),
        ("norm + residual + quantise", lambda: rms_norm_quant(x, weight, 1e-6, residual), 7.0 * m * hidden),
    ]
    for width in (2048, 18432):
        gate_up = torch.randn(m, 2 * width, dtype=torch.bfloat16, device="cuda")
        cases.append((f"swiglu + quantise {width}", lambda g=gate_up: swiglu_quant(g), 5.0 * m * width))
    logits, bias = torch.randn(m, 256, device="cuda"), torch.randn(256, device="cuda") * 0.1
    v3 = RoutePlan(top_k, "sigmoid", groups=8, top_groups=4, group_top=2, normalise=True, scaling=2.5)
    experts, weights = route(logits, bias, v3)
    places = sort_by_expert(experts, 256)
    q, scale = rms_norm_quant(x, weight, 1e-6)
    y = torch.randn(m * top_k, hidden, dtype=torch.bfloat16, device="cuda")
    cases += [
        ("gate", lambda: route(logits, bias, v3), m * (1024.0 + 64)),
        ("sort by expert", lambda: sort_by_expert(experts, 256), 2.0 * m * top_k * 4),
        ("permute", lambda: permute(q, scale, places), (1.0 + top_k) * m * hidden),
        ("unpermute", lambda: unpermute(y, weights, places), (2.0 * top_k + 2) * m * hidden),
    ]
    for name, call, moved in cases:
        us = graph_time_us([call], rounds=4) if moved < 1e8 else time_us(call)
        yield timed_row(f"{name}, {m} rows", us, ceilings.roof_us(moved))


def launch_floor() -> Row:
    """What a kernel that does next to nothing takes as one of many in a graph: part of every time from a graph here."""
    one = torch.zeros(1, device="cuda")
    us = graph_time_us([lambda: one.add_(1)] * 24)
    return rate_row("one number added, in a graph", us, us, "µs", target=None, note="the floor of a launch")


def measure(parts: list[str], quick: bool, sweep: Sweep) -> Iterator[Row]:
    wide = not quick and bool({"wide", "grouped", "narrow"} & set(parts)) and works("wide")
    early = not quick and "narrow" in parts and works("early")
    stream = not quick and "stream" in parts and works("stream")

    def competing(m: int, n: int, k: int) -> list[Tiling]:
        old = few_candidates(m, n, k, early) if m <= 32 else middle_candidates(m, n, k, wide, early)
        new = gemm_streams.candidates(m, n, k) if stream else []
        return [*(old if "narrow" in parts else []), *new] if not quick else []

    if not quick:
        tilings = [PLAIN, *(WIDES if wide else [])] if "wide" in parts else []
        for k, n in SHAPES if "narrow" in parts else ():
            tilings += [t for m in FEW for t in few_candidates(m, n, k, early)]
            tilings += [t for m in MIDDLE for t in middle_candidates(m, n, k, wide, early)]
        tilings += gemm_streams.forms(SHAPES) if stream else []
        manies = [PLAIN, SMALLER, *(WIDES if wide else [])]
        compile_ahead(tilings, [*manies, *FEW_BY_EXPERT] if "grouped" in parts else [])
    ceilings = measure_ceilings()
    print(f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 {ceilings.bf16_per_s / 1e12:.0f} TFLOP/s", flush=True)
    yield launch_floor()
    if "rows" in parts:
        yield from row_kernels(ceilings)
    if "wide" in parts:
        yield from many_rows(ceilings, sweep, quick, wide)
    if "grouped" in parts:
        yield from grouped(ceilings, sweep, quick, wide)
    rows = (*FEW, *MIDDLE) if "narrow" in parts else gemm_streams.ROWS if "stream" in parts else ()
    for m in rows:
        yield from few_rows(m, ceilings, sweep, quick, competing)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", type=Path, help="write the time of every tiling here")
    parser.add_argument("--only", default="wide,narrow,grouped,rows")
    given = parser.parse_args()
    origin, rows = gpu_origin(given.commit), []
    for row in measure(given.only.split(","), given.quick, Sweep(given.sweep)):
        rows.append(row)
        if given.json:
            write_json(rows, origin, given.json)
    print_rows(rows, origin)


if __name__ == "__main__":
    main()
