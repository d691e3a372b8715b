"""Latent attention as it is trained: keys and values written out for every token, documents in a row kept apart.

Two ways to attend, the same numbers. `MASKED` runs anywhere and looks at a whole row for each token. `by_documents`
gives the device one sequence per document (flash attention over lengths): rows of short documents then cost what the
documents cost. Rotation is by the place in the row: only differences of places have a meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tripool.models.arch import Arch, MlaShape


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, out: bool = False) -> None:
        """`out`: writes into the residual stream, and starts smaller."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.out = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Norm(nn.Module):
    """RMS norm, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps) * self.weight


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""q and k [rows, row_tokens, heads, qk], v [rows, row_tokens, heads, v], sight, scale -> [rows, row_tokens, heads, v].

`sight` says that a token may look at earlier tokens of its own document, in the form that this way of attending reads.
"""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to attend, with the maker of what it reads from `documents` [rows, row_tokens]."""

    name: str
    attend: Attend
    sight: Callable[[torch.Tensor], torch.Tensor]


def masked_sight(documents: torch.Tensor) -> torch.Tensor:
    """bool [rows, 1, row_tokens, row_tokens]. What fills a row up counts as a document, so no token sees nothing."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (documents[:, None, :] == documents[:, :, None]).logical_and_(causal)[:, None]


def document_starts(documents: torch.Tensor, most: int) -> torch.Tensor:
    """int32 [most + 1]: where each document begins in the rows laid end to end; what is left over are empty ones, so
    that every step has the same shapes."""
    rows, length = documents.shape
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    numbers = begins.flatten().cumsum(0) - 1
    starts = torch.full((most + 2,), rows * length, dtype=torch.int32, device=documents.device)
    places = torch.arange(rows * length, dtype=torch.int32, device=documents.device)
    # Tokens that begin nothing write to a place that is then cut off: no count has to come back from the device.
    starts[torch.where(begins.flatten(), numbers.clamp(max=most), most + 1)] = places
    starts[most] = rows * length
    return starts[: most + 1]


def attend_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sight, scale=scale).transpose(1, 2)


MASKED = Way("masked rows", attend_masked, masked_sight)


def by_documents(most: int, longest: int) -> Way:
    """On CUDA in 16 bits only. `most`: documents in the rows of a pass, with what fills each row up; `longest`: tokens
    of one of them."""
    from torch.nn.attention.varlen import varlen_attn

    newer = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if newer else {"is_causal": True}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: torch.Tensor, scale: float) -> torch.Tensor:
        """The kernel has one width for all and its own scale: values are filled up, queries adjusted."""
        rows, length, heads, width = q.shape
        own = scale * width**0.5
        q = q if abs(own - 1) < 1e-6 else q * own
        q, k, v_wide = (one.flatten(0, 1).contiguous() for one in (q, k, F.pad(v, (0, width - v.shape[-1]))))
        out = varlen_attn(q, k, v_wide, sight, sight, longest, longest, **causal)
        assert isinstance(out, torch.Tensor)
        return out.view(rows, length, heads, width)[..., : v.shape[-1]]

    return Way("one sequence per document", attend, lambda documents: document_starts(documents, most))


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [rows, row_tokens, heads, dim], neighbours turned together; cos and sin [row_tokens, 1, dim / 2]."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return turned.flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    """Returns what the attention sublayer adds to the stream; adds nothing itself."""

    def __init__(self, arch: Arch, attend: Attend) -> None:
        super().__init__()
        shape = arch.attention
        assert isinstance(shape, MlaShape), "see `trainable`"
        self.shape, self._attend = shape, attend
        query_in = arch.hidden
        if shape.q_rank is not None:
            self.q_a_proj = Linear(arch.hidden, shape.q_rank)
            self.q_a_layernorm = Norm(shape.q_rank, shape.norm_eps)
            query_in = shape.q_rank
        self.queries = Linear(query_in, shape.heads * (shape.nope + shape.rope))
        self.kv_a_proj_with_mqa = Linear(arch.hidden, shape.kv_rank + shape.rope)
        self.kv_a_layernorm = Norm(shape.kv_rank, shape.norm_eps)
        self.kv_b_proj = Linear(shape.kv_rank, shape.heads * (shape.nope + shape.v))
        self.o_proj = Linear(shape.heads * shape.v, arch.hidden, out=True)

    def forward(self, x: torch.Tensor, sight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        q_in = x if shape.q_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        q = self.queries(q_in).unflatten(-1, (shape.heads, -1))
        q_nope, q_rope = q.split([shape.nope, shape.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.kv_rank, shape.rope], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (shape.heads, -1))
        k_nope, v = expanded.split([shape.nope, shape.v], -1)
        k_rope = turn(k_rope[..., None, :], cos, sin).expand(-1, -1, shape.heads, -1)
        q = torch.cat((q_nope, turn(q_rope, cos, sin)), -1)
        k = torch.cat((k_nope, k_rope), -1)
        out: torch.Tensor = self.o_proj(self._attend(q, k, v, sight, shape.scale).flatten(-2))
        return out
