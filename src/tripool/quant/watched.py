"""A float32 kernel table that passes every linear's input to a function and multiplies what it returns.

One function records calibration data; another emulates W8A8 engines: inputs of integer weights rounded per token.
Labels are those of `parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from tripool.kernels.cpu.mla import mla_decode, mla_prompt
from tripool.kernels.cpu.ops import CPU_OPS
from tripool.kernels.ops import LinearOp, MlaOp, Ops
from tripool.kernels.ref.linear import Linear
from tripool.kernels.ref.mla import Mla, MlaWeights
from tripool.kernels.ref.sublayers import Draft, GroupedAttention, Join, LatentAttention, Mlp, MoeMlp
from tripool.kernels.ref.swiglu import swiglu
from tripool.kernels.sequence_rows import SequenceRows, context
from tripool.kernels.table import AttentionSublayer, JoinOp, KernelTable, MlpSublayer
from tripool.kernels.weights import INT8, GqaWeights, JoinWeights, LatentWeights, MlpWeights, MoeWeights

See = Callable[[str, torch.Tensor, bool], torch.Tensor]
"""(label, input, whether the weights are integers) -> the input to multiply."""

Scales = torch.Tensor | None


class _Watched(Linear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, label: str, scales: Scales, see: See) -> None:
        super().__init__(weight, bias)
        self._label, self._scales, self._see = label, scales, see

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(self._see(self._label, x, self._scales is not None))

    def first(self, count: int) -> _Watched:
        bias = None if self.bias is None else self.bias[:count]
        return _Watched(self.weight[:count], bias, self._label, self._scales, self._see)


class _WatchedExperts:
    def __init__(self, weights: MoeWeights, see: See) -> None:
        self._w, self._see = weights, see
        self.num_bytes = weights.gate_up.nbytes + weights.down.nbytes

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        w, see = self._w, self._see
        x = see("mlp.experts.in", x, w.gate_up_scales is not None)
        parts = torch.empty(*experts.shape, x.shape[1])
        for expert in experts.unique().tolist():
            rows, choice = torch.where(experts == expert)
            between = swiglu(x[rows] @ w.gate_up[expert].T)
            between = see(f"mlp.experts.{expert}.mid", between, w.down_scales is not None)
            parts[rows, choice] = between @ w.down[expert].T
        return (parts * weights[..., None]).sum(1)


def watched_table(see: See) -> KernelTable:
    def gqa(w: GqaWeights) -> AttentionSublayer:
        return GroupedAttention(_ops(see, [("self_attn.in", w.qkv_scales), ("self_attn.out", w.out_scales)]), w)

    def mla(w: LatentWeights) -> AttentionSublayer:
        core = w.core
        inner = [("self_attn.q", core.query_scales), ("self_attn.out", core.out_scales)]
        ops = _ops(see, [("self_attn.in", w.down_scales)])
        return LatentAttention(replace(ops, mla=partial(_mla, see, inner)), w)

    def mlp(w: MlpWeights) -> MlpSublayer:
        return Mlp(_ops(see, _swiglu("mlp", w)), w)

    def moe(w: MoeWeights) -> MlpSublayer:
        shared = [] if w.shared is None else _swiglu("mlp.shared_experts", w.shared)
        return MoeMlp(replace(_ops(see, shared), experts=lambda gate_up, down: _WatchedExperts(w, see)), w)

    def join(w: JoinWeights) -> JoinOp:
        return Join(_ops(see, [("eh", w.scales)]), w)

    def linear(weight: torch.Tensor, bias: torch.Tensor | None, scales: Scales = None) -> LinearOp:
        return _Watched(weight, bias, "head", scales, see)

    return KernelTable(
        name="watched",
        rms_norm=CPU_OPS.rms_norm,
        linear=linear,
        join=join,
        gqa=gqa,
        mla=mla,
        mlp=mlp,
        moe=moe,
        draft=partial(Draft, CPU_OPS),
        linear_of_scales=lambda weight, scales: linear(weight, None, scales),
        stored=INT8,
    )


def _swiglu(prefix: str, w: MlpWeights) -> list[tuple[str, Scales]]:
    return [(f"{prefix}.in", w.gate_up_scales), (f"{prefix}.mid", w.down_scales)]


def _ops(see: See, labels: Iterable[tuple[str, Scales]]) -> Ops:
    """Plain ops whose linears get these labels in the order in which a sublayer creates them."""
    return replace(CPU_OPS, linear=_maker(see, labels), router=Linear)


def _maker(see: See, labels: Iterable[tuple[str, Scales]]) -> Callable[[torch.Tensor, torch.Tensor | None], _Watched]:
    left = iter(labels)

    def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> _Watched:
        label, scales = next(left)
        return _Watched(weight, bias, label, scales, see)

    return make


def _mla(see: See, inner: Sequence[tuple[str, Scales]], core: MlaWeights) -> MlaOp:
    """The decode form has no product with the latents themselves; engines compute it in floats, as here."""
    rounded = core.up_scales is not None

    def prompt(
        q: torch.Tensor, kv: torch.Tensor, seqs: list[SequenceRows], up: torch.Tensor, nope: int, scale: float
    ) -> torch.Tensor:
        outs = []
        rank = up.shape[2]
        for seq in seqs:
            rows = context(kv, seq)
            seen = torch.zeros(seq.stop, kv.shape[1])
            seen[seq.first :] = torch.cat((see("self_attn.latent", rows[:, :rank], rounded), rows[:, rank:]), dim=1)
            here = SequenceRows(0, seq.count, seq.start, [0], seq.first)
            outs.append(mla_prompt(q[seq.rows], seen, [here], up, nope, scale))
        return torch.cat(outs)

    return Mla(core, _maker(see, inner), CPU_OPS.rope_, prompt, mla_decode)


def round_tokens(x: torch.Tensor) -> torch.Tensor:
    """Round each row to 8 bits of its largest value, as floats, with the step of the compressed-tensors library."""
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127.5
    return (x / step).round_().clamp_(-128, 127).mul_(step)


def _rounding(label: str, x: torch.Tensor, integers: bool) -> torch.Tensor:
    return round_tokens(x) if integers else x


W8A8 = watched_table(_rounding)
"""The layout's definition in plain float32: integer weights, each with its input rounded per token."""
