"""The halves of a layer, each one call into C."""

from __future__ import annotations

from ctypes import addressof

import torch

from tripool.kernels.batch import Batch
from tripool.kernels.cpu8 import library
from tripool.kernels.cpu8.native_batch import native_batch
from tripool.kernels.cpu8.pack import Packed, PackedNorm, packed_gate_up
from tripool.kernels.weights import GqaWeights, LatentWeights, MlpWeights, MoeWeights, Norm

_LANES = 16


class Linear8:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = Packed(weight, bias)
        self._at, self._out = addressof(self._packed.struct), len(weight)
        self._run = library.library().tripool_linear
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty(len(x), self._out)
        self._run(self._at, x.data_ptr(), y.data_ptr(), len(x))
        return y


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    norm = library.Norm(gain.data_ptr(), eps, len(gain))
    library.library().tripool_norm(addressof(norm), x.data_ptr(), y.data_ptr(), len(x))
    return y


class Mlp8:
    def __init__(self, weights: MlpWeights) -> None:
        self._keep = keep = (
            PackedNorm(weights.norm.gain, weights.norm.eps),
            packed_gate_up(weights.gate_up, weights.gate_up_bias),
            Packed(weights.down, weights.down_bias),
        )
        self._struct = library.Mlp(*(part.struct for part in keep))
        self._at, self._run = addressof(self._struct), library.library().tripool_mlp
        self.num_bytes = keep[1].num_bytes + keep[2].num_bytes

    def __call__(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        self._run(self._at, x.data_ptr(), len(x))


class Gqa8:
    def __init__(self, weights: GqaWeights) -> None:
        norms = [PackedNorm(n.gain, n.eps) if n else None for n in (weights.norm, weights.q_norm, weights.k_norm)]
        qkv, out = Packed(weights.qkv, weights.qkv_bias), Packed(weights.out, weights.out_bias)
        self._keep = (norms, qkv, out)
        norm, q_norm, k_norm = (library.Norm() if n is None else n.struct for n in norms)
        shape = (weights.heads, weights.kv_heads, weights.head_dim, weights.scale)
        self._struct = library.Gqa(norm, qkv.struct, out.struct, *shape, q_norm, k_norm)
        self._at, self._run = addressof(self._struct), library.library().tripool_gqa
        self.num_bytes = qkv.num_bytes + out.num_bytes

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        assert x.is_contiguous() and kv.is_contiguous()
        self._run(self._at, x.data_ptr(), kv.data_ptr(), native_batch(batch))


class Mla8:
    """The step between a query and the latent space is folded into the query weights for decoding, and the step back
    into the output weights, so that decoding needs no product per head. That costs a second set of the two weights."""

    def __init__(self, weights: LatentWeights) -> None:
        core = weights.core
        up, nope = core.up, core.nope
        heads, rank = up.shape[0], up.shape[2]
        query = core.query.view(heads, -1, core.query.shape[1])
        folded = torch.cat((torch.bmm(up[:, :nope].transpose(1, 2), query[:, :nope]), query[:, nope:]), dim=1)
        out = core.out.view(len(core.out), heads, -1).transpose(0, 1)
        folded_out = torch.bmm(out, up[:, nope:]).transpose(0, 1)
        norms = [_norm(weights.norm), _norm(weights.q_norm), _norm(weights.kv_norm)]
        packed = [
            Packed(weights.down, weights.down_bias),
            Packed(core.query),
            Packed(folded.flatten(0, 1)),
            Packed(up.flatten(0, 1)),
            Packed(core.out, core.out_bias),
            Packed(folded_out.flatten(1), core.out_bias),
        ]
        self._keep = (norms, packed)
        rope = query.shape[1] - nope
        norm, q_norm, kv_norm = (library.Norm() if n is None else n.struct for n in norms)
        down, *others = (part.struct for part in packed)
        shape = (heads, rank, rope, nope, up.shape[1] - nope, core.scale)
        self._struct = library.Mla(norm, down, q_norm, kv_norm, *others, *shape)
        self._at, self._run = addressof(self._struct), library.library().tripool_mla
        self.num_bytes = sum(part.num_bytes for part in packed)

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        assert x.is_contiguous() and kv.is_contiguous()
        self._run(self._at, x.data_ptr(), kv.data_ptr(), native_batch(batch))


class Moe8:
    def __init__(self, weights: MoeWeights) -> None:
        plan, shared = weights.plan, weights.shared
        experts, hidden = weights.gate.shape
        norm = PackedNorm(weights.norm.gain, weights.norm.eps)
        # By sixteen experts, then by input: see `native/experts.h`.
        gate = torch.zeros(-(-experts // _LANES) * _LANES, hidden)
        gate[:experts] = weights.gate
        gate = gate.view(-1, _LANES, hidden).transpose(1, 2).contiguous()
        gate_up = [packed_gate_up(one) for one in weights.gate_up]
        down = [Packed(one) for one in weights.down]
        packed = [*gate_up, *down]
        shared_structs = [library.Weight(), library.Weight()]
        if shared is not None:
            pair = [packed_gate_up(shared.gate_up, shared.gate_up_bias), Packed(shared.down, shared.down_bias)]
            packed += pair
            shared_structs = [one.struct for one in pair]
        arrays = [(library.Weight * experts)(*(one.struct for one in some)) for some in (gate_up, down)]
        bias = None if weights.gate_bias is None else weights.gate_bias.contiguous()
        self._keep = (norm, gate, bias, packed, arrays)
        self._struct = library.Moe(
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
        self._at, self._run = addressof(self._struct), library.library().tripool_moe
        self.num_bytes = gate.nbytes + sum(part.num_bytes for part in packed)

    def __call__(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        self._run(self._at, x.data_ptr(), len(x))


def _norm(norm: Norm | None) -> PackedNorm | None:
    return None if norm is None else PackedNorm(norm.gain, norm.eps)
