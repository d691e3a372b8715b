"""The decoder that all families share: embedding, layers of attention and MLP around a residual stream, norm, head."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tripool.kernels import Batch, KernelTable
from tripool.kernels.heap import give_back
from tripool.kernels.ops import LinearOp
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.table import (
    AttentionParts,
    AttentionSublayer,
    ChoosingDraftOp,
    DraftParts,
    JoinOp,
    MlpSublayer,
    StackOp,
    StackParts,
)
from tripool.kernels.weights import GqaWeights, JoinWeights, LatentWeights, MlpWeights, MoeWeights, Norm
from tripool.models.arch import Arch, GqaShape, MlaShape, MoeShape
from tripool.models.loader import Loader
from tripool.models.rope import rope_table, to_pairs


def dense_mlp(loader: Loader, prefix: str, norm: Norm, arch: Arch) -> MlpSublayer:
    weights = _swiglu(loader, prefix, norm, arch.hidden, arch.dense_width, bias=arch.mlp_bias)
    return loader.counted(loader.kernels.mlp(weights))


def expert_mlp(loader: Loader, prefix: str, norm: Norm, arch: Arch, shape: MoeShape) -> MlpSublayer:
    gate_bias = None
    if shape.correction_bias:
        # It selects experts, and is often large beside its differences: in bfloat16 many of them would be equal.
        gate_bias = loader.tensor(f"{prefix}.gate.e_score_correction_bias", shape.experts, dtype=torch.float32)
    shared = None
    if shape.shared_width:
        name = f"{prefix}.shared_experts"
        shared = _swiglu(loader, name, norm, arch.hidden, shape.shared_width, bias=arch.mlp_bias)
    experts = (f"{prefix}.experts", shape.experts, shape.width, arch.hidden)
    gate_up, down = loader.experts(*experts)
    gate_up_scales, down_scales = loader.expert_scales(*experts)
    weights = MoeWeights(
        norm=norm,
        gate=loader.fused([f"{prefix}.gate"], [shape.experts], arch.hidden),
        gate_bias=gate_bias,
        gate_up=gate_up,
        down=down,
        shared=shared,
        plan=shape.route,
        gate_up_scales=gate_up_scales,
        down_scales=down_scales,
    )
    return loader.counted(loader.kernels.moe(weights))


def _swiglu(loader: Loader, prefix: str, norm: Norm, hidden: int, width: int, *, bias: bool) -> MlpWeights:
    names, down = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [f"{prefix}.down_proj"]
    return MlpWeights(
        norm=norm,
        gate_up=loader.fused(names, [width, width], hidden),
        gate_up_bias=loader.bias(names, [width, width]) if bias else None,
        down=loader.fused(down, [hidden], width),
        down_bias=loader.bias(down, [hidden]) if bias else None,
        gate_up_scales=loader.scales(names, [width, width]),
        down_scales=loader.scales(down, [hidden]),
    )


def latent_attention(loader: Loader, prefix: str, norm: Norm, arch: Arch, shape: MlaShape) -> AttentionSublayer:
    q_out, latent = shape.heads * (shape.nope + shape.rope), shape.kv_rank + shape.rope
    names, outs = [f"{prefix}.kv_a_proj_with_mqa"], [latent]
    q_norm: Norm | None = None
    query_name, query_width = f"{prefix}.q_proj", arch.hidden
    if shape.q_rank is not None:
        names, outs = [f"{prefix}.q_a_proj", *names], [shape.q_rank, *outs]
        q_norm = Norm(loader.tensor(f"{prefix}.q_a_layernorm.weight", shape.q_rank), shape.norm_eps)
        query_name, query_width = f"{prefix}.q_b_proj", shape.q_rank
    query, query_scales = loader.fused([query_name], [q_out], query_width), loader.scales([query_name], [q_out])
    down, down_scales = loader.fused(names, outs, arch.hidden), loader.scales(names, outs)
    down_bias = loader.bias(names, outs) if shape.bias else None
    for turned in (down, down_bias, down_scales):
        if turned is not None:
            to_pairs(turned[-shape.rope :], arch.rope)
    for turned in (query, query_scales):
        for head in () if turned is None else turned.unflatten(0, (shape.heads, -1)):
            to_pairs(head[shape.nope :], arch.rope)
    expand, wide = [f"{prefix}.kv_b_proj"], [shape.heads * (shape.nope + shape.v)]
    up, up_scales = loader.fused(expand, wide, shape.kv_rank), loader.scales(expand, wide)
    out = [f"{prefix}.o_proj"]
    core = MlaWeights(
        query=query,
        up=up.view(shape.heads, shape.nope + shape.v, shape.kv_rank),
        out=loader.fused(out, [arch.hidden], shape.heads * shape.v),
        out_bias=loader.bias(out, [arch.hidden]) if shape.bias else None,
        nope=shape.nope,
        scale=shape.scale,
        query_scales=query_scales,
        up_scales=None if up_scales is None else up_scales.view(shape.heads, -1),
        out_scales=loader.scales(out, [arch.hidden]),
    )
    kv_norm = Norm(loader.tensor(f"{prefix}.kv_a_layernorm.weight", shape.kv_rank), shape.norm_eps)
    weights = LatentWeights(
        norm=norm,
        down=down,
        down_bias=down_bias,
        q_norm=q_norm,
        kv_norm=kv_norm,
        core=core,
        down_scales=down_scales,
    )
    return loader.counted(loader.kernels.mla(weights))


def grouped_attention(loader: Loader, prefix: str, norm: Norm, arch: Arch, shape: GqaShape) -> AttentionSublayer:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    names = [f"{prefix}.{part}_proj" for part in "qkv"]
    weight = loader.fused(names, [query, key, key], arch.hidden)
    bias = loader.bias(names, [query, key, key]) if shape.qkv_bias else None
    scales = loader.scales(names, [query, key, key])
    for head in range(shape.heads + shape.kv_heads):
        rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
        to_pairs(weight[rows], arch.rope)
        for beside in (bias, scales):
            if beside is not None:
                to_pairs(beside[rows], arch.rope)
    norms: list[Norm | None] = [None, None]
    if shape.qk_norm:
        paired = partial(to_pairs, rope=arch.rope)
        gains = [loader.tensor(f"{prefix}.{part}_norm.weight", shape.head_dim, then=paired) for part in "qk"]
        norms = [Norm(gain, arch.norm_eps) for gain in gains]
    out = [f"{prefix}.o_proj"]
    weights = GqaWeights(
        norm=norm,
        qkv=weight,
        qkv_bias=bias,
        out=loader.fused(out, [arch.hidden], query),
        out_bias=loader.bias(out, [arch.hidden]) if shape.out_bias else None,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        q_norm=norms[0],
        k_norm=norms[1],
        qkv_scales=scales,
        out_scales=loader.scales(out, [arch.hidden]),
    )
    return loader.counted(loader.kernels.gqa(weights))


_DRAFT_TOKENS = 8192
"""Smallest vocabulary of drafts; of a larger vocabulary the first quarter, because common ids come first."""


def attention_sublayer(loader: Loader, prefix: str, arch: Arch) -> AttentionSublayer:
    norm = Norm(loader.tensor(f"{prefix}.input_layernorm.weight", arch.hidden), arch.norm_eps)
    if isinstance(arch.attention, MlaShape):
        return latent_attention(loader, f"{prefix}.self_attn", norm, arch, arch.attention)
    return grouped_attention(loader, f"{prefix}.self_attn", norm, arch, arch.attention)


def mlp_sublayer(loader: Loader, prefix: str, arch: Arch, *, moe: bool) -> MlpSublayer:
    norm = Norm(loader.tensor(f"{prefix}.post_attention_layernorm.weight", arch.hidden), arch.norm_eps)
    if moe:
        assert arch.moe is not None
        return expert_mlp(loader, f"{prefix}.mlp", norm, arch, arch.moe)
    return dense_mlp(loader, f"{prefix}.mlp", norm, arch)


def join_sublayer(loader: Loader, prefix: str, arch: Arch) -> JoinOp:
    """The MTP layer's input: a token's final state joined with the next token's embedding."""
    embedded, hidden = (
        Norm(loader.tensor(f"{prefix}.{name}.weight", arch.hidden), arch.norm_eps) for name in ("enorm", "hnorm")
    )
    names, outs = [f"{prefix}.eh_proj"], [arch.hidden]
    weight, scales = loader.fused(names, outs, 2 * arch.hidden), loader.scales(names, outs)
    joined = JoinWeights(left=embedded, right=hidden, weight=weight, scales=scales)
    return loader.counted(loader.kernels.join(joined))


