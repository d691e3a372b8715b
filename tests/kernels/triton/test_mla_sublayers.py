"""The latent attention sublayer in 16 bits and in INT8: with Triton kernels and without."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tripool.engine.runner import batch_of
from tripool.kernels.cuda.arithmetic import quantized_ops_of
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.weights import INT8, LatentWeights, Norm
from tripool.sequence import Work

HIDDEN, HEADS, NOPE, ROPE, V, RANK, Q_RANK, BLOCKS = 48, 3, 16, 16, 32, 32, 40, 12


def stored(*shape: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight that is eight bits times a scale for each row, and the scales."""
    scales = torch.rand(shape[0]) * 0.002 + 0.002
    return (torch.randint(-127, 128, shape) * scales[:, None]).bfloat16().to(device), scales.to(device)


def gain(width: int, device: str) -> Norm:
    return Norm((torch.rand(width) + 0.5).bfloat16().to(device), 1e-5)


def make(device: str, q_rank: int) -> LatentWeights:
    down, down_scales = stored(q_rank + RANK + ROPE, HIDDEN, device=device)
    query, query_scales = stored(HEADS * (NOPE + ROPE), q_rank or HIDDEN, device=device)
    out, out_scales = stored(HIDDEN, HEADS * V, device=device)
    up = (torch.randn(HEADS, NOPE + V, RANK) / RANK**0.5).bfloat16().to(device)
    core = MlaWeights(
        query=query, up=up, out=out, out_bias=None, nope=NOPE, scale=0.2,
        query_scales=query_scales, out_scales=out_scales,
    )  # fmt: skip
    return LatentWeights(
        norm=gain(HIDDEN, device), down=down, down_bias=None, q_norm=gain(q_rank, device) if q_rank else None,
        kv_norm=gain(RANK, device), core=core, down_scales=down_scales,
    )  # fmt: skip


def works(first: int) -> list[Work]:
    """Two whole prompts, a chunk of a third, decode pieces of one and of two rows."""
    return [
        Work([1] * 70, first, [3, 7], False), Work([1] * 9, first, [1], False), Work([1] * 20, 60, [4, 0], False),
        Work([1], 130, [9, 2, 5], True), Work([1, 1], 40, [8], True),
    ]  # fmt: skip


PROVED = {(1, 0, False), (0, 0, True), (1, Q_RANK, True), (0, Q_RANK, False)}
"""Of mixed rows: every two settings meet in those that are left."""
CASES = [
    pytest.param(part, first, q_rank, int8, marks=[pytest.mark.prove] * (name == "mixed" and proved), id=case)
    for name, part in (("mixed", slice(None)), ("two rows", slice(4, 5)))
    for first, q_rank, int8 in product((0, 1), (0, Q_RANK), (False, True))
    for proved, case in [((first, q_rank, int8) in PROVED, f"{name}-{first}-{q_rank}-{'int8' if int8 else 'bf16'}")]
]


@pytest.mark.parametrize(("part", "first", "q_rank", "int8"), CASES)
def test_attention(device: str, part: slice, first: int, q_rank: int, int8: bool) -> None:
    weights, x = make(device, q_rank), torch.randn(200, HIDDEN).bfloat16()
    kv, angles = torch.randn(BLOCKS * 64, RANK + ROPE).bfloat16(), torch.randn(200, ROPE // 2)
    results = []
    for fused in (False, True):
        quantized = quantized_ops_of(INT8, fused=fused, device=device) if int8 else None
        table = cuda_table(torch.bfloat16, fused=fused, quantized=quantized, store=OnDevice(device))
        batch, _ = batch_of(works(first)[part], first=first)
        rows = batch.num_rows
        batch.tokens, batch.slot_mapping = batch.tokens.to(device), batch.slot_mapping.to(device)
        batch.cos_sin = torch.polar(torch.ones(rows, ROPE // 2), angles[:rows]).to(device)
        stream, cache = x[:rows].to(device, copy=True), kv.to(device, copy=True)
        table.mla(weights)(stream, batch, cache)
        results.append((stream, cache))
    for ours, plain in zip(results[1], results[0], strict=True):
        error = (ours.double() - plain.double()).norm() / plain.double().norm()
        assert ours.isfinite().all() and error < 0.02, error
    moved = (results[0][0].double() - x[:rows].to(device).double()).norm()
    assert moved > results[0][0].double().norm() / 20, "the sublayer adds something that can be seen"
    written = [(cache != kv.to(device)).any(1) for _, cache in results]
    assert torch.equal(*written), "other slots were written"
