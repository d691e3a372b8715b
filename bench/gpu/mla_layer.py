"""One layer of DeepSeek-V2-Lite's shape on one GPU, latent attention and experts, in bf16 and in INT8.

    python bench/gpu/mla_layer.py [--quick] [--sweep] [--json FILE] [--commit ID]

The prompt kernel is checked against float64, then both sublayers with Triton kernels against those without. Timed, for
decode steps and for prompts: microseconds in a graph beside the floor (weights and KV over the copy bandwidth,
operations over the bf16 rate), microseconds of an eager call from its start to the device's end, which for a short
prompt is the host's time, and launches counted by torch's profiler. `--sweep` times tilings of the prompt kernel.

Launches by reading, INT8 decode. Attention, 10 (15 before): norm + quantise, queries and latents, prologue + rotation,
absorption, copy of the rotary part, attention, merge, values, quantise, output + residual; bf16: 9. Experts, 11 (21
before): norm + gate + quantise, choice, shared gate_up, SwiGLU + quantise, shared down, sort + plan, permute, gate_up,
SwiGLU + quantise, down, sum + residual. Attention over prompts between captured pieces, 3: gather, expand, attend.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from gqa_check import attempt, error_of, sequences
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
from torch.profiler import ProfilerActivity, profile

from tripool.kernels.batch import Batch
from tripool.kernels.cuda import attention
from tripool.kernels.cuda.arithmetic import quantized_ops_of
from tripool.kernels.cuda.rows import DeviceRows, PagedRows
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.table import KernelTable
from tripool.kernels.triton.mla_prefill import Tiling, mla_prefill
from tripool.kernels.weights import INT8, LatentWeights, MlpWeights, MoeWeights, Norm

HIDDEN, HEADS, NOPE, ROPE, V, RANK = 2048, 16, 128, 64, 128, 512
EXPERTS, TOP_K, WIDTH, SHARED = 64, 6, 1408, 2 * 1408
SCALE = (NOPE + ROPE) ** -0.5
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
COPIES = 12
"""Copies of the attention's weights, so that none stays in the L2; experts are more than fit anyway."""
SWEEP = [
    Tiling(rows, tokens, warps, stages)
    for rows, warps in ((64, 4), (128, 8), (128, 4))
    for tokens in (32, 64, 128)
    for stages in (2, 3)
    if tokens * stages <= 256
]