class Layer:
    def __init__(self, loader: Loader, prefix: str, arch: Arch, *, moe: bool) -> None:
        self.attention = attention_sublayer(loader, prefix, arch)
        self.mlp = mlp_sublayer(loader, prefix, arch, moe=moe)

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        """Adds to x, in place."""
        self.attention(x, batch, kv)
        self.mlp(x)


class Mtp:
    """Multi-token prediction: predicts token t + 2 from the final hidden state at t and token t + 1."""

    def __init__(self, loader: Loader, arch: Arch, embed: torch.Tensor, cos_sin: torch.Tensor, head: LinearOp) -> None:
        prefix = f"model.layers.{arch.layers}"
        join = join_sublayer(loader, prefix, arch)
        final = Norm(loader.tensor(f"{prefix}.shared_head.norm.weight", arch.hidden), arch.norm_eps)
        self.layer = layer = Layer(loader, prefix, arch, moe=arch.moe is not None)
        self.head = common = head.first(min(arch.vocab, max(_DRAFT_TOKENS, arch.vocab // 4)))
        parts = DraftParts(
            embed=embed, cos_sin=cos_sin, join=join, attention=layer.attention, mlp=layer.mlp, norm=final, head=common
        )
        self.draft = loader.kernels.draft(parts)
        self.choosing = self.draft if isinstance(self.draft, ChoosingDraftOp) else None


@dataclass(frozen=True, slots=True)
class Attend:
    """One layer's attention between two segments."""

    attention: AttentionParts
    q: torch.Tensor
    kv: torch.Tensor

    def __call__(self, batch: Batch, out: torch.Tensor) -> None:
        self.attention.attend(self.q[: batch.num_rows], batch, self.kv, out[: batch.num_rows])


class Model:
    """A network: weights only. The KV cache and the batch are arguments."""

    def __init__(self, arch: Arch, loader: Loader) -> None:
        self.arch = arch
        self._k: KernelTable = loader.kernels
        self._embed = loader.tensor("model.embed_tokens.weight", arch.vocab, arch.hidden)
        # Before the layers: packing the head needs the most memory.
        if arch.tied_head:
            self._head = loader.pack(self._embed, loader.scales(["model.embed_tokens"], [arch.vocab]))
        else:
            self._head = loader.linear(["lm_head"], [arch.vocab], arch.hidden)
        give_back()
        self._layers: list[Layer] = []
        for i in range(arch.layers):
            self._layers.append(Layer(loader, f"model.layers.{i}", arch, moe=i in arch.moe_layers))
            give_back()
        self._norm = loader.tensor("model.norm.weight", arch.hidden)
        has_mtp = arch.mtp_layers > 0 and loader.has(f"model.layers.{arch.layers}.eh_proj.weight")
        self._cos_sin = loader.derived("cos_sin", lambda: rope_table(arch.rope, arch.context_tokens))
        self.mtp = Mtp(loader, arch, self._embed, self._cos_sin, self._head) if has_mtp else None
        self.num_bytes = loader.num_bytes
        self.stack = self._whole()

    def _whole(self) -> StackOp | None:
        """The fused step (`hidden`, and samples from `logits` of some rows) if the kernel table has one."""
        if self._k.stack is None:
            return None
        sublayers = [(layer.attention, layer.mlp) for layer in self._layers]
        norm = Norm(self._norm, self.arch.norm_eps)
        return self._k.stack(
            StackParts(embed=self._embed, cos_sin=self._cos_sin, layers=sublayers, norm=norm, head=self._head)
        )

    @property
    def kv_layers(self) -> int:
        """KV cache layers: one per layer, and one for the MTP layer."""
        return self.arch.layers + (self.mtp is not None)

    @property
    def expert_sublayers(self) -> list[MlpSublayer]:
        """Those with routed experts, in order of their layers; the MTP layer's is the last."""
        found = [layer.mlp for i, layer in enumerate(self._layers) if i in self.arch.moe_layers]
        return found if self.mtp is None or self.arch.moe is None else [*found, self.mtp.layer.mlp]

    def hidden(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Final normed hidden state of every row. Writes the rows' KV into kv [kv_layers, slots, width]."""
        batch.cos_sin = self._cos_sin.index_select(0, batch.positions)
        x = self._embed.index_select(0, batch.tokens)
        for layer, layer_kv in zip(self._layers, kv.unbind(0), strict=False):
            layer(x, batch, layer_kv)
        return self._k.rms_norm(x, self._norm, self.arch.norm_eps)

    def segments(self, batch: Batch, kv: torch.Tensor) -> Generator[Attend, torch.Tensor, torch.Tensor]:
        """`hidden`, interrupted in every layer: yields what attends, and takes the result."""
        batch.cos_sin = self._cos_sin.index_select(0, batch.positions)
        x = self._embed.index_select(0, batch.tokens)
        for layer, layer_kv in zip(self._layers, kv.unbind(0), strict=False):
            attention = layer.attention
            assert isinstance(attention, AttentionParts)
            attention.after(x, (yield Attend(attention, attention.before(x, batch, layer_kv), layer_kv)))
            layer.mlp(x)
        return self._k.rms_norm(x, self._norm, self.arch.norm_eps)

    @property
    def has_segments(self) -> bool:
        return isinstance(self._layers[0].attention, AttentionParts)

    def mtp_hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """`batch.tokens` are the next tokens at their own positions, `hidden` the final normed states of the tokens
        before them, row by row."""
        assert self.mtp is not None
        return self.mtp.draft.hidden(batch, hidden, kv[self.arch.layers])

    def draft_logits(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits of some rows after `mtp_hidden`, over the commonest tokens only: drafts of rare tokens do not pay for
        the larger product."""
        assert self.mtp is not None
        return self.mtp.draft.logits(batch, hidden, kv[self.arch.layers], rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)
