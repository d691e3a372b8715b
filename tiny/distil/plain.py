"""What a decode step of the teacher is made of, in plain torch: runs anywhere, and is what the Triton kernels must do.

Same signatures as `gqa_decode.py` and `draw.py`.
"""

from __future__ import annotations

import torch


def turn(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x [..., dim]; element i turns with i + dim / 2. cosines, sines [..., dim / 2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1).to(x.dtype)


def turn_and_store(
    qkv: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    rows, kv_heads, _, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    parts = qkv.view(rows, -1, dim)
    cosines, sines = (table[places][:, None] for table in turns)
    parts[:, : heads + kv_heads] = turn(parts[:, : heads + kv_heads], cosines, sines)
    every = torch.arange(rows, device=qkv.device)
    keys[every, :, places] = parts[:, heads : heads + kv_heads]
    values[every, :, places] = parts[:, heads + kv_heads :]


def attend(qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    rows, kv_heads, _, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    num_places = max(1, int(counts.max()))  # what nobody has filled is not read
    keys, values = keys[:, :, :num_places], values[:, :, :num_places]
    queries = qkv[:, : heads * dim].reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = queries.float() @ keys.float().transpose(2, 3) * dim**-0.5
    inside = torch.arange(num_places, device=qkv.device) < counts[:, None]
    weights = scores.masked_fill(~inside[:, None, None], float("-inf")).softmax(dim=-1)
    weights = weights.masked_fill(counts[:, None, None, None] == 0, 0.0)
    attended: torch.Tensor = weights @ values.float()
    return attended.reshape(rows, heads * dim).to(qkv.dtype)


def draw(
    logits: torch.Tensor,
    seen: torch.Tensor,
    temperatures: torch.Tensor,
    seed: torch.Tensor,
    *,
    penalty: float,
    log_min_p: float,
) -> torch.Tensor:
    """`seed` is this step's own number, so that a run can be repeated."""
    scores = logits.float()
    scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    floor = scores.amax(dim=1, keepdim=True) + temperatures[:, None] * log_min_p
    noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(int(seed)))
    gumbel = -torch.log(-torch.log(noise.to(scores.device).clamp(1e-7, 1 - 1e-6)))
    noisy = scores + temperatures[:, None] * gumbel
    return noisy.masked_fill(scores < floor, float("-inf")).argmax(dim=1)
