"""Bits of single kernels in the exact mode, on the card: each row alone, in parts of the batch, and among all rows.

Not a benchmark by itself: `exact.py` runs it first. A kernel whose bits change names its shape here; through a whole
model one would only see that some token differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import timing  # noqa: F401 (puts the package on the import path)
import torch
from timing import Row

from tripool.kernels.cuda.arithmetic import quantized_ops_of
from tripool.kernels.cuda.invariant_linear import Invariant
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.triton.experts import routed_experts
from tripool.kernels.triton.gqa_decode import gqa_decode
from tripool.kernels.triton.invariant_gemm import InvariantTiling, invariant_gemm
from tripool.kernels.triton.mla_decode import INVARIANT_SPLIT_TOKENS, mla_decode
from tripool.kernels.triton.router import norm_route
from tripool.kernels.weights import E4M3, INT8

Rows = torch.Tensor | tuple[torch.Tensor, ...]
Op = Callable[[Rows], torch.Tensor]
COUNTS, SMALL_COUNTS = (1, 2, 16, 17, 64, 100, 128, 129, 256, 300, 512, 1025, 2048), (1, 17, 66)
"""Rows of a part; the last is the whole."""


def parts_of(given: Rows, start: int, count: int) -> Rows:
    if isinstance(given, torch.Tensor):
        return given[start : start + count].contiguous()
    return tuple(one[start : start + count].contiguous() for one in given)


def same_bits(name: str, op: Op, given: Rows, counts: tuple[int, ...]) -> Row:
    """The share of parts whose rows have the bits that they have among all rows."""
    whole, total = op(given), counts[-1]
    parts = [(start, count) for count in counts for start in {0, total - count, (total - count) // 3}]
    other = [
        (start, count)
        for start, count in parts
        if not torch.equal(op(parts_of(given, start, count)), whole[start : start + count])
    ]
    note = f"other bits in parts of {sorted({count for _, count in other})} rows" if other else ""
    share = 1 - len(other) / len(parts)
    return Row(name=f"bits of rows: {name}", ours=share, peer=1.0, unit="of parts", target=1.0, note=note)


def kernel_rows(device: str, *, small: bool) -> Iterator[Row]:
    torch.manual_seed(5)
    counts = SMALL_COUNTS if small else COUNTS
    for name, op, given in cases(device, counts[-1], small=small):
        yield same_bits(name, op, given, counts)


def cases(device: str, rows: int, *, small: bool) -> Iterator[tuple[str, Op, Rows]]:
    """At V2-Lite's sizes."""
    hidden, width, num_experts, top_k = (128, 64, 8, 3) if small else (2048, 1408, 64, 6)
    x = torch.randn(rows, hidden, device=device).bfloat16()
    yield from products(x, device, small=small)
    chosen = torch.rand(rows, num_experts, device=device).topk(top_k).indices
    shares = torch.rand(rows, top_k, device=device)
    gate_up, down = (
        (torch.randn(shape, device=device) / shape[-1] ** 0.5).bfloat16()
        for shape in ((num_experts, 2 * width, hidden), (num_experts, hidden, width))
    )
    yield "experts bf16", lambda given: routed_experts(*given, gate_up, down, invariant=True), (x, chosen, shares)
    for stored in (INT8, E4M3):
        ops = quantized_ops_of(stored, fused=True, device=device, invariant=True)
        packed = [ops.quantise(one.flatten(0, 1)) for one in (gate_up, down)]
        if stored == INT8:
            w = [
                (q.view(one.shape), s.view(one.shape[:2])) for (q, s), one in zip(packed, (gate_up, down), strict=True)
            ]
        else:
            w = [
                (q.view(one.shape), s.view(*one.shape[:2], -1))
                for (q, s), one in zip(packed, (gate_up, down), strict=True)
            ]

        def experts(given: Rows, ops=ops, w=w) -> torch.Tensor:
            floats, who, weights = given
            return ops.experts(ops.quantise(floats), who, weights, *w, None, None)

        yield f"experts {stored}", experts, (x, chosen, shares)
    gain, gate = torch.ones(hidden, device=device), torch.randn(num_experts, hidden, device=device).bfloat16()
    plan = RoutePlan(top_k, "softmax")
    yield "router", lambda given: norm_route(given, gain, 1e-6, gate, None, plan)[2], x
    yield from attentions(rows, device, small=small)


