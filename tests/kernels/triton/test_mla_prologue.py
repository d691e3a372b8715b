"""The steps before latent attention against plain torch: ugly widths, padding rows, a cache full of poison."""

import pytest
import torch

from tripool.kernels.ref import paged
from tripool.kernels.triton.mla_prologue import mla_prologue, rope_queries


def make(rows, q_rank, rank, rope, device, dtype=torch.bfloat16):
    cos_sin = torch.polar(torch.ones(300, rope // 2), torch.randn(300, rope // 2))
    slots = torch.randperm(5 * 64)[:rows]
    slots[1::4] = -1
    data = {
        "down": torch.randn(rows, q_rank + rank + rope).to(dtype) * 3,
        "q_gain": torch.rand(q_rank).to(dtype) + 0.5 if q_rank else None,
        "kv_gain": torch.rand(rank).to(dtype) + 0.5,
        "cos_sin": cos_sin,
        "positions": torch.randint(0, 300, (rows,)),
        "slot_mapping": slots,
        "kv_blocks": torch.full((5, 64, rank + rope), float("nan"), dtype=dtype),
    }
    return {name: None if tensor is None else tensor.to(device) for name, tensor in data.items()}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("rows", "q_rank", "rank", "rope"), [(1, 24, 16, 8), (5, 1536, 512, 64), (9, 33, 20, 6), (0, 24, 16, 8)]
)
def test_prologue_equals_plain_torch(device, rows, q_rank, rank, rope, int8):
    ours = make(rows, q_rank, rank, rope, device)
    plain = {name: tensor.clone() for name, tensor in ours.items()}
    q, scales = mla_prologue(**ours, q_eps=1e-6, kv_eps=1e-5, int8=int8)
    expected, expected_scales = paged.mla_prologue(**plain, q_eps=1e-6, kv_eps=1e-5, int8=int8)
    assert q.dtype == expected.dtype and q.shape == expected.shape
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
    if int8:
        # A value that lies between two steps may go either way by the last bit of the norm.
        assert (q.int() - expected.int()).abs().le(1).all() and (q != expected).float().sum() <= 1 + q.numel() / 1000
    else:
        torch.testing.assert_close(q, expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(ours["kv_blocks"], plain["kv_blocks"], rtol=1e-2, atol=1e-3, equal_nan=True)


def test_model_without_a_query_rank(device):
    ours = make(3, 0, 16, 8, device)
    plain = {name: None if tensor is None else tensor.clone() for name, tensor in ours.items()}
    q, scales = mla_prologue(**ours, q_eps=1e-6, kv_eps=1e-6, int8=False)
    paged.mla_prologue(**plain, q_eps=1e-6, kv_eps=1e-6, int8=False)
    assert q.shape == (3, 0) and len(scales) == 0
    torch.testing.assert_close(ours["kv_blocks"], plain["kv_blocks"], rtol=1e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(("heads", "rope"), [(3, 8), (16, 6)])
def test_queries_that_are_ready_are_rotated_in_place(device, heads, rope):
    ours, q = make(5, 0, 16, rope, device), torch.randn(5, 9 + heads * (10 + rope), device=device).bfloat16()
    cos_sin, positions = ours["cos_sin"], ours["positions"]
    views = [one[:, 9:].unflatten(1, (heads, -1))[..., 10:] for one in (q, q.clone())]
    whole = views[1]._base
    paged.rope_queries(views[1].clone(), cos_sin, positions, views[1])
    mla_prologue(**ours, q_eps=1e-6, kv_eps=1e-6, int8=False, q_rope=views[0])
    torch.testing.assert_close(q, whole, rtol=1e-2, atol=1e-3)


def test_rows_of_zeros_round_to_zeros(device):
    ours = make(2, 24, 16, 8, device)
    ours["down"].zero_()
    q, scales = mla_prologue(**ours, q_eps=1e-6, kv_eps=1e-6, int8=True)
    assert q.eq(0).all() and scales.isfinite().all()


@pytest.mark.parametrize(("rows", "heads", "rope"), [(1, 128, 64), (5, 3, 6), (4, 33, 8), (0, 4, 8)])
def test_rope_queries_touches_its_columns_only(device, rows, heads, rope):
    cos_sin = torch.polar(torch.ones(50, rope // 2), torch.randn(50, rope // 2)).to(device)
    positions = torch.randint(0, 50, (rows,), device=device)
    q = torch.randn(rows, heads, 10 + rope, device=device).bfloat16()
    ours = torch.full((rows, heads, 7 + rope), float("nan"), dtype=torch.bfloat16, device=device)
    plain = ours.clone()
    rope_queries(q[..., 10:], cos_sin, positions, ours[..., 7:])
    paged.rope_queries(q[..., 10:], cos_sin, positions, plain[..., 7:])
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-3, equal_nan=True)