def stored(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight that is eight bits times a scale for each row, and the scales."""
    scales = (torch.rand(shape[:-1], device="cuda") + 0.5) * (2.0 / 127 / shape[-1] ** 0.5)
    steps = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
    return (steps.bfloat16() * scales[..., None]).bfloat16(), scales


def gain(width: int) -> Norm:
    return Norm(torch.rand(width, **BF16) + 0.5, 1e-6)


def attention_weights() -> LatentWeights:
    (down, by_down), (query, by_query) = stored(RANK + ROPE, HIDDEN), stored(HEADS * (NOPE + ROPE), HIDDEN)
    out, by_out = stored(HIDDEN, HEADS * V)
    up = torch.randn(HEADS, NOPE + V, RANK, **BF16) / RANK**0.5
    core = MlaWeights(query, up, out, None, NOPE, SCALE, by_query, None, by_out)
    return LatentWeights(
        norm=gain(HIDDEN), down=down, down_bias=None, q_norm=None, kv_norm=gain(RANK), core=core, down_scales=by_down
    )


def moe_weights() -> MoeWeights:
    (gate_up, by_gate_up), (down, by_down) = stored(EXPERTS, 2 * WIDTH, HIDDEN), stored(EXPERTS, HIDDEN, WIDTH)
    (wide, by_wide), (narrow, by_narrow) = stored(2 * SHARED, HIDDEN), stored(HIDDEN, SHARED)
    norm = gain(HIDDEN)
    shared = MlpWeights(
        norm=norm, gate_up=wide, gate_up_bias=None, down=narrow, down_bias=None, gate_up_scales=by_wide,
        down_scales=by_narrow,
    )  # fmt: skip
    return MoeWeights(
        norm=norm, gate=torch.randn(EXPERTS, HIDDEN, **BF16), gate_bias=None, gate_up=gate_up, down=down,
        shared=shared, plan=RoutePlan(TOP_K, "softmax"), gate_up_scales=by_gate_up, down_scales=by_down,
    )  # fmt: skip


def table_for(kind: str, *, fused: bool) -> KernelTable:
    quantized = quantized_ops_of(INT8, fused=fused, device="cuda") if kind == "INT8" else None
    return cuda_table(torch.bfloat16, fused=fused, quantized=quantized, store=OnDevice("cuda"))


def rotation(rows: int) -> torch.Tensor:
    return torch.polar(torch.ones(rows, ROPE // 2), torch.randn(rows, ROPE // 2)).cuda()


def decode_batch(requests: int, tokens: int) -> tuple[Batch, torch.Tensor]:
    table = torch.randperm(requests * -(-tokens // 64), device="cuda").view(requests, -1).int()
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    slots = table[:, (tokens - 1) // 64].long() * 64 + (tokens - 1) % 64
    rows = DeviceRows((), PagedRows(table, lengths, 1), torch.arange(requests, device="cuda"))
    batch = Batch(slots, slots, slots, 0, [], [], rotation(requests), rows)
    return batch, torch.randn(table.numel() * 64, RANK + ROPE, **BF16)


def prompt_batch(pieces: list[tuple[int, int]], first: int = 0) -> tuple[Batch, torch.Tensor]:
    """pieces: (start, count)."""
    width = max(-(-(start + count) // 64) for start, count in pieces)
    table = torch.randperm(len(pieces) * width).view(len(pieces), width)
    seqs = sequences(pieces, table, first)
    slots = torch.cat([
        table[i, torch.arange(seq.start, seq.stop) // 64] * 64 + torch.arange(seq.start, seq.stop) % 64
        for i, seq in enumerate(seqs)
    ]).cuda()  # fmt: skip
    rows = DeviceRows(seqs, None, torch.arange(len(slots), device="cuda"))
    batch = Batch(slots, slots, slots, len(slots), seqs, [], rotation(len(slots)), rows)
    return batch, torch.randn(table.numel() * 64, RANK + ROPE, **BF16)


def check_prefill(first: int) -> float:
    """The kernel alone, against float64."""
    pieces = [(first, 300), (first, 1), (64, 65), (1000, 200), (first, 64), (130, 7), (first, 1500)]
    batch, kv = prompt_batch(pieces, first)
    rows = batch.native
    assert isinstance(rows, DeviceRows)
    q, up = torch.randn(batch.num_rows, HEADS, NOPE + ROPE, **BF16), torch.randn(HEADS, NOPE + V, RANK, **BF16) / 20
    out = torch.full((len(q), HEADS * V), float("nan"), **BF16)
    attention.mla_prompt_fused(q, kv, rows, up, NOPE, SCALE, out)
    exact = torch.empty_like(out, dtype=torch.float64)
    attention.mla_prompt(q.double(), kv.double(), rows, up.double(), NOPE, SCALE, exact)
    return error_of(out, exact)


def check_sublayers(kind: str, latent: LatentWeights, moe: MoeWeights, prompts: bool) -> float:
    """What each sublayer adds, with Triton kernels and without; of the experts the median row: where two experts are
    nearly alike a row may choose the other."""
    batch, kv = prompt_batch([(0, 300), (64, 65), (3, 1)]) if prompts else decode_batch(37, 300)
    x, results = torch.randn(batch.num_rows, HIDDEN, **BF16), []
    for fused in (False, True):
        table, added = table_for(kind, fused=fused), []
        for sublayer in (partial(table.mla(latent), batch=batch, kv=kv.clone()), table.moe(moe)):
            stream = torch.zeros_like(x).copy_(x)
            sublayer(stream)
            added.append(stream.double() - x.double())
        results.append(added)
    (attended, mixed), (ours_attended, ours_mixed) = results
    by_row = (ours_mixed - mixed).norm(dim=1) / mixed.norm(dim=1)
    return max(error_of(ours_attended, attended), float(by_row.median()))


def eager_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def launches_of(call: Callable[[], object]) -> int:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum("cuda" in str(event.device_type).lower() for event in seen.events())


def row_of(name: str, calls: Sequence[Callable[[], object]], roof_us: float) -> Row:
    launches, eager, us = launches_of(calls[0]), eager_us(calls[-1]), graph_time_us(calls)
    row = timed_row(name, us, roof_us, launches=launches, eager_us=eager)
    return replace(row, note=f"{launches} launches, eager {eager:.0f} µs, {row.note}")


def layer_rows(
    kind: str, name: str, made: tuple[Batch, torch.Tensor], parts: tuple[list, Callable], tokens: int, c: Ceilings
) -> list[Row]:
    (batch, kv), (attentions, moe), rows = made, parts, made[0].num_rows
    stream = torch.randn(rows, HIDDEN, **BF16)
    inputs = [torch.randn(rows, HIDDEN, **BF16) for _ in range(8)]
    weights = (RANK + ROPE + HEADS * (NOPE + ROPE) + HEADS * V) * HIDDEN
    up, size = HEADS * (NOPE + V) * RANK, 1 if kind == "INT8" else 2
    pairs = rows * tokens * HEADS * (RANK + ROPE + RANK if not batch.num_prompt_rows else (NOPE + ROPE + V) / 2)
    attended = c.roof_us(weights * size + up * 2 + len(kv) * (RANK + ROPE) * 2, 2 * rows * (weights + up) + 2 * pairs)
    hit = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows)
    mixed_bytes = 3 * HIDDEN * (hit * WIDTH + SHARED) * size + EXPERTS * HIDDEN * 2
    mixed = c.roof_us(mixed_bytes, 2 * rows * 3 * HIDDEN * (TOP_K * WIDTH + SHARED))
    return [
        row_of(f"{name} attention {kind}", [partial(one, stream, batch, kv) for one in attentions], attended),
        row_of(f"{name} experts {kind}", [partial(moe, x) for x in inputs], mixed),
    ]


def sweep(ceilings: Ceilings) -> list[Row]:
    told = []
    for requests, tokens in ((1, 256), (8, 256), (1, 4096)):
        batch, _ = prompt_batch([(0, tokens)] * requests)
        rows, n = batch.native, batch.num_rows
        assert isinstance(rows, DeviceRows)
        (context,) = rows.prompt_contexts
        q, rotated = torch.randn(n, HEADS, NOPE + ROPE, **BF16), torch.randn(n, ROPE, **BF16)
        expanded = torch.randn(n, HEADS, NOPE + V, **BF16)
        roof = ceilings.roof_us((q.numel() + expanded.numel()) * 2, n * tokens * HEADS * (NOPE + ROPE + V))
        for tiling in SWEEP:
            call = partial(mla_prefill, q, expanded, rotated, context.index, SCALE, nope=NOPE, tiling=tiling)
            name = f"prompt {requests} x {tokens} {tiling.block_rows}x{tiling.block_tokens}"
            name += f" {tiling.num_warps} warps {tiling.num_stages} stages"
            if attempt(name, lambda call=call: 0.0 * float(call().isfinite().all())):
                told.append(timed_row(name, graph_time_us([call], rounds=4), roof))
    return told


def timed(moe: MoeWeights, ceilings: Ceilings, *, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for kind in ("INT8", "bf16"):
        table = table_for(kind, fused=True)
        parts = [table.mla(attention_weights()) for _ in range(COPIES)], table.moe(moe)
        for requests in (1, 64) if quick else (1, 8, 64, 256):
            rows += layer_rows(kind, f"decode {requests} x 512", decode_batch(requests, 512), parts, 512, ceilings)
        for requests in (1,) if quick else (1, 8):
            made = prompt_batch([(0, 256)] * requests)
            rows += layer_rows(kind, f"prompt {requests} x 256", made, parts, 256, ceilings)
    return rows


@torch.inference_mode()
def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time tilings of the prompt kernel")
    told = parser.parse_args()
    torch.manual_seed(3)
    origin, ceilings = gpu_origin(told.commit), measure_ceilings()
    print(f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 {ceilings.bf16_per_s / 1e12:.0f} TFLOP/s", flush=True)
    results = [attempt(f"prompt kernel, first {first}", partial(check_prefill, first)) for first in (0, 1)]
    if told.sweep:
        rows = sweep(ceilings)
    else:
        latent, moe = attention_weights(), moe_weights()
        for kind in ("bf16", "INT8"):
            for prompts in (False, True):
                check = partial(check_sublayers, kind, latent, moe, prompts)
                results.append(attempt(f"{kind} {'prompts' if prompts else 'decode'}", check, 3e-2))
        rows = timed(moe, ceilings, quick=told.quick)
    print_rows(rows, origin)
    if told.json:
        write_json(rows, origin, told.json)
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
