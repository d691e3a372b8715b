"""Multi-head latent attention with torch's fused kernel, in both forms.

The fused kernel needs keys and values of one width. Expanded form: values are padded with zeros to the keys' width.
Absorbed form: cache rows serve as keys and as values, and the rotary part of the result is dropped.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from tripool.kernels.cpu.elementwise import rope_
from tripool.kernels.cpu.linear import Linear
from tripool.kernels.ref import mla
from tripool.kernels.sequence_rows import SequenceRows, context, visible
from tripool.kernels.weight_store import FRESH, WeightStore


def mla_prompt(
    q: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], up: torch.Tensor, nope: int, scale: float
) -> torch.Tensor:
    rows, heads, width = q.shape
    rank, v = up.shape[2], up.shape[1] - nope
    wide = max(width, v)
    out = torch.empty(rows, heads, v, dtype=q.dtype)
    for seq in seqs:
        latent, k_rope = context(kv, seq).split([rank, kv.shape[1] - rank], dim=1)
        tokens = len(latent)
        expanded = F.linear(latent, up.flatten(0, 1)).view(tokens, heads, nope + v)
        keys, values = q.new_zeros(2, tokens, heads, wide)
        keys[..., :nope] = expanded[..., :nope]
        keys[..., nope:width] = k_rope[:, None]
        values[..., :v] = expanded[..., nope:]
        queries = F.pad(q[seq.rows], (0, wide - width))
        whole = seq.start == seq.first
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=None if whole else visible(seq),
            is_causal=whole,
            scale=scale,
        )
        out[seq.rows] = attended[0, ..., :v].transpose(0, 1)
    return out.flatten(1)


def mla_decode(
    q: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], up: torch.Tensor, nope: int, scale: float
) -> torch.Tensor:
    rows, heads, _ = q.shape
    rank, v = up.shape[2], up.shape[1] - nope
    key_up, value_up = up.split([nope, v], dim=1)
    q_latent = torch.empty(rows, heads, kv.shape[1], dtype=q.dtype)
    q_latent[..., :rank] = torch.bmm(q[..., :nope].transpose(0, 1), key_up).transpose(0, 1)
    q_latent[..., rank:] = q[..., nope:]
    latent = torch.empty(rows, heads, rank, dtype=q.dtype)
    for seq in seqs:
        seen = context(kv, seq)[None, None]
        for i in range(seq.count):
            row, part = seq.row + i, seen[:, :, : seq.start + i + 1 - seq.first]
            attended = F.scaled_dot_product_attention(q_latent[None, None, row], part, part, scale=scale)
            latent[row] = attended[0, 0, :, :rank]
    return torch.bmm(latent.transpose(0, 1), value_up.transpose(1, 2)).transpose(0, 1).flatten(1)


class Mla(mla.Mla):
    def __init__(self, weights: mla.MlaWeights, store: WeightStore = FRESH) -> None:
        stored = replace(weights, up=store.keep("up", lambda: weights.up))
        super().__init__(stored, partial(Linear, store=store), rope_, mla_prompt, mla_decode)
