"""Prompt attention in tiles of 64 aligned positions.

A tile's products have shapes that depend on its place in the sequence only, and a row sits in the same slot of the same
tile however the prompt was cut into chunks. Rows of a tile that are not in the span are zeros and are thrown away.
"""

import torch

from tripool.core import BLOCK_TOKENS
from tripool.kernels.spans import Span, context


def attend_prompt(q: torch.Tensor, kv: torch.Tensor, spans: list[Span], kv_heads: int, scale: float) -> torch.Tensor:
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads, dim)
    for span in spans:
        keys, values = padded_context(kv, span).view(-1, 2, kv_heads, dim).unbind(1)
        attend_tiles(q, keys, values, span, scale, out)
    return out.view(rows, heads * dim)


def padded_context(kv: torch.Tensor, span: Span) -> torch.Tensor:
    """Positions 0 .. the end of the span's last tile; what nobody has written is zero, not what was there before."""
    seen = context(kv, span)
    whole = torch.zeros(-(-span.stop // BLOCK_TOKENS) * BLOCK_TOKENS, kv.shape[1])
    whole[span.first : span.stop] = seen
    return whole


def attend_tiles(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, scale: float, out: torch.Tensor
) -> None:
    """q [rows, heads, k]; keys [tokens, kv_heads, k]; values [tokens, kv_heads, v]; fills the span's rows of out."""
    _, heads, width = q.shape
    kv_heads = keys.shape[1]
    keys_t, values_t = keys.permute(1, 2, 0), values.transpose(0, 1)
    future = torch.full((BLOCK_TOKENS, BLOCK_TOKENS), float("-inf")).triu_(1)
    for tile in range(span.start // BLOCK_TOKENS, -(-span.stop // BLOCK_TOKENS)):
        begin, end = tile * BLOCK_TOKENS, (tile + 1) * BLOCK_TOKENS
        low, high = max(begin, span.start), min(end, span.stop)
        rows = slice(span.row + low - span.start, span.row + high - span.start)
        slots = slice(low - begin, high - begin)
        queries = torch.zeros(heads, BLOCK_TOKENS, width)
        torch.mul(q[rows].transpose(0, 1), scale, out=queries[:, slots])
        scores = torch.bmm(queries.view(kv_heads, -1, width), keys_t[:, :, :end])
        scores.view(heads, BLOCK_TOKENS, end)[..., begin:].add_(future)
        scores[..., : span.first] = float("-inf")
        attended = torch.bmm(scores.softmax(-1), values_t[:, :end]).view(heads, BLOCK_TOKENS, -1)
        out[rows] = attended[:, slots].transpose(0, 1)