def products(x: torch.Tensor, device: str, *, small: bool) -> Iterator[tuple[str, Op, Rows]]:
    invariant, hidden = Invariant.on(device), x.shape[1]
    for outs in (72, 200) if small else (2048, 3648, 21888):
        w = torch.randn(outs, hidden, device=device).bfloat16()
        yield f"product bf16 {hidden}→{outs}", partial(_product, invariant, w), x
    deep = torch.randn(x.shape[0], 2048 if small else 10944, device=device).bfloat16()
    w = torch.randn(72 if small else 2048, deep.shape[1], device=device).bfloat16()
    yield f"product bf16 {deep.shape[1]}→{len(w)}", partial(_product, invariant, w), deep
    for tiling in (InvariantTiling(64, num_stages=6), InvariantTiling(128, 128, False, 8, 5, 8)):
        yield (
            f"product bf16 by {tiling.block_m} x {tiling.block_n}",
            partial(_tiled, invariant, w, len(x), tiling),
            deep,
        )
    for stored in (INT8, E4M3):
        ops = quantized_ops_of(stored, fused=True, device=device, invariant=True)
        packed = ops.quantise(w)
        yield f"product {stored}", lambda given, ops=ops, w=packed: ops.product(ops.quantise(given), w), deep


def _product(invariant: Invariant, w: torch.Tensor, x: Rows) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return invariant.product(x, w)


def _tiled(invariant: Invariant, w: torch.Tensor, whole: int, tiling: InvariantTiling, x: Rows) -> torch.Tensor:
    """Parts by this tiling; all rows by the one that their number chooses."""
    assert isinstance(x, torch.Tensor)
    return invariant.product(x, w) if len(x) == whole else invariant_gemm(x, w, tiling=tiling)


def attentions(rows: int, device: str, *, small: bool) -> Iterator[tuple[str, Op, Rows]]:
    """Contexts of every length up to a few thousand tokens, in blocks without order."""
    heads, rank, rope, longest = (2, 32, 16, 300) if small else (16, 512, 64, 5000)
    width = -(-longest // 64)
    lengths = torch.randint(1, longest + 1, (rows,), device=device, dtype=torch.int32)
    table = torch.randint(0, 64, (rows, width), device=device, dtype=torch.int32)
    q = torch.randn(rows, 1, heads, rank + rope, device=device).bfloat16()
    kv = torch.randn(64, 64, rank + rope, device=device).bfloat16()

    def narrow(given: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With a table as wide as the longest of them needs."""
        queries, blocks, lens = given
        return queries, blocks[:, : -(-int(lens.max()) // 64)].contiguous(), lens

    def mla(given: Rows) -> torch.Tensor:
        queries, blocks, lens = narrow(given)
        return mla_decode(queries, kv, blocks, lens, 0.07, rank=rank, split_tokens=INVARIANT_SPLIT_TOKENS)

    yield "latent attention, decode", mla, (q, table, lengths)
    up = torch.randn(heads, 16 if small else 128, rank, device=device).bfloat16()

    def absorbed(given: Rows) -> torch.Tensor:
        assert isinstance(given, torch.Tensor)
        out = torch.empty(len(given), heads, up.shape[1], device=device, dtype=torch.bfloat16)
        Invariant.on(device).by_head(given[:, 0, :, :rank], up, out)
        return out

    yield "products by head", absorbed, q
    dim = 16 if small else 128
    pairs = torch.randn(64 * 64, 2 * 4 * dim, device=device).bfloat16()
    query = torch.randn(rows, 16, dim, device=device).bfloat16()

    def gqa(given: Rows) -> torch.Tensor:
        queries, blocks, lens = narrow(given)
        return gqa_decode(queries, pairs, blocks, lens, 0.09)

    yield "grouped-query attention, decode", gqa, (query, table, lengths)
