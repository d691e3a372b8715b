"""Latent prompt attention against float64: sequences of different starts and counts in one call, contexts gathered from
scattered pages that are full of poison elsewhere."""

import pytest
import torch

from oracle.gqa import assert_near, paged_kv
from tripool.kernels.cuda import rows as rows_module
from tripool.kernels.cuda.attention import mla_prompt_fused
from tripool.kernels.cuda.rows import DeviceRows
from tripool.kernels.ref.mla import mla_prompt
from tripool.kernels.sequence_rows import SequenceRows
from tripool.kernels.triton import mla_prefill as mla_prefill_module
from tripool.kernels.triton.mla_prefill import FEW_ROWS, Tiling, choose_tiling, mla_prefill

SCALE = 0.17
TILINGS = [Tiling(block_rows=16, num_warps=4), Tiling(block_rows=32, block_tokens=32), Tiling(block_tokens=128)]
MIXED = [(0, 70), (3, 1), (64, 65)]


def make(seqs, shape, device, *, first=0):
    """seqs: (start, count); shape: heads, nope, rope, v, rank. q is part of wider rows."""
    heads, nope, rope, v, rank = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    kv, table = paged_kv([start + count for start, count in seqs], rank + rope)
    laid, row = [], 0
    for (start, count), blocks in zip(seqs, table.tolist(), strict=True):
        laid.append(SequenceRows(row, count, start, blocks[: -(-(start + count) // 64)], first))
        row += count
    q = torch.randn(row, heads + 1, nope + rope)[:, :heads].to(dtype).to(device)
    up = (torch.randn(heads, nope + v, rank) / rank**0.5).to(dtype).to(device)
    return q, kv.to(dtype).to(device), laid, up


def run(q, kv, seqs, up, nope):
    device_rows = DeviceRows(seqs, None, torch.arange(len(q), device=q.device))
    out = torch.full((len(q), q.shape[1] * (up.shape[1] - nope)), float("nan"), dtype=q.dtype, device=q.device)
    mla_prompt_fused(q, kv, device_rows, up, nope, SCALE, out)
    return out


def wanted(q, kv, seqs, up, nope):
    return mla_prompt(q.double().cpu(), kv.double().cpu(), seqs, up.double().cpu(), nope, SCALE).to(up.device)


def check(seqs, shape, device, **more):
    inputs = make(seqs, shape, device, **more)
    assert_near(run(*inputs, shape[1]), wanted(*inputs, shape[1]))


@pytest.mark.parametrize("seqs", [[(0, 1)], [(0, 64)], MIXED, [(130, 33), (0, 5), (0, 16), (1, 17), (63, 1)]], ids=str)
@pytest.mark.parametrize("tiling", [None, *TILINGS], ids=["chosen", "16", "32", "128"])
def test_equals_float64(device, monkeypatch, seqs, tiling):
    if tiling:
        monkeypatch.setattr(mla_prefill_module, "choose_tiling", lambda *_: tiling)
    check(seqs, (3, 32, 16, 32, 24), device)


@pytest.mark.parametrize("shape", [(2, 16, 16, 16, 32), (1, 128, 64, 128, 64), (3, 24, 8, 40, 20)])
def test_shapes_of_heads(device, shape):
    check([(60, 9), (0, 21)], shape, device)


def test_the_first_slot_can_be_hidden(device):
    check([(1, 80), (150, 20), (1, 1)], (2, 16, 16, 32, 24), device, first=1)


def test_long_contexts_go_in_parts(device, monkeypatch):
    monkeypatch.setattr(rows_module, "MOST_GATHERED", 100)
    check([(0, 30), (20, 40), (64, 65), (0, 9), (0, 3)], (2, 16, 16, 16, 24), device)


def test_more_sequences_than_are_searched_at_once(device, monkeypatch):
    monkeypatch.setattr(mla_prefill_module, "SEQUENCES_AT_ONCE", 2)
    check([(i % 5, 1 + 9 * (i % 3)) for i in range(5)], (2, 16, 16, 16, 24), device)


def test_chunks_and_company_do_not_change_a_row(device, monkeypatch):
    monkeypatch.setattr(mla_prefill_module, "choose_tiling", lambda *_: TILINGS[0])
    (q, *_), tokens = make([(0, 190)], (2, 16, 16, 16, 24), device), 150
    expanded, rotated = torch.randn(190, 2, 32, device=device).to(q.dtype), torch.randn(190, 16, device=device)
    rotated = rotated.to(q.dtype)

    def attended(first, *lines):
        index = torch.tensor(lines, dtype=torch.int32, device=device)
        rows = slice(first, first + int(index[:, 1].sum()))
        return mla_prefill(q[rows], expanded, rotated, index, SCALE, nope=16)

    both = attended(0, (0, tokens, 0, 0), (tokens, 40, 0, tokens))
    for start, stop in ((0, 37), (37, 101), (101, tokens)):
        assert torch.equal(attended(start, (0, stop - start, start, 0)), both[start:stop])


def test_few_rows_are_cut_finer():
    assert choose_tiling(256, 1, 16) == FEW_ROWS
    assert choose_tiling(2048, 8, 16) == choose_tiling(4096, 1, 128) == Tiling()
