"""Routed experts in bfloat16 on one GPU: checked, then timed beside torch's grouped product and the floor.

    python bench/gpu/experts16.py [--quick] [--sweep] [--only lite|qwen] [--seqs 1,64] [--json FILE] [--commit ID]

The floor is reading the weights of the experts that are hit once, or the operations, whichever takes longer. `--sweep`
times the two products in other tilings; the fastest of each case are printed last, as `choose_tiling` writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    timed_row,
    write_json,
)
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tripool.kernels.cuda.make import sorted_rows
from tripool.kernels.ref.experts import Experts
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.triton.expert_blocks import expert_blocks
from tripool.kernels.triton.experts import (
    ExpertTiling,
    Strip,
    choose_tiling,
    down_product,
    gate_up_product,
    routed_experts,
)
from tripool.kernels.triton.gate import route
from tripool.kernels.triton.permute import sum_choices
from tripool.kernels.triton.router import norm_route

HALF = torch.bfloat16
SETS = 6
"""Rows and choices to rotate among; the weights of a layer exceed the L2 by far."""


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

NARROW = (
    Strip(64, 128, 4, 3), Strip(64, 128, 4, 4), Strip(64, 64, 4, 6), Strip(64, 256, 4, 3), Strip(32, 128, 4, 4),
    Strip(32, 256, 4, 3), Strip(16, 256, 4, 4), Strip(128, 64, 4, 4), Strip(128, 128, 4, 3),
)  # fmt: skip
WIDE = (
    Strip(64, 64, 4, 4), Strip(64, 128, 4, 3), Strip(128, 64, 4, 4), Strip(128, 64, 8, 4), Strip(128, 64, 8, 3),
    Strip(128, 128, 8, 2), Strip(256, 64, 8, 3), Strip(64, 64, 8, 4), Strip(128, 64, 4, 3),
)  # fmt: skip
HEIGHTS = {
    1: (16,), 8: (16,), 64: (16, 32), 256: (32, 64), 512: (64, 128), 2048: (64, 128), 16384: (128,),
}  # fmt: skip


class Inputs:
    """One layer of weights and some sets of rows."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, self.generator = shape, torch.Generator("cuda").manual_seed(seed)
        hidden, experts, width = shape.hidden, shape.experts, shape.width
        self.gate_up = self.randn(experts, 2 * width, hidden) / hidden**0.5
        self.down = self.randn(experts, hidden, width) / width**0.5

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, dtype=HALF, device="cuda", generator=self.generator)

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = torch.rand(count, self.shape.experts, device="cuda", generator=self.generator)
        weights, chosen = scores.topk(self.shape.top_k)
        return self.randn(count, self.shape.hidden), chosen.int(), weights

    def num_bytes(self, chosen: torch.Tensor) -> int:
        """Weights of the experts that are hit, rows in and out."""
        per_expert = 3 * self.shape.width * self.shape.hidden * 2
        return len(chosen.unique()) * per_expert + 2 * len(chosen) * self.shape.hidden * 2

    def num_ops(self, count: int) -> int:
        return 6 * count * self.shape.top_k * self.shape.width * self.shape.hidden


