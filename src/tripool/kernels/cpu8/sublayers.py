"""Sublayers of a layer, attention and MLP, each one call into C."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from itertools import chain

import torch

from tripool.kernels.batch import Batch
from tripool.kernels.cpu8 import library
from tripool.kernels.cpu8.native_batch import native_batch
from tripool.kernels.cpu8.pack import Packed, PackedNorm, packed, packed_gate_up
from tripool.kernels.weight_store import FRESH, WeightStore
from tripool.kernels.weights import GqaWeights, JoinWeights, LatentWeights, MlpWeights, MoeWeights, Norm

_LANES = 16


class Linear8:
    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        store: WeightStore = FRESH,
    ) -> None:
        self._set(packed(weight, bias, store, scales), len(weight))

    def _set(self, whole_weight: Packed, out: int) -> None:
        """Use all packed weights, or those of the first outputs: panels are in that order."""
        self._packed, self._out = whole_weight, out
        whole = whole_weight.struct
        self.struct = library.Weight(whole.panels, whole.bias, out, whole.in_)
        self.at, self._run = addressof(self.struct), library.library().tripool_linear
        self.num_bytes = whole_weight.num_bytes

    def first(self, count: int) -> Linear8:
        part = object.__new__(Linear8)
        part._set(self._packed, count)
        return part

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty(x.shape[0], self._out)
        self._run(self.at, x.data_ptr(), y.data_ptr(), x.shape[0])
        return y


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    norm = library.Norm(gain.data_ptr(), eps, len(gain))
    library.library().tripool_norm(addressof(norm), x.data_ptr(), y.data_ptr(), x.shape[0])
    return y


class Join8:
    def __init__(self, weights: JoinWeights, store: WeightStore = FRESH) -> None:
        norms = [PackedNorm(n.gain, n.eps) for n in (weights.left, weights.right)]
        weight = packed(weights.weight, None, store, weights.scales)
        self._keep = (norms, weight)
        self.struct = library.Join(norms[0].struct, norms[1].struct, weight.struct)
        self.at, self._out = addressof(self.struct), len(weights.weight)
        self._run = library.library().tripool_join
        self.num_bytes = weight.num_bytes

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left, right = left.contiguous(), right.contiguous()
        y = torch.empty(left.shape[0], self._out)
        self._run(self.at, left.data_ptr(), right.data_ptr(), y.data_ptr(), left.shape[0])
        return y


class Mlp8:
    def __init__(self, weights: MlpWeights, store: WeightStore = FRESH) -> None:
        self._keep = keep = (
            PackedNorm(weights.norm.gain, weights.norm.eps),
            packed_gate_up(weights.gate_up, weights.gate_up_bias, store, weights.gate_up_scales),
            packed(weights.down, weights.down_bias, store, weights.down_scales),
        )
        self.struct = library.Mlp(*(part.struct for part in keep))
        self.at, self._run = addressof(self.struct), library.library().tripool_mlp
        self.num_bytes = keep[1].num_bytes + keep[2].num_bytes

    def __call__(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        self._run(self.at, x.data_ptr(), x.shape[0])


class Gqa8:
    def __init__(self, weights: GqaWeights, store: WeightStore = FRESH) -> None:
        norms = [PackedNorm(n.gain, n.eps) if n else None for n in (weights.norm, weights.q_norm, weights.k_norm)]
        qkv = packed(weights.qkv, weights.qkv_bias, store, weights.qkv_scales)
        out = packed(weights.out, weights.out_bias, store, weights.out_scales)
        self._keep = (norms, qkv, out)
        norm, q_norm, k_norm = (library.Norm() if n is None else n.struct for n in norms)
        shape = (weights.heads, weights.kv_heads, weights.head_dim, weights.scale)
        self.struct = library.Gqa(norm, qkv.struct, out.struct, *shape, q_norm, k_norm)
        self.at, self._run = addressof(self.struct), library.library().tripool_gqa
        self.num_bytes = qkv.num_bytes + out.num_bytes

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        assert x.is_contiguous() and kv.is_contiguous()
        self._run(self.at, x.data_ptr(), kv.data_ptr(), native_batch(batch))


class Mla8:
    """Each head's projection into the latent space and back is a small product of its own: folded into the query and
    output weights, it would read twice the bytes per token."""

    def __init__(self, weights: LatentWeights, store: WeightStore = FRESH) -> None:
        core = weights.core
        up, nope = core.up, core.nope
        heads, wide, rank = up.shape
        norms = [_norm(weights.norm), _norm(weights.q_norm), _norm(weights.kv_norm)]
        whole = [
            packed(weights.down, weights.down_bias, store, weights.down_scales),
            packed(core.query, None, store, core.query_scales),
            packed(core.out, core.out_bias, store, core.out_scales),
        ]
        keys, values, scales = up[:, :nope].transpose(1, 2), up[:, nope:], core.up_scales
        # Transposed, a row holds one integer of each stored row, so no stored scale fits: these are quantised again.
        row_scales = (scales, None, None if scales is None else scales[:, nope:])
        by_head = [
            [packed(one, None, store, row) for one, row in zip(some, _each(rows, heads), strict=True)]
            for some, rows in zip((up, keys, values), row_scales, strict=True)
        ]
        arrays = [(library.Weight * heads)(*(one.struct for one in some)) for some in by_head]
        self._keep = (norms, whole, by_head, arrays)
        norm, q_norm, kv_norm = (library.Norm() if n is None else n.struct for n in norms)
        down, *others = (part.struct for part in whole)
        shape = (heads, rank, len(core.query) // heads - nope, nope, wide - nope, core.scale)
        self.struct = library.Mla(norm, down, q_norm, kv_norm, *others, *arrays, *shape)
        self.at, self._run = addressof(self.struct), library.library().tripool_mla
        self.num_bytes = sum(part.num_bytes for part in (*whole, *chain.from_iterable(by_head)))

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        assert x.is_contiguous() and kv.is_contiguous()
        self._run(self.at, x.data_ptr(), kv.data_ptr(), native_batch(batch))


class Moe8:
    def __init__(self, weights: MoeWeights, store: WeightStore = FRESH) -> None:
        plan, shared = weights.plan, weights.shared
        experts = len(weights.gate)
        norm = PackedNorm(weights.norm.gain, weights.norm.eps)
        gate = store.keep("gate", lambda: _gate_panels(weights.gate))
        gate_up = [
            packed_gate_up(one, None, store, scales)
            for one, scales in zip(weights.gate_up, _each(weights.gate_up_scales, experts), strict=True)
        ]
        down = [
            packed(one, None, store, scales)
            for one, scales in zip(weights.down, _each(weights.down_scales, experts), strict=True)
        ]
        parts = [*gate_up, *down]
        self.expert_bytes = sum(part.num_bytes for part in parts)
        shared_structs = [library.Weight(), library.Weight()]
        if shared is not None:
            pair = [
                packed_gate_up(shared.gate_up, shared.gate_up_bias, store, shared.gate_up_scales),
                packed(shared.down, shared.down_bias, store, shared.down_scales),
            ]
            parts += pair
            shared_structs = [one.struct for one in pair]
        arrays = [(library.Weight * experts)(*(one.struct for one in some)) for some in (gate_up, down)]
        bias = None if weights.gate_bias is None else weights.gate_bias.contiguous()
        self._keep = (norm, gate, bias, parts, arrays)
        self.struct = library.Moe(
            norm.struct,
            gate.data_ptr(),
            None if bias is None else bias.data_ptr(),
            *arrays,
            *shared_structs,
            experts,
            plan.top_k,
            plan.score == "softmax",
            plan.groups,
            plan.top_groups,
            plan.group_top,
            plan.normalise,
            plan.scaling,
        )
        self.at, self._run = addressof(self.struct), library.library().tripool_moe
        self.num_bytes = gate.nbytes + sum(part.num_bytes for part in parts)

    def __call__(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        self._run(self.at, x.data_ptr(), x.shape[0])


def _norm(norm: Norm | None) -> PackedNorm | None:
    return None if norm is None else PackedNorm(norm.gain, norm.eps)


def _each(scales: torch.Tensor | None, count: int) -> Sequence[torch.Tensor | None]:
    return [None] * count if scales is None else list(scales)


def _gate_panels(gate: torch.Tensor) -> torch.Tensor:
    """Router weights by sixteen experts, then by input: see `native/experts.h`."""
    experts, hidden = gate.shape
    padded = torch.zeros(-(-experts // _LANES) * _LANES, hidden)
    padded[:experts] = gate
    return padded.view(-1, _LANES, hidden).transpose(1, 2).contiguous()
