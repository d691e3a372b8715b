"""Grouped-query attention with torch's fused kernel.

Decode form: one row at a time, with the query heads that share a key head as the rows of the fused kernel, so that the
shapes do not depend on the rest of the batch. Prompt form: one sequence at a time under a causal mask.
"""

import torch
import torch.nn.functional as F

from tripool.kernels.sequence_rows import SequenceRows, context, visible


def attend_prompt(
    q: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], kv_heads: int, scale: float
) -> torch.Tensor:
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads, dim, dtype=q.dtype)
    for seq in seqs:
        keys, values = context(kv, seq).view(1, -1, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
        whole = seq.start == seq.first
        attended = F.scaled_dot_product_attention(
            q[None, seq.rows].transpose(1, 2),
            keys,
            values,
            attn_mask=None if whole else visible(seq),
            is_causal=whole,
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
        out[seq.rows] = attended[0].transpose(0, 1)
    return out.flatten(1)


def attend_decode(
    q: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], kv_heads: int, scale: float
) -> torch.Tensor:
    rows, heads, dim = q.shape
    out = torch.empty(rows, kv_heads, heads // kv_heads, dim, dtype=q.dtype)
    q = q.view(rows, kv_heads, heads // kv_heads, dim)
    for seq in seqs:
        keys, values = context(kv, seq).view(1, -1, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
        for i in range(seq.count):
            row, seen = seq.row + i, seq.start + i + 1 - seq.first
            query = q[row : row + 1]
            out[row] = F.scaled_dot_product_attention(query, keys[:, :, :seen], values[:, :, :seen], scale=scale)[0]
    return out.view(rows, heads * dim)
