"""Norms, rotation and cache write against the plain steps, with a poisoned cache and rows without a slot."""

import pytest
import torch

from tripool.kernels.cuda.elementwise import normed, rope_
from tripool.kernels.triton.rope_cache import rope_cache
from tripool.kernels.weights import Norm


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim"), [(1, 32, 8, 128), (5, 6, 2, 16), (3, 7, 1, 24), (0, 4, 2, 16)]
)
def test_equals_the_plain_steps(device, rows, heads, kv_heads, dim, dtype, norm):
    every = heads + 2 * kv_heads
    qkv = (torch.randn(rows, every * dim + 8) * 3).to(dtype).to(device)[:, : every * dim]
    cos_sin = torch.polar(torch.ones(rows, dim // 2), torch.randn(rows, dim // 2)).to(device)
    slots = torch.randperm(3 * 64)[:rows].to(device)
    slots[1::4] = -1
    kv = torch.full((3 * 64, 2 * kv_heads * dim), float("nan"), dtype=dtype, device=device)
    norms = [Norm((torch.rand(dim) + 0.5).to(dtype).to(device), eps) if norm else None for eps in (1e-5, 1e-6)]

    plain = qkv.to(torch.float32, copy=True).unflatten(1, (every, dim))
    if norm:
        plain[:, :heads] = normed(plain[:, :heads], norms[0])
        plain[:, heads : heads + kv_heads] = normed(plain[:, heads : heads + kv_heads], norms[1])
    rope_(plain[:, : heads + kv_heads], cos_sin)
    wanted = kv.clone()
    wanted[slots[slots >= 0]] = plain[:, heads:].flatten(1)[slots >= 0].to(dtype)

    q = rope_cache(qkv, cos_sin, slots, kv, heads=heads, kv_heads=kv_heads, q_norm=norms[0], k_norm=norms[1])
    bound = {"rtol": 1e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    assert q.shape == (rows, heads, dim) and q.data_ptr() == qkv.data_ptr()
    torch.testing.assert_close(q.float(), plain[:, :heads], **bound)
    torch.testing.assert_close(kv, wanted, equal_nan=True, **bound)
