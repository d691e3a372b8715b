"""Latent attention with 8-bit weights.

Prompt form: queries, expanded keys and values are ordinary products. Decode form: the step between a query and the
latent space is folded into the query weights, and the step back into the output weights, so that decoding needs no
product per head. That costs a second set of the two weights, in 8 bits.
"""

import torch
import torch.nn.functional as F

from tripool.kernels.cpu.elementwise import rope_
from tripool.kernels.cpu8.attention import attend_tiles, padded_context
from tripool.kernels.cpu8.linear import Linear8
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.spans import Span, context


class Mla8:
    def __init__(self, weights: MlaWeights) -> None:
        up, nope = weights.up, weights.nope
        self._heads, self._rank, self._nope, self._scale = up.shape[0], up.shape[2], nope, weights.scale
        query = weights.query.view(self._heads, -1, weights.query.shape[1])
        key_up, value_up = up[:, :nope], up[:, nope:]
        folded = torch.cat((torch.bmm(key_up.transpose(1, 2), query[:, :nope]), query[:, nope:]), dim=1)
        out = weights.out.view(len(weights.out), self._heads, -1).transpose(0, 1)
        folded_out = torch.bmm(out, value_up).transpose(0, 1)
        self._query, self._expand = Linear8(weights.query), Linear8(up.flatten(0, 1))
        self._out = Linear8(weights.out, weights.out_bias)
        self._query_folded = Linear8(folded.flatten(0, 1))
        self._out_folded = Linear8(folded_out.flatten(1), weights.out_bias)

    @property
    def num_bytes(self) -> int:
        parts = (self._query, self._expand, self._out, self._query_folded, self._out_folded)
        return sum(part.num_bytes for part in parts)

    def prompt(self, x: torch.Tensor, kv: torch.Tensor, spans: list[Span], turns: torch.Tensor) -> torch.Tensor:
        q = self._query(x).view(len(x), self._heads, -1)
        rope_(q[..., self._nope :], turns)
        width = q.shape[2]
        out = None
        for span in spans:
            rows = padded_context(kv, span)
            expanded = self._expand(rows[:, : self._rank]).view(len(rows), self._heads, -1)
            keys = torch.empty(len(rows), self._heads, width)
            keys[..., : self._nope] = expanded[..., : self._nope]
            keys[..., self._nope :] = rows[:, None, self._rank :]
            values = expanded[..., self._nope :]
            out = torch.empty(len(x), self._heads, values.shape[2]) if out is None else out
            attend_tiles(q, keys, values, span, self._scale, out)
        assert out is not None
        return self._out(out.flatten(1))

    def decode(self, x: torch.Tensor, kv: torch.Tensor, spans: list[Span], turns: torch.Tensor) -> torch.Tensor:
        q = self._query_folded(x).view(len(x), 1, self._heads, -1)
        rope_(q[:, 0, :, self._rank :], turns)
        latent = torch.empty(len(x), self._heads, self._rank)
        for span in spans:
            seen = context(kv, span)[None, None]
            for i in range(span.count):
                row, part = span.row + i, seen[:, :, : span.start + i + 1 - span.first]
                attended = F.scaled_dot_product_attention(q[row : row + 1], part, part, scale=self._scale)
                latent[row] = attended[0, 0, :, : self._rank]
        return self._out_folded(latent.flatten(1))
