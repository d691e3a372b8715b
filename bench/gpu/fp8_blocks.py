"""FP8 by DeepSeek's blocks on one GPU, dense and by expert: checked against float64 of the stored values, then timed.

    python bench/gpu/fp8_blocks.py [--quick] [--sweep] [--only dense|experts] [--seqs N,N] [--json FILE] [--commit ID]

Beside torch's product scaled by row (which computes something else: one scale for a row), and the floor: bytes at the
bandwidth of a copy, operations at twice the rate of torch's bf16 product.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from timing import (
    Ceilings,
    Row,
    arguments,
    gpu_origin,
    graph_time_us,
    measure_ceilings,
    print_rows,
    sets_beyond_cache,
    timed_row,
    write_json,
)
from torch.nn.functional import ScalingType
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tripool.kernels.cuda.arithmetic import FLOATS
from tripool.kernels.ref import fp8
from tripool.kernels.ref.w8a8 import Rows8
from tripool.kernels.triton.expert_blocks import expert_blocks
from tripool.kernels.triton.experts import (
    ExpertTiling,
    Strip,
    choose_tiling,
    down_product,
    gate_up_product,
    routed_experts,
)
from tripool.kernels.triton.fp8_gemm import BlockTiling, block_gemm, choose_blocks
from tripool.kernels.triton.int8_gemm import arrivals
from tripool.kernels.triton.norm_quant import quantise_rows, rms_norm_quant, swiglu_quant


@dataclass(frozen=True)
class Dense:
    name: str
    outs: tuple[int, ...]
    """Heights of the matrices that are stacked, each with its own grid of blocks."""
    width: int


DENSE = (
    Dense("lite q", (3072,), 2048), Dense("lite kv_a", (576,), 2048), Dense("lite shared gate_up", (2816, 2816), 2048),
    Dense("lite shared down", (2048,), 2816), Dense("lite gate_up", (10944, 10944), 2048),
    Dense("lite down", (2048,), 10944), Dense("v3 down", (1536, 576), 7168), Dense("v3 q", (24576,), 1536),
    Dense("v3 out", (7168,), 16384), Dense("v3 shared gate_up", (2048, 2048), 7168),
)  # fmt: skip
QUICK = DENSE[:1] + DENSE[4:7]
MS = (1, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    experts: int
    top_k: int
    width: int


LITE, QWEN = Shape("lite", 2048, 64, 6, 1408), Shape("qwen", 2048, 128, 8, 768)
SEQUENCES = (1, 8, 64, 256, 512, 16384)
"""Rows of a step; the last is a step of prompts."""


def weights(outs: tuple[int, ...], width: int) -> Rows8:
    w = (torch.randn(sum(outs), width, device="cuda") * 100).clamp(-448, 448).to(fp8.E4M3)
    grids = [(torch.rand(-(-out // 128), -(-width // 128), device="cuda") + 0.2) / 1000 for out in outs]
    by_row = [grid.repeat_interleave(128, 0)[:out] for grid, out in zip(grids, outs, strict=True)]
    return w, fp8.share_rows(torch.cat(by_row))


def expert_weights(experts: int, outs: tuple[int, ...], width: int) -> Rows8:
    """All experts in one draw: their blocks begin at multiples of an expert's height."""
    assert sum(outs) % 128 == 0
    w, scales = weights(outs * experts, width)
    return w.view(experts, sum(outs), width), scales.view(experts, -1, scales.shape[-1])


