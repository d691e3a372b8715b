"""The 8-bit products of `kernels/cpu8` in plain torch: slow, the oracle of the C kernels."""

from __future__ import annotations

import torch

from tripool.kernels.cpu8.pack import GROUP, dequantise
from tripool.kernels.ops import REFERENCE_OPS, Ops
from tripool.kernels.ref import attention, mla
from tripool.kernels.ref.rope import rope_
from tripool.kernels.ref.swiglu import swiglu
from tripool.kernels.sequence_rows import SequenceRows


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise each row in groups of 64, to 127 steps either way of the group's largest value."""
    rows, width = x.shape
    padded = torch.zeros(rows, -(-width // GROUP) * GROUP, dtype=x.dtype)
    padded[:, :width] = x
    grouped = padded.view(rows, -1, GROUP)
    largest = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return ((grouped * (127 / largest)).round() * (largest / 127)).flatten(1)[:, :width]


class Linear8:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias, self.num_bytes = dequantise(weight), bias, weight.numel()

    def first(self, count: int) -> Linear8:
        return Linear8(self._weight[:count], None if self._bias is None else self._bias[:count])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = (round_rows(x).double() @ self._weight.double().T).float()
        return y if self._bias is None else y + self._bias


class Experts8:
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up, self._down = [Linear8(one) for one in gate_up], [Linear8(one) for one in down]
        self.num_bytes = gate_up.numel() + down.numel()

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = torch.empty(*experts.shape, x.shape[1])
        for expert in experts.unique().tolist():
            rows, choice = torch.where(experts == expert)
            parts[rows, choice] = self._down[expert](swiglu(self._gate_up[expert](x[rows])))
        return (parts * weights[..., None]).sum(1)


class Mla8:
    """Prompt form: the context expanded by an 8-bit product. Decode form: projections per head."""

    def __init__(self, weights: mla.MlaWeights) -> None:
        self._w = w = weights
        self._heads, _, self._rank = w.up.shape
        self._query, self._out, self._up = Linear8(w.query), Linear8(w.out, w.out_bias), Linear8(w.up.flatten(0, 1))
        self._to_latent = [Linear8(up[: w.nope].T) for up in w.up]
        self._from_latent = [Linear8(up[w.nope :]) for up in w.up]
        self.num_bytes = 0

    def prompt(
        self, x: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], cos_sin: torch.Tensor
    ) -> torch.Tensor:
        w, rank, heads = self._w, self._rank, self._heads
        q = self._query(x).view(len(x), heads, -1)
        rope_(q[..., w.nope :], cos_sin)
        slots = torch.zeros(len(kv), dtype=torch.bool)
        for seq in seqs:
            for p in range(seq.first, seq.stop):
                slots[seq.block_table[p // 64] * 64 + p % 64] = True
        expanded = torch.zeros(len(kv), heads, w.up.shape[1])
        expanded[slots] = self._up(kv[slots, :rank]).view(-1, heads, w.up.shape[1])
        keys = torch.cat((expanded[..., : w.nope], kv[:, None, rank:].expand(-1, heads, -1)), dim=2)
        values = expanded[..., w.nope :]
        wide = max(keys.shape[2], values.shape[2])
        pair = torch.zeros(len(kv), 2, heads, wide)
        pair[:, 0, :, : keys.shape[2]], pair[:, 1, :, : values.shape[2]] = keys, values
        queries = torch.nn.functional.pad(q, (0, wide - q.shape[2]))
        attended = attention.attend(queries, pair.flatten(1), seqs, heads, w.scale).view(len(x), heads, wide)
        return self._out(attended[..., : values.shape[2]].flatten(1))

    def decode(
        self, x: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], cos_sin: torch.Tensor
    ) -> torch.Tensor:
        w = self._w
        q = self._query(x).view(len(x), self._heads, -1)
        rope_(q[..., w.nope :], cos_sin)
        nope = [to_latent(q[:, h, : w.nope]) for h, to_latent in enumerate(self._to_latent)]
        queries = torch.cat((torch.stack(nope, dim=1), q[..., w.nope :]), dim=2)
        pair = torch.stack((kv, kv), dim=1).flatten(1)
        attended = attention.attend(queries, pair, seqs, 1, w.scale).view(len(x), self._heads, -1)
        values = [back(attended[:, h, : self._rank]) for h, back in enumerate(self._from_latent)]
        return self._out(torch.cat(values, dim=1))


REFERENCE8_OPS = Ops(
    rms_norm=REFERENCE_OPS.rms_norm,
    rope_=REFERENCE_OPS.rope_,
    swiglu=REFERENCE_OPS.swiglu,
    linear=Linear8,
    router=REFERENCE_OPS.router,
    experts=Experts8,
    route=REFERENCE_OPS.route,
    attend_prompt=REFERENCE_OPS.attend_prompt,
    attend_decode=REFERENCE_OPS.attend_decode,
    mla=Mla8,
)
