"""The 16-bit path of Llama and Qwen3 on one GPU: attention over pages, and what stands between the products.

    python bench/gpu/gqa.py [--quick] [--sweep] [--json FILE] [--commit ID]

Everything is first checked against the plain versions in float64, then timed beside floors (bytes over the copy
bandwidth, operations over the matrix rate) and beside torch's attention over contiguous KV, which a paged cache does
not have. `--sweep` times tilings instead: splits and tiles of decode, tiles of prefill.

Launches of one Llama layer in a decode step, plain: about 30 (norm 1, qkv 1, rope 4, cache write 2, gather of the
context 1, its mask 6, attention under a mask 3 to 5, out 1, sum 1, norm 1, gate_up 1, silu 1, up 1, down 1, sum 1).
With these kernels 10: norm, qkv, rope + cache, attention, merge (only where a context may have two splits), out +
residual, norm, gate_up, swiglu, down + residual. The rows named `layer` count them with torch's profiler.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from gqa_check import (
    BF16,
    LLAMA,
    SHAPES,
    Shape,
    attempt,
    check_decode,
    check_prefill,
    checks,
    norm_pair,
    queries,
    rows_of,
    scattered,
    sequences,
)
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
from torch.profiler import ProfilerActivity, profile

from tripool.kernels.batch import Batch
from tripool.kernels.cuda import elementwise
from tripool.kernels.cuda.make import Linear
from tripool.kernels.cuda.rows import DeviceRows, PagedRows
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.kernels.triton import elementwise as fused
from tripool.kernels.triton import gqa_decode as decoding
from tripool.kernels.triton import gqa_prefill as prefilling
from tripool.kernels.triton.gqa_decode import gqa_decode
from tripool.kernels.triton.gqa_prefill import gqa_prefill
from tripool.kernels.triton.rope_cache import rope_cache
from tripool.kernels.weights import GqaWeights, MlpWeights, Norm

DECODE_TILINGS = tuple(
    decoding.Tiling(split, tokens, warps, stages)
    for split, tokens, warps, stages in (
        (256, 64, 4, 3), (256, 64, 4, 5), (256, 64, 4, 7), (256, 32, 4, 5), (256, 32, 4, 7), (256, 32, 2, 7),
        (128, 64, 4, 5), (512, 64, 4, 5), (256, 64, 8, 5),
    )
)  # fmt: skip
PREFILL_TILINGS = tuple(
    prefilling.Tiling(rows, tokens, warps, stages)
    for rows, tokens, warps, stages in (
        (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 5), (128, 32, 8, 5),
    )
)  # fmt: skip


def decode_row(
    shape: Shape, requests: int, tokens: int, ceilings: Ceilings, *, num_queries: int = 1,
    tiling: decoding.Tiling | None = None, beside: bool = True,
) -> Row:  # fmt: skip
    scale, num_bytes = shape.dim**-0.5, requests * tokens * shape.kv_bytes
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    count = sets_beyond_cache(num_bytes, most=48)
    sets = [(queries(requests * num_queries, shape), *scattered(lengths, shape)) for _ in range(count)]
    calls = [lambda s=s: gqa_decode(*s, lengths, scale, queries=num_queries, tiling=tiling) for s in sets]
    us = graph_time_us(calls, rounds=max(1, 8 // count))
    note = f"{num_bytes / us / 1e3:.0f} GB/s"
    if beside:
        keys = [
            kv.view(requests, tokens, 2, shape.kv_heads, shape.dim).permute(2, 0, 3, 1, 4).contiguous()
            for _, kv, _ in sets
        ]
        shaped = [s[0].unflatten(0, (-1, num_queries)).transpose(1, 2) for s in sets]
        other = [
            lambda q=q, k=k: F.scaled_dot_product_attention(q, k[0], k[1], scale=scale, enable_gqa=True)
            for q, k in zip(shaped, keys, strict=True)
        ]
        note += f", SDPA contiguous {graph_time_us(other, rounds=max(1, 8 // count)):.1f} µs"
    kind = "" if num_queries == 1 else f" x {num_queries} queries"
    name = f"decode {shape.name} {requests} x {tokens}{kind}" + ("" if tiling is None else f" {tiling_name(tiling)}")
    return timed_row(name, us, ceilings.roof_us(num_bytes), note=note)


def prefill_row(
    shape: Shape, requests: int, tokens: int, ceilings: Ceilings, *, tiling: prefilling.Tiling | None = None,
    beside: bool = True,
) -> Row:  # fmt: skip
    scale, rows = shape.dim**-0.5, requests * tokens
    num_ops = 2 * requests * tokens * (tokens + 1) * shape.heads * shape.dim
    num_bytes = rows * (shape.kv_bytes + 4 * shape.heads * shape.dim)
    count = sets_beyond_cache(num_bytes, most=8)
    sets = []
    for _ in range(count):
        kv, table = scattered(torch.full((requests,), tokens, device="cuda"), shape)
        index = rows_of(sequences([(0, tokens)] * requests, table)).prompt_index.index
        sets.append((queries(rows, shape), kv, index))
    us = graph_time_us([lambda s=s: gqa_prefill(*s, scale, tiling=tiling) for s in sets], rounds=max(1, 4 // count))
    note = f"{num_ops / us / 1e6:.0f} TFLOP/s"
    if beside:
        keys = [
            kv.view(requests, tokens, 2, shape.kv_heads, shape.dim).permute(2, 0, 3, 1, 4).contiguous()
            for _, kv, _ in sets
        ]
        shaped = [s[0].unflatten(0, (requests, tokens)).transpose(1, 2).contiguous() for s in sets]
        other = [
            lambda q=q, k=k: F.scaled_dot_product_attention(q, k[0], k[1], is_causal=True, scale=scale, enable_gqa=True)
            for q, k in zip(shaped, keys, strict=True)
        ]
        note += f", SDPA contiguous {graph_time_us(other):.1f} µs"
    name = f"prefill {shape.name} {requests} x {tokens}" + ("" if tiling is None else f" {tiling_name(tiling)}")
    return timed_row(name, us, ceilings.roof_us(num_bytes, num_ops), note=note)


def tiling_name(tiling: decoding.Tiling | prefilling.Tiling) -> str:
    side = tiling.split_tokens if isinstance(tiling, decoding.Tiling) else tiling.block_rows
    return f"{side}/{tiling.block_tokens} w{tiling.num_warps} s{tiling.num_stages}"


def small_rows(shape: Shape, rows: int, ceilings: Ceilings) -> list[Row]:
    """Norm, rope + cache and SwiGLU, beside torch's."""
    every, sets = shape.heads + 2 * shape.kv_heads, []
    for _ in range(sets_beyond_cache(rows * every * shape.dim * 2, most=16)):
        cos_sin = torch.polar(torch.ones(rows, shape.dim // 2), torch.randn(rows, shape.dim // 2)).cuda()
        kv = torch.randn(rows * 64, 2 * shape.kv_heads * shape.dim, **BF16)
        slots = torch.randperm(len(kv), device="cuda")[:rows]
        sets.append((torch.randn(rows, every * shape.dim, **BF16), cos_sin, slots, kv))
    gain, norms = torch.rand(shape.hidden, **BF16), norm_pair(shape)
    xs = [torch.randn(rows, shape.hidden, **BF16) for _ in sets]
    inner = [torch.randn(rows, 2 * shape.width, **BF16) for _ in sets]
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    told = []
    for name, ours, torchs, num_bytes in (
        ("norm", [lambda x=x: fused.rms_norm(x, gain, 1e-5) for x in xs],
         [lambda x=x: elementwise.rms_norm(x, gain, 1e-5) for x in xs], 4 * shape.hidden),
        ("rope + cache", [lambda s=s: rope_cache(*s, **heads, **norms) for s in sets], None, 4 * every * shape.dim),
        ("swiglu", [lambda x=x: fused.swiglu(x) for x in inner],
         [lambda x=x: elementwise.swiglu(x) for x in inner], 6 * shape.width),
    ):  # fmt: skip
        note = "" if torchs is None else f"torch {graph_time_us(torchs):.1f} µs"
        us = graph_time_us(ours, rounds=2)
        told.append(timed_row(f"{name} {shape.name}, {rows} rows", us, ceilings.roof_us(rows * num_bytes), note=note))
    return told


def add_after(x: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor) -> None:
    x += F.linear(inner, weight)


def product_rows(rows: int, ceilings: Ceilings) -> list[Row]:
    """Out and down projection of Llama with the residual in the product, beside product and sum."""
    told = []
    for name, width in (("out", LLAMA.hidden), ("down", LLAMA.width)):
        weights = [torch.randn(LLAMA.hidden, width, **BF16) / 64 for _ in range(4)]
        x, inner = torch.randn(rows, LLAMA.hidden, **BF16), torch.randn(rows, width, **BF16)
        apart = graph_time_us([partial(add_after, x, inner, w) for w in weights])
        alone = graph_time_us([partial(F.linear, inner, w) for w in weights])
        us = graph_time_us([partial(Linear(w, dtype=torch.bfloat16).add_to, x, inner) for w in weights])
        roof = ceilings.roof_us(weights[0].nbytes, 2 * rows * weights[0].numel())
        note = f"product, then sum {apart:.1f} µs; product alone {alone:.1f} µs"
        told.append(timed_row(f"{name} + residual {LLAMA.name}, {rows} rows", us, roof, note=note))
    return told


def layer_weights(shape: Shape) -> tuple[GqaWeights, MlpWeights]:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, **BF16) / 64

    every, norm = (shape.heads + 2 * shape.kv_heads) * shape.dim, Norm(torch.rand(shape.hidden, **BF16), 1e-5)
    attend = GqaWeights(
        norm=norm, qkv=normal(every, shape.hidden), qkv_bias=None, out=normal(shape.hidden, shape.heads * shape.dim),
        out_bias=None, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.dim, scale=shape.dim**-0.5,
        **norm_pair(shape),
    )  # fmt: skip
    mlp = MlpWeights(
        norm=norm, gate_up=normal(2 * shape.width, shape.hidden), gate_up_bias=None,
        down=normal(shape.hidden, shape.width), down_bias=None,
    )  # fmt: skip
    return attend, mlp


def layer_rows(requests: int, tokens: int, ceilings: Ceilings) -> list[Row]:
    """A whole Llama layer of a decode step: time in a graph, and launches."""
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    kv, table = scattered(lengths, LLAMA)
    cos_sin = torch.polar(torch.ones(requests, LLAMA.dim // 2), torch.randn(requests, LLAMA.dim // 2)).cuda()
    slots = table[:, -1].long() * 64 + 63
    order = torch.arange(requests, device="cuda")
    batch = Batch(slots, slots, slots, 0, [], [], cos_sin, DeviceRows((), PagedRows(table, lengths, 1), order))
    weights, x = layer_weights(LLAMA), torch.randn(requests, LLAMA.hidden, **BF16)
    num_bytes = sum(part.nbytes for part in (weights[0].qkv, weights[0].out, weights[1].gate_up, weights[1].down))
    told = []
    for name, is_fused in (("plain", False), ("fused", True)):
        table_of = cuda_table(torch.bfloat16, fused=is_fused, store=OnDevice("cuda"))
        parts = table_of.gqa(weights[0]), table_of.mlp(weights[1])

        def layer(parts=parts) -> None:
            parts[0](x, batch, kv)
            parts[1](x)

        us = graph_time_us([layer], rounds=4)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            layer()
            torch.cuda.synchronize()
        launches = [event.name for event in seen.events() if "cuda" in str(event.device_type).lower()]
        roof = ceilings.roof_us(num_bytes + requests * tokens * LLAMA.kv_bytes)
        row = timed_row(f"layer {LLAMA.name} {requests} x {tokens}, {name}", us, roof, launches=len(launches))
        told.append(replace(row, note=f"{len(launches)} launches, {row.note}"))
    return told


def sweep(ceilings: Ceilings) -> list[Row]:
    rows: list[Row] = []
    for shape in SHAPES:
        for tiling in DECODE_TILINGS:
            if attempt(f"decode {shape.name} {tiling_name(tiling)}", lambda: check_decode(shape, tiling)):  # noqa: B023
                cases = ((1, 512), (8, 512), (64, 512), (256, 512), (8, 8192))
                rows += [decode_row(shape, *case, ceilings, tiling=tiling, beside=False) for case in cases]
        for cut in PREFILL_TILINGS:
            if attempt(f"prefill {shape.name} {tiling_name(cut)}", lambda: check_prefill(shape, cut)):  # noqa: B023
                cases = ((1, 256), (8, 256), (64, 256), (1, 4096))
                rows += [prefill_row(shape, *case, ceilings, tiling=cut, beside=False) for case in cases]
    return sorted(rows, key=lambda row: row.name.split("/")[0].rsplit(" ", 1)[0])


def timed(ceilings: Ceilings, *, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for shape in SHAPES:
        cases = ((1, 512), (64, 512), (8, 8192)) if quick else ((1, 512), (8, 512), (64, 512), (256, 512), (8, 8192))
        rows += [decode_row(shape, *case, ceilings) for case in cases]
        rows.append(decode_row(shape, 64, 512, ceilings, num_queries=2, beside=False))
        rows += [prefill_row(shape, requests, 256, ceilings) for requests in ((8,) if quick else (1, 8, 64))]
        rows.append(prefill_row(shape, 1, 4096, ceilings))
        for count in (64,) if quick else (1, 8, 64, 256):
            rows += small_rows(shape, count, ceilings)
    for count in (64,) if quick else (1, 8, 64, 256):
        rows += product_rows(count, ceilings)
        rows += layer_rows(count, 512, ceilings)
    return rows


@torch.inference_mode()
def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time tilings")
    told = parser.parse_args()
    torch.manual_seed(3)
    origin, ceilings = gpu_origin(told.commit), measure_ceilings()
    print(f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 {ceilings.bf16_per_s / 1e12:.0f} TFLOP/s", flush=True)
    right = True
    if told.sweep:
        rows = sweep(ceilings)
    else:
        results = [attempt(name, check) for name, check in checks()]
        right = all(results)
        rows = timed(ceilings, quick=told.quick)
    print_rows(rows, origin)
    if told.json:
        write_json(rows, origin, told.json)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
