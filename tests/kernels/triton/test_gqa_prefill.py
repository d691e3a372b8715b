"""Paged grouped-query prompt attention against float64: sequences of different starts and counts in one call."""

import pytest
import torch

from oracle.gqa import assert_near, attended, paged_kv
from tripool.kernels.triton import gqa_prefill as gqa_prefill_module
from tripool.kernels.triton.gqa_prefill import FEW_ROWS, Tiling, choose_tiling, gqa_prefill

SCALE = 0.17
TILINGS = [Tiling(block_rows=16, num_warps=4), Tiling(block_rows=32, block_tokens=32), Tiling(block_tokens=128)]


def make(seqs, heads, kv_heads, dim, device, *, first=0):
    """seqs: (start, count). q is part of wider rows, as it is in the qkv product."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kv, table = paged_kv([start + count for start, count in seqs], 2 * kv_heads * dim)
    counts = torch.tensor([count for _, count in seqs])
    columns = [
        counts.cumsum(0) - counts,
        counts,
        torch.tensor([start for start, _ in seqs]),
        torch.full_like(counts, first),
    ]
    index = torch.cat((torch.stack(columns, 1).int(), table), 1)
    q = torch.randn(int(counts.sum()), heads + 3, dim)[:, :heads]
    return [tensor.to(device) for tensor in (q.to(dtype), kv.to(dtype), index)]


def run(inputs, **more):
    q = inputs[0]
    out = torch.full((len(q), q.shape[1] * q.shape[2]), float("nan"), dtype=q.dtype, device=q.device)
    assert gqa_prefill(*inputs, SCALE, out=out, **more) is out
    return out


def wanted(inputs, *, window=None):
    q, kv, index = inputs
    parts = []
    for row, count, start, first, *_ in index.tolist():
        blocks = index[len(parts), 4:]
        parts.append(attended(q[row : row + count], kv, blocks, start, SCALE, first=first, window=window))
    return torch.cat(parts)


@pytest.mark.parametrize(
    "seqs", [[(0, 1)], [(0, 64)], [(0, 70), (3, 1), (64, 65)], [(130, 33), (0, 5), (0, 16), (1, 17), (63, 1)]], ids=str
)
@pytest.mark.parametrize("tiling", [None, *TILINGS], ids=["chosen", "16", "32", "128"])
def test_equals_float64(device, seqs, tiling):
    inputs = make(seqs, 6, 2, 32, device)
    assert_near(run(inputs, tiling=tiling), wanted(inputs))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (8, 1, 128), (7, 1, 24), (2, 1, 256), (70, 1, 16)])
def test_shapes_of_heads(device, heads, kv_heads, dim):
    inputs = make([(60, 9), (0, 21)], heads, kv_heads, dim, device)
    assert_near(run(inputs), wanted(inputs))


def test_more_sequences_than_are_searched_at_once(device, monkeypatch):
    monkeypatch.setattr(gqa_prefill_module, "SEQUENCES_AT_ONCE", 2)
    inputs = make([(i % 5, 1 + 9 * (i % 3)) for i in range(5)], 2, 1, 16, device)
    assert_near(run(inputs, tiling=TILINGS[0]), wanted(inputs))


@pytest.mark.parametrize(("first", "window"), [(1, None), (0, 5), (0, 70), (1, 40)])
def test_first_visible_position_and_sliding_window(device, first, window):
    inputs = make([(1, 80), (150, 20), (1, 1)], 4, 2, 16, device, first=first)
    for tiling in TILINGS:
        assert_near(run(inputs, low=True, window=window, tiling=tiling), wanted(inputs, window=window))


def test_chunks_and_company_do_not_change_a_row(device):
    q, kv, index = make([(0, 150), (0, 40)], 4, 2, 16, device)
    whole = run((q, kv, index), tiling=TILINGS[0])
    for start, stop in ((0, 37), (37, 101), (101, 150)):
        piece = index[:1].clone()
        piece[0, :3] = torch.tensor([0, stop - start, start], dtype=torch.int32)
        assert torch.equal(run((q[start:stop], kv, piece), tiling=TILINGS[0]), whole[start:stop])


def test_no_rows(device):
    q, kv, index = make([(0, 1)], 4, 2, 16, device)
    assert gqa_prefill(q[:0], kv, index[:0], SCALE).shape == (0, 64)


def test_few_rows_are_cut_finer():
    assert choose_tiling(256, 1, 32, 8, 128) == FEW_ROWS
    assert choose_tiling(4096, 1, 32, 8, 128) == choose_tiling(64 * 256, 64, 32, 4, 128) == Tiling()
