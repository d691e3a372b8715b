"""Grouped-query attention over scattered pages: inputs with poison where nothing may be read, and float64 results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PAGE = 64


def paged_kv(lengths: Sequence[int], width: int, *, poison: float = float("nan")) -> tuple[torch.Tensor, torch.Tensor]:
    """kv [slots, width] and its block table: pages in shuffled order; slots that no sequence sees, and table entries
    past a length, hold poison."""
    need = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(need) + 3).tolist()
    kv = torch.full((len(order) * PAGE, width), poison)
    table = torch.full((len(lengths), max(*need, 1) + 1), 10**6, dtype=torch.int32)
    for b, length in enumerate(lengths):
        table[b, : need[b]] = torch.tensor([order.pop() for _ in range(need[b])], dtype=torch.int32)
        kv[slots_of(table[b], length)] = torch.randn(length, width)
    return kv, table


def slots_of(blocks: torch.Tensor, length: int) -> torch.Tensor:
    positions = torch.arange(length, device=blocks.device)
    return blocks[positions // PAGE].long() * PAGE + positions % PAGE


def attended(
    q: torch.Tensor, kv: torch.Tensor, blocks: torch.Tensor, start: int, scale: float, *, first: int = 0,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows q [rows, heads, dim] of one sequence at positions `start` .. -> float64 [rows, heads * dim]; rows that see
    nothing get zeros."""
    rows, heads, dim = q.shape
    kv_heads = kv.shape[1] // (2 * dim)
    seen = kv[slots_of(blocks, max(0, start + rows))].double().unflatten(1, (2, kv_heads, dim))
    keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in seen.unbind(1))
    at, tokens = torch.arange(start, start + rows)[:, None], torch.arange(len(seen))
    visible = (tokens <= at) & (tokens >= first) & (at - tokens < (window or 10**9))
    scores = torch.einsum("rhd,thd->hrt", q.double(), keys) * scale
    weights = scores.masked_fill(~visible.to(q.device), float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hrt,thd->rhd", weights, values).flatten(1)


def assert_near(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """In the norm: 16-bit inputs of the products round the weights of the softmax."""
    assert ours.shape == wanted.shape and not ours.isnan().any()
    error = float((ours.double() - wanted).norm() / max(float(wanted.norm()), 1e-30))
    assert error < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[ours.dtype], error