def check(shape: Shape, counts: tuple[int, ...]) -> None:
    """Fresh inputs, an expert that nobody chooses is NaN, memory that the next allocations find is NaN."""
    small = replace(shape, experts=shape.experts // 4)
    for count in counts:
        inputs = Inputs(small, seed=count)
        x, chosen, weights = inputs.rows(count)
        chosen = torch.where(chosen == 3, 0, chosen)
        inputs.gate_up[3], inputs.down[3] = float("nan"), float("nan")
        expected = Experts(inputs.gate_up.double(), inputs.down.double())(x.double(), chosen, weights.double())
        junk = torch.full((64 << 20,), float("nan"), device="cuda")
        del junk
        onto, also = inputs.randn(*x.shape), inputs.randn(*x.shape)
        expected += onto.double() + also.double()
        out = routed_experts(x, chosen, weights, inputs.gate_up, inputs.down, onto, also).double()
        error = float((out - expected).norm() / expected.norm())
        assert error < 5e-3, f"{shape.name}, {count} rows: error {error:.2g}"
        print(f"right  {shape.name}, {count} rows, error {error:.1e}", flush=True)


def check_router(experts: int) -> None:
    x, gain, gate = _router_inputs(70, experts)
    normed, chosen, weights = norm_route(x, gain, 1e-6, gate, None, RoutePlan(6, "softmax"))
    expected = F.rms_norm(x.double(), gain.shape, gain.double(), 1e-6)
    assert float((normed.double() - expected).norm() / expected.norm()) < 4e-3
    theirs, their_weights = route(F.linear(normed.float(), gate.float()), None, RoutePlan(6, "softmax"))
    same = float((chosen == theirs).float().mean())
    assert same > 0.98, f"router: {same:.3f} of the choices agree"  # near ties may fall either way
    torch.testing.assert_close(weights, their_weights, rtol=1e-3, atol=1e-6)
    print(f"right  router of {experts}, {same:.1%} of the choices", flush=True)


def _router_inputs(rows: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, gate = (torch.randn(n, 2048, device="cuda").to(HALF) for n in (rows, experts))
    return x, torch.rand(2048, device="cuda").to(HALF), gate


def time_case(inputs: Inputs, count: int, ceilings: Ceilings) -> list[Row]:
    shape, sets = inputs.shape, [inputs.rows(count) for _ in range(SETS)]
    hit = sum(len(chosen.unique()) for _, chosen, _ in sets) / SETS
    roof = ceilings.roof_us(sum(inputs.num_bytes(one[1]) for one in sets) / SETS, inputs.num_ops(count))
    name, tiling = f"{shape.name} {count} sequences", choose_tiling(count * shape.top_k, shape.experts)
    both = inputs.gate_up, inputs.down
    whole = graph_time_us([lambda s=s: routed_experts(*s, *both) for s in sets])
    torchs = graph_time_us([lambda s=s: sorted_rows(*s, *both) for s in sets])
    parts = _alone(inputs, sets, tiling)
    note = f"{hit:.0f} experts; " + ", ".join(f"{part} {us:.1f}" for part, us in parts.items())
    note += f"; torch {torchs:.1f}; {roof / whole:.0%} of the roof"
    return [timed_row(f"{name}: experts", whole, roof, note=note, torch_us=torchs, **parts)]


def _alone(inputs: Inputs, sets: list, tiling: ExpertTiling) -> dict[str, float]:
    """Each launch by itself, on the lists and rows of the real call."""
    shape, one = inputs.shape, len(sets[0][0]) == 1
    lists = [None if one else expert_blocks(chosen, shape.experts, tiling.block_m) for _, chosen, _ in sets]
    gated = [
        gate_up_product(x, c, listed, inputs.gate_up, tiling) for (x, c, _), listed in zip(sets, lists, strict=True)
    ]
    parts = inputs.randn(len(sets[0][0]), shape.top_k, shape.hidden)
    calls: dict[str, list[Callable[[], object]]] = {
        "gate_up": [
            lambda s=s, listed=listed: gate_up_product(s[0], s[1], listed, inputs.gate_up, tiling)
            for s, listed in zip(sets, lists, strict=True)
        ],
        "down": [
            lambda s=s, g=g, listed=listed: down_product(g, s[1], listed, inputs.down, tiling)
            for s, g, listed in zip(sets, gated, lists, strict=True)
        ],
        "sum": [lambda: sum_choices(parts, sets[0][2])],
    }
    if not one:
        calls["list"] = [lambda: expert_blocks(sets[0][1], shape.experts, tiling.block_m)]
    return {part: graph_time_us(many, rounds=4 if len(many) == 1 else 1) for part, many in calls.items()}


def time_router(rows: int, experts: int, ceilings: Ceilings) -> Row:
    x, gain, gate = _router_inputs(rows, experts)
    wide, plan = gate.float(), RoutePlan(6, "softmax")

    def plain() -> object:
        normed = F.rms_norm(x, gain.shape, gain, 1e-6)
        return route(F.linear(normed.float(), wide), None, plan)

    apart = graph_time_us([plain] * 4)
    us = graph_time_us([lambda: norm_route(x, gain, 1e-6, gate, None, plan)] * 4)
    roof = ceilings.roof_us(gate.nbytes + 2 * x.nbytes)
    return timed_row(f"router of {experts}, {rows} rows", us, roof, note=f"norm, product and choice apart {apart:.1f}")


def sweep(inputs: Inputs, count: int) -> list[str]:
    """The fastest strips of each product, by height of the blocks."""
    shape, sets, told = inputs.shape, [inputs.rows(count) for _ in range(SETS)], []
    for height in HEIGHTS[count]:
        best: dict[str, list[tuple[float, Strip]]] = {"gate_up": [], "down": []}
        lists = [None if count == 1 else expert_blocks(s[1], shape.experts, height) for s in sets]
        gated = inputs.randn(count * shape.top_k, shape.width)
        for strip in NARROW if height <= 32 else WIDE:
            tiling = ExpertTiling(height, strip, strip)
            gate_ups = [
                lambda s=s, listed=listed, t=tiling: gate_up_product(s[0], s[1], listed, inputs.gate_up, t)
                for s, listed in zip(sets, lists, strict=True)
            ]
            downs = [
                lambda s=s, g=gated, listed=listed, t=tiling: down_product(g, s[1], listed, inputs.down, t)
                for s, listed in zip(sets, lists, strict=True)
            ]
            for part, calls in (("gate_up", gate_ups), ("down", downs)):
                try:
                    best[part].append((graph_time_us(calls, repetitions=8), strip))
                except (OutOfResources, CompilationError, PTXASError) as failure:
                    print(f"no     {part} {height} {strip}: {str(failure).splitlines()[0][:90]}", flush=True)
        for part, tried in best.items():
            tried.sort(key=lambda one: one[0])
            times = ", ".join(
                f"{us:.1f} ({s.block_n}, {s.block_k}, {s.num_warps}, {s.num_stages})" for us, s in tried[:5]
            )
            told.append(f"{shape.name} {count}: {part} block_m {height}: {times}")
            print(told[-1], flush=True)
    return told


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tilings")
    parser.add_argument("--only", choices=("lite", "qwen"), help="one shape")
    parser.add_argument("--seqs", default="", help="numbers of sequences, with commas between")
    asked = parser.parse_args()
    origin, ceilings = gpu_origin(asked.commit), measure_ceilings()
    counts = tuple(map(int, asked.seqs.split(","))) if asked.seqs else SEQUENCES
    shapes = [one for one in (LITE, QWEN) if asked.only in (None, one.name)]
    rows, told = [], []
    for shape in shapes:
        check(shape, (1, 3, 17, 300) if asked.quick else (1, 2, 3, 17, 64, 129, 300, 777))
        check_router(shape.experts)
        inputs = Inputs(shape)
        for count in counts:
            rows += time_case(inputs, count, ceilings)
            print(rows[-1], rows[-1].note, flush=True)
            if asked.sweep and count in HEIGHTS:
                told += sweep(inputs, count)
        del inputs
        for count in (1, 64, 512):
            rows.append(time_router(count, shape.experts, ceilings))
    print_rows(rows, origin)
    print("\n".join(told))
    if asked.json:
        write_json(rows, origin, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
