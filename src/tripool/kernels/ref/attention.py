"""Grouped-query attention over a paged cache. One cache row holds all keys of a token, then all its values.

q [rows, heads, dim]; kv [slots, 2 * kv_heads * dim]; result [rows, heads * dim]. Query heads share a key head in groups
of heads / kv_heads. Prompt form and decode form are the same here; fast tables distinguish them.
"""

import torch

from tripool.kernels.sequence_rows import SequenceRows, context, visible


def attend(q: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], kv_heads: int, scale: float) -> torch.Tensor:
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for seq in seqs:
        keys, values = context(kv, seq).view(-1, 2, kv_heads, q.shape[2]).unbind(1)
        group = q.shape[1] // kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("rhd,thd->hrt", q[seq.rows], keys) * scale
        weights = scores.masked_fill(~visible(seq), float("-inf")).softmax(-1)
        out[seq.rows] = torch.einsum("hrt,thd->rhd", weights, values).flatten(1)
    return out


attend_prompt = attend_decode = attend
