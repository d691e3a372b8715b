"""Latent attention for decoding on one GPU: every way to cut it, checked, then timed; and the steps before it.

    python bench/gpu/mla.py [--quick] [--json FILE] [--commit ID] [--only hopper,rows,swapped]

Floors of the first case (128 requests, 4,096 tokens, 128 heads): 146 GFLOP and 0.6 GB. The Hopper kernel is first
checked in a process of its own: should its roles wait for each other for ever, that process is ended, the rest goes on.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
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
    timed_row,
    write_json,
)
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tripool.kernels.ref import paged
from tripool.kernels.triton.mla_decode import HOPPER, Tiling, choose_tiling, mla_decode
from tripool.kernels.triton.mla_prologue import mla_prologue, rope_queries

WIDTH, RANK, SCALE = 576, 512, 192**-0.5
CHECK_WITHIN_S = 90
CANDIDATES = (
    HOPPER,
    Tiling("rows", 64, 64, 8, 2),
    Tiling("rows", 64, 64, 8, 3),
    Tiling("rows", 64, 32, 8, 3),
    Tiling("rows", 64, 32, 8, 5),
    Tiling("rows", 32, 64, 8, 4),
    Tiling("rows", 16, 64, 4, 4),
    Tiling("rows", 16, 64, 8, 5),
    Tiling("rows", 16, 32, 4, 6),
    Tiling("swapped", 16, 64, 8, 2),
    Tiling("swapped", 16, 64, 4, 2),
    Tiling("swapped", 32, 64, 8, 2),
)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    requests: int
    queries: int
    heads: int
    tokens: int
    ragged: bool = False
    """Lengths from a quarter of `tokens` to all of it."""
    bar_us: float | None = None
    bandwidth_share: float | None = None

    def __str__(self) -> str:
        ragged = " ragged" if self.ragged else ""
        return f"MLA decode {self.requests} x {self.tokens}{ragged} tokens, {self.heads} heads, {self.queries} queries"

    def inputs(self, seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)
        low = self.tokens // 4 if self.ragged else self.tokens
        lengths = torch.randint(low, self.tokens + 1, (self.requests,), device="cuda", generator=generator)
        width = -(-self.tokens // 64)
        table = torch.randperm(self.requests * width, device="cuda", generator=generator).view(self.requests, width)
        shape = (self.requests, self.queries, self.heads, WIDTH)
        q = torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
        kv = torch.randn(table.numel(), 64, WIDTH, dtype=torch.bfloat16, device="cuda", generator=generator)
        return q, kv, table.int(), lengths.int()

    def num_bytes(self, inputs: Inputs) -> int:
        q, _, _, lengths = inputs
        return int(lengths.sum()) * WIDTH * 2 + q.nbytes + q.nbytes * RANK // WIDTH

    def num_ops(self, inputs: Inputs) -> int:
        return int(inputs[3].sum()) * self.queries * self.heads * (WIDTH + RANK) * 2


CASES = (
    Case(128, 1, 128, 4096, bar_us=350.0),
    Case(128, 1, 16, 8192, bandwidth_share=0.6),
    Case(128, 2, 128, 4096),
    Case(128, 2, 16, 8192),
    Case(128, 1, 128, 4096, ragged=True),
    Case(96, 2, 128, 4096),
    Case(24, 2, 128, 4096),
    Case(8, 2, 128, 4096),
    Case(8, 1, 16, 8192),
    Case(128, 2, 128, 1024),
    Case(64, 2, 128, 8192),
)


def check(tiling: Tiling) -> str:
    """Ugly lengths, scattered pages, outputs that start as NaN, fresh inputs; empty: right."""
    worst = 0.0
    for seed, (queries, heads) in enumerate(((1, 128), (2, 128), (1, 16), (2, 16), (1, 3), (2, 65))):
        q, kv, table, _ = Case(6, queries, heads, 4032).inputs(seed)
        lengths = torch.tensor([1, 64, 65, 0, 700, 4001], dtype=torch.int32, device="cuda")
        expected = paged.mla_decode(q, kv, table, lengths, SCALE).double()
        for splits in (1, 2, 5, None):
            out = torch.full((*q.shape[:3], RANK), float("nan"), dtype=q.dtype, device="cuda")
            mla_decode(q, kv, table, lengths, SCALE, tiling=tiling, splits=splits, out=out)
            error = float((out.double() - expected).norm() / expected.norm())
            if not error < 1e-2:
                return f"wrong: {queries} queries, {heads} heads, {splits} splits: error {error:.2g}"
            worst = max(worst, error)
    print(f"right  {tiling}, error {worst:.1e}", flush=True)
    return ""


def usable(candidates: tuple[Tiling, ...]) -> list[Tiling]:
    good = []
    for tiling in candidates:
        try:
            why = _check_hopper() if tiling == HOPPER else check(tiling)
        except (OutOfResources, CompilationError, PTXASError) as failure:
            why = str(failure).splitlines()[0][:100]
        if why:
            print(f"no     {tiling}: {why}", flush=True)
        else:
            good.append(tiling)
    return good


def _check_hopper() -> str:
    command = [sys.executable, str(Path(__file__).resolve()), "--check-hopper"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_WITHIN_S)
    except subprocess.TimeoutExpired:
        return f"not done in {CHECK_WITHIN_S} s"
    print(told.stdout, end="")
    return "" if told.returncode == 0 else (told.stdout + told.stderr).strip()[-1500:]


def time_case(case: Case, tiling: Tiling | None, ceilings: Ceilings, splits: int | None = None) -> Row:
    first = case.inputs(0)
    sets = [first, *(case.inputs(seed) for seed in range(1, sets_beyond_cache(case.num_bytes(first), most=8)))]
    calls = [lambda one=one: mla_decode(*one, SCALE, tiling=tiling, splits=splits) for one in sets]
    us = graph_time_us(calls, rounds=max(1, 4 // len(sets)))
    num_bytes, num_ops = case.num_bytes(first), case.num_ops(first)
    roof = ceilings.roof_us(num_bytes, num_ops)
    told = f"{case}, {'as chosen' if tiling is None else tiling_name(tiling)}"
    told += "" if splits is None else f", {splits} splits"
    rates = f"{num_ops / us / 1e6:.0f} TFLOP/s, {num_bytes / us / 1e3:.0f} GB/s, {roof / us:.0%} of the roof"
    if case.bandwidth_share is not None:
        name, peer = f"{told}: bytes", ceilings.bytes_per_s / 1e9
        return rate_row(name, num_bytes / us / 1e3, peer, "GB/s", target=case.bandwidth_share, note=rates, us=us)
    return timed_row(told, us, roof, bar_us=case.bar_us, note=rates)


def _not_judged(row: Row) -> Row:
    """A way that is not taken, shown to say why."""
    return replace(row, target=None)


def tiling_name(tiling: Tiling) -> str:
    if tiling.kind == "hopper":
        return "hopper"
    return f"{tiling.kind} {tiling.block_rows}x{tiling.block_tokens} w{tiling.num_warps} s{tiling.num_stages}"


def time_steps_before(rows: int, ceilings: Ceilings) -> list[Row]:
    cos_sin = torch.polar(torch.ones(8192, 32), torch.randn(8192, 32)).cuda()
    sets = []
    for _ in range(sets_beyond_cache(rows * 2112 * 2, most=16)):
        down = torch.randn(rows, 2112, dtype=torch.bfloat16, device="cuda")
        gains = [torch.rand(width, dtype=torch.bfloat16, device="cuda") for width in (1536, 512)]
        positions = torch.randint(0, 8192, (rows,), device="cuda")
        kv = torch.randn(max(1, 2 * rows // 64 + 1), 64, WIDTH, dtype=torch.bfloat16, device="cuda")
        slots = torch.randperm(kv.shape[0] * 64, device="cuda")[:rows]
        q = torch.randn(rows, 128, 192, dtype=torch.bfloat16, device="cuda")
        sets.append(
            (
                down,
                *gains,
                cos_sin,
                positions,
                slots,
                kv,
                q,
                torch.empty(rows, 128, WIDTH, dtype=q.dtype, device="cuda"),
            )
        )
    told = []
    before = [lambda s=s: mla_prologue(*s[:7], q_eps=1e-6, kv_eps=1e-6, int8=True) for s in sets]
    roof = ceilings.roof_us(rows * (2112 * 2 + 1536 + 4 + WIDTH * 2 + 256))
    told.append(timed_row(f"MLA prologue to int8, {rows} rows", graph_time_us(before), roof))
    turn = [lambda s=s: rope_queries(s[7][..., 128:], s[3], s[4], s[8][..., 512:]) for s in sets]
    roof = ceilings.roof_us(rows * (128 * 64 * 4 + 256))
    told.append(timed_row(f"rope of the queries, {rows} rows x 128 heads", graph_time_us(turn), roof))
    return told


def suits(tiling: Tiling, case: Case) -> bool:
    few = case.queries * case.heads <= 32
    return tiling.kind == "hopper" or (tiling.block_rows < 64) == few


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="hopper,rows,swapped", help="kinds to try")
    parser.add_argument("--check-hopper", action="store_true", help="check that kernel and end")
    told = parser.parse_args()
    if told.check_hopper:
        why = check(HOPPER)
        print(why, end="")
        sys.exit(1 if why else 0)
    kinds = set(told.only.split(","))
    origin, ceilings = gpu_origin(told.commit), measure_ceilings()
    print(
        f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 product {ceilings.bf16_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    good = usable(tuple(one for one in CANDIDATES if one.kind in kinds))
    rows = []
    for case in CASES[: 3 if told.quick else None]:
        chosen = choose_tiling(
            torch.empty(1, case.queries, case.heads, WIDTH, dtype=torch.bfloat16, device="cuda"), RANK
        )
        # All ways for the cases with a bar, the chosen one for the rest.
        tried = (
            [one for one in good if suits(one, case)] if case in CASES[:4] else [one for one in good if one == chosen]
        )
        for tiling in tried:
            row = time_case(case, tiling, ceilings)
            rows.append(row if tiling == chosen else _not_judged(row))
            print(rows[-1], rows[-1].note, flush=True)
            if tiling == HOPPER and not told.quick and case in CASES[:2]:
                rows += [_not_judged(time_case(case, tiling, ceilings, splits)) for splits in (2, 4)]
    for size in (16, 256) if told.quick else (16, 128, 256, 16384):
        rows += time_steps_before(size, ceilings)
    print_rows(rows, origin)
    if told.json:
        write_json(rows, origin, told.json)
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
