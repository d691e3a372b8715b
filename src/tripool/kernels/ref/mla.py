"""Multi-head latent attention over a paged latent cache, in its two forms.

A cache row is a token's latent (`rank` wide, normed) followed by its rotary key (shared by all heads). `up` [heads,
nope + v, rank] maps a latent to a head's key and value. Expanded form: apply it to every token of the context, then
attend as usual; best when many queries share the context. Absorbed form: map the query into the latent space and attend
there; best with one query per sequence, because the context is then read once, as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tripool.kernels.ref.linear import Linear
from tripool.kernels.ref.rope import rope_
from tripool.kernels.sequence_rows import SequenceRows, context, visible


def mla_prompt(
    q: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], up: torch.Tensor, nope: int, scale: float
) -> torch.Tensor:
    """Expanded. q [rows, heads, nope + rope]; kv [slots, rank + rope]; result [rows, heads * v]."""
    rank, v = up.shape[2], up.shape[1] - nope
    out = torch.empty(q.shape[0], q.shape[1] * v, dtype=q.dtype, device=q.device)
    for seq in seqs:
        latent, k_rope = context(kv, seq).split([rank, kv.shape[1] - rank], dim=1)
        k_nope, values = torch.einsum("tr,hdr->htd", latent, up).split([nope, v], dim=2)
        q_nope, q_rope = q[seq.rows].split([nope, k_rope.shape[1]], dim=2)
        scores = torch.einsum("rhd,htd->hrt", q_nope, k_nope) + torch.einsum("rhd,td->hrt", q_rope, k_rope)
        weights = (scores * scale).masked_fill(~visible(seq), float("-inf")).softmax(-1)
        out[seq.rows] = torch.einsum("hrt,htd->rhd", weights, values).flatten(1)
    return out


def mla_decode(
    q: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], up: torch.Tensor, nope: int, scale: float
) -> torch.Tensor:
    """Absorbed. Same arguments and result."""
    rank, v = up.shape[2], up.shape[1] - nope
    key_up, value_up = up.split([nope, v], dim=1)
    out = torch.empty(q.shape[0], q.shape[1] * v, dtype=q.dtype, device=q.device)
    for seq in seqs:
        rows = context(kv, seq)
        q_nope, q_rope = q[seq.rows].split([nope, kv.shape[1] - rank], dim=2)
        q_latent = torch.cat((torch.einsum("rhd,hdk->rhk", q_nope, key_up), q_rope), dim=2)
        scores = torch.einsum("rhk,tk->hrt", q_latent, rows) * scale
        weights = scores.masked_fill(~visible(seq), float("-inf")).softmax(-1)
        latent = torch.einsum("hrt,tk->hrk", weights, rows[:, :rank])
        out[seq.rows] = torch.einsum("hrk,hdk->rhd", latent, value_up).flatten(1)
    return out


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """Weights between a layer's query input and its output."""

    query: torch.Tensor  # [heads * (nope + rope), input]
    up: torch.Tensor  # [heads, nope + v, rank]
    out: torch.Tensor  # [hidden, heads * v]
    out_bias: torch.Tensor | None
    nope: int
    scale: float
    query_scales: torch.Tensor | None = None  # see `kernels/weights.py`
    up_scales: torch.Tensor | None = None  # [heads, nope + v]
    out_scales: torch.Tensor | None = None


class Mla:
    """From query input to attention output, in either form. A kernel table may pack the weights differently for
    each.
    """

    def __init__(
        self,
        weights: MlaWeights,
        linear: Callable[[torch.Tensor, torch.Tensor | None], Linear] = Linear,
        apply_rope_: Callable[[torch.Tensor, torch.Tensor], None] = rope_,
        attend_prompt: Callable[..., torch.Tensor] = mla_prompt,
        attend_decode: Callable[..., torch.Tensor] = mla_decode,
    ) -> None:
        self._up, self._nope, self._scale = weights.up, weights.nope, weights.scale
        self._query = linear(weights.query, None)
        self._out = linear(weights.out, weights.out_bias)
        self._apply_rope_, self._attend_prompt, self._attend_decode = apply_rope_, attend_prompt, attend_decode

    def prompt(
        self, x: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """x [rows, input]; kv [slots, rank + rope], already holding these rows; result [rows, hidden]."""
        return self._out(self._attend_prompt(self._queries(x, cos_sin), kv, seqs, self._up, self._nope, self._scale))

    def decode(
        self, x: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], cos_sin: torch.Tensor
    ) -> torch.Tensor:
        return self._out(self._attend_decode(self._queries(x, cos_sin), kv, seqs, self._up, self._nope, self._scale))

    @property
    def num_bytes(self) -> int:
        return self._query.num_bytes + self._out.num_bytes + self._up.nbytes

    def _queries(self, x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        q = self._query(x).view(len(x), self._up.shape[0], -1)
        self._apply_rope_(q[..., self._nope :], cos_sin)
        return q