def rows_of(count: int, width: int) -> Rows8:
    return quantise_rows(torch.randn(count, width, dtype=torch.bfloat16, device="cuda"), fp8.E4M3)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def check() -> None:
    """Fresh inputs, edge blocks, outputs that start as NaN; rows and gated values as the plain version rounds them."""
    for m, outs, k in ((1, (576,), 2048), (17, (64, 10944), 10944), (100, (1536, 576), 7168), (300, (200,), 1408)):
        x, w = rows_of(m, k), weights(outs, k)
        out = torch.full((m, sum(outs)), float("nan"), dtype=torch.bfloat16, device="cuda")
        block_gemm(x, w, out=out)
        exact = (x[0].double() * fp8.by_column(x[1].double(), k)) @ fp8.dequantise(w).T
        error = relative_error(out, exact)
        assert error < 3e-3, f"dense {m} x {outs} x {k}: error {error:.2g}"
        print(f"right  {m} x {outs} x {k}, error {error:.1e}", flush=True)
    y, gain = torch.randn(37, 1408, dtype=torch.bfloat16, device="cuda"), torch.rand(1408, device="cuda")
    forms = {
        "quantise": (quantise_rows(y, fp8.E4M3), fp8.quantise_rows(y)),
        "norm": (rms_norm_quant(y, gain, 1e-6, dtype=fp8.E4M3), fp8.rms_norm_quant(y, gain, 1e-6)),
        "swiglu": (swiglu_quant(y, dtype=fp8.E4M3), fp8.swiglu_quant(y)),
    }
    for name, (ours, plain) in forms.items():
        values = [one[0].double() * fp8.by_column(one[1].double(), one[0].shape[1]) for one in (ours, plain)]
        error = relative_error(*values)
        assert error < 5e-3, f"{name}: error {error:.2g}"
    for shape in (LITE, QWEN):
        small = replace(shape, experts=shape.experts // 4)
        gate_up, down = expert_layer(small)
        for count in (1, 3, 17, 300):
            x, (chosen, factors) = rows_of(count, small.hidden), choices(small, count)
            expected = FLOATS.experts(x, chosen, factors, gate_up, down, None, None).double()
            error = relative_error(routed_experts(x, chosen, factors, gate_up, down), expected)
            assert error < 0.03, f"{shape.name}, {count} rows: error {error:.2g}"  # ties of the second rounding
            print(f"right  {shape.name}, {count} rows, error {error:.1e}", flush=True)


def expert_layer(shape: Shape) -> tuple[Rows8, Rows8]:
    gate_up = expert_weights(shape.experts, (shape.width, shape.width), shape.hidden)
    return gate_up, expert_weights(shape.experts, (shape.hidden,), shape.width)


def choices(shape: Shape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    factors, chosen = torch.rand(count, shape.experts, device="cuda").topk(shape.top_k)
    return chosen.int(), factors


def by_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows, channels = (torch.ones(n, device="cuda") for n in (len(x), len(w)))
    return F.scaled_mm(x, w.T, rows[:, None], ScalingType.RowWise, channels[None, :], ScalingType.RowWise)


def time_dense(one: Dense, m: int, ceilings: Ceilings, told: list[str], *, sweep: bool) -> Row:
    n, k = sum(one.outs), one.width
    moved = n * k + m * k + 2 * m * n
    sets = [(rows_of(m, k), weights(one.outs, k)) for _ in range(sets_beyond_cache(moved, most=24))]
    arrived, ops = arrivals("cuda"), 2.0 * m * n * k
    us = graph_time_us([lambda s=s: block_gemm(*s, arrived) for s in sets], repetitions=10)
    try:
        torchs = graph_time_us([lambda s=s: by_row(s[0][0], s[1][0]) for s in sets], repetitions=10)
    except RuntimeError as failure:  # a shape that torch does not take
        print(f"no     torch, {one.name} {m}: {str(failure).splitlines()[0][:90]}", flush=True)
        torchs = float("nan")
    roof = ceilings.roof_us(moved, ops, 2 * ceilings.bf16_per_s)
    if sweep:
        told.append(f"{one.name} {m}: {sweep_dense(sets, m, n, k, arrived)}")
        print(told[-1], flush=True)
    note = f"{ops / us / 1e6:.0f} TFLOP/s, {moved / us / 1e3:.0f} GB/s, {roof / us:.0%} of the roof; torch {torchs:.1f}"
    return timed_row(f"{one.name} {m} x {n} x {k}", us, roof, note=note, torch_us=torchs)


def sweep_dense(sets: list[tuple[Rows8, Rows8]], m: int, n: int, k: int, arrived: torch.Tensor) -> str:
    if m <= 64:
        height = max(16, 1 << (m - 1).bit_length())
        most = max(1, -(-k // 128) // 2)
        shapes = ((32, 4, 6), (64, 4, 4), (64, 4, 8), (128, 4, 4))
        tried = [BlockTiling(height, bn, s, w, st) for bn, w, st in shapes for s in (1, 2, 4, 8) if s <= most]
    else:
        shapes = ((64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 4, 5), (128, 64, 8, 4), (64, 64, 4, 6), (64, 64, 4, 4))
        splits = (1, 2, 4) if m <= 512 else (1,)
        tried = [BlockTiling(bm, bn, s, w, st, band=8 * (s == 1)) for bm, bn, w, st in shapes for s in splits]
    times = []
    for tiling in tried:
        try:
            calls = [lambda s=s, t=tiling: block_gemm(*s, arrived, t) for s in sets]
            times.append((graph_time_us(calls, repetitions=5), tiling))
        except (OutOfResources, CompilationError, PTXASError) as failure:
            print(f"no     {tiling}: {str(failure).splitlines()[0][:90]}", flush=True)
    times.sort(key=lambda pair: pair[0])
    best = [f"{us:.1f} ({t.block_m}, {t.block_n}, {t.splits}, {t.num_warps}, {t.num_stages})" for us, t in times[:4]]
    return f"chosen {choose_blocks(m, n, k)}; " + ", ".join(best)


def time_experts(
    shape: Shape, layer: tuple[Rows8, Rows8], count: int, ceilings: Ceilings, told: list[str], *, sweep: bool
) -> Row:
    sets = [(rows_of(count, shape.hidden), *choices(shape, count)) for _ in range(6)]
    hit = sum(len(chosen.unique()) for _, chosen, _ in sets) / len(sets)
    moved = hit * 3 * shape.width * shape.hidden + 3 * count * shape.hidden
    roof = ceilings.roof_us(moved, 6.0 * count * shape.top_k * shape.width * shape.hidden, 2 * ceilings.bf16_per_s)
    us = graph_time_us([lambda s=s: routed_experts(*s, *layer) for s in sets])
    chosen = choose_tiling(count * shape.top_k, shape.experts, e4m3=True)
    parts = product_times(shape, layer, sets, chosen)
    if sweep:
        told += sweep_experts(shape, layer, sets)
    note = f"{hit:.0f} experts; gate_up {parts[0]:.1f}, down {parts[1]:.1f}; {roof / us:.0%} of the roof"
    return timed_row(f"{shape.name} {count} sequences: experts", us, roof, note=note)


def product_times(shape: Shape, layer: tuple[Rows8, Rows8], sets: list, tiling: ExpertTiling) -> list[float]:
    lists = [None if len(c) == 1 else expert_blocks(c, shape.experts, tiling.block_m) for _, c, _ in sets]
    gated = rows_of(len(sets[0][1]) * shape.top_k, shape.width)
    first = [
        lambda s=s, listed=listed: gate_up_product(s[0], s[1], listed, layer[0], tiling)
        for s, listed in zip(sets, lists, strict=True)
    ]
    second = [
        lambda s=s, listed=listed: down_product(gated, s[1], listed, layer[1], tiling)
        for s, listed in zip(sets, lists, strict=True)
    ]
    return [graph_time_us(calls, repetitions=8) for calls in (first, second)]


def sweep_experts(shape: Shape, layer: tuple[Rows8, Rows8], sets: list) -> list[str]:
    per_expert = sets[0][1].numel() / shape.experts
    heights = (
        (16,) if per_expert <= 4 else (16, 32) if per_expert <= 12 else (32, 64) if per_expert <= 64 else (64, 128)
    )
    strips = (
        Strip(64, 128, 4, 5),
        Strip(64, 128, 4, 8),
        Strip(128, 128, 4, 3),
        Strip(128, 128, 8, 4),
        Strip(64, 128, 8, 4),
    )
    told = []
    for height in heights:
        times = []
        for strip in strips:
            try:
                times.append((product_times(shape, layer, sets, ExpertTiling(height, strip, strip)), strip))
            except (OutOfResources, CompilationError, PTXASError) as failure:
                print(f"no     {height} {strip}: {str(failure).splitlines()[0][:90]}", flush=True)
        for part, name in enumerate(("gate_up", "down")):
            best = sorted(times, key=lambda pair, part=part: pair[0][part])
            line = ", ".join(f"{us[part]:.1f} ({s.block_n}, {s.num_warps}, {s.num_stages})" for us, s in best)
            told.append(f"{shape.name} {len(sets[0][1])}: {name} block_m {height}: {line}")
            print(told[-1], flush=True)
    return told


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tilings")
    parser.add_argument("--only", choices=("dense", "experts"), help="one part")
    parser.add_argument("--seqs", type=lambda text: [int(part) for part in text.split(",")], help="of V2-Lite only")
    asked = parser.parse_args()
    origin, ceilings = gpu_origin(asked.commit), measure_ceilings()
    check()
    rows, told = [], []
    if asked.only != "experts":
        for one in QUICK if asked.quick else DENSE:
            rows += [time_dense(one, m, ceilings, told, sweep=asked.sweep) for m in (MS[1::2] if asked.quick else MS)]
    for shape in () if asked.only == "dense" else (LITE, QWEN) if not asked.seqs else (LITE,):
        layer = expert_layer(shape)
        rows += [
            time_experts(shape, layer, count, ceilings, told, sweep=asked.sweep) for count in asked.seqs or SEQUENCES
        ]
    print_rows(rows, origin)
    print("\n".join(told))
    if asked.json:
        write_json(rows, origin, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
