"""The network every family shares: embed, layers of attention and feed-forward around a residual stream, norm, head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tripool.kernels import Batch, KernelTable
from tripool.kernels.heap import give_back
from tripool.kernels.ops import LinearOp
from tripool.kernels.table import (
    AttentionSublayer,
    ChoosingDraftOp,
    DraftParts,
    JoinOp,
    MlpSublayer,
    StackOp,
    StackParts,
)
from tripool.kernels.weights import JoinWeights, Norm
from tripool.models.arch import Arch, MlaShape
from tripool.models.gqa import grouped_attention
from tripool.models.loader import Loader
from tripool.models.mla import latent_attention
from tripool.models.mlp import dense_mlp, expert_mlp
from tripool.models.rope import turn_table

_DRAFT_TOKENS = 8192
"""Least number of tokens a draft chooses from, of a larger vocabulary its first quarter: common ids come first."""


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
    """How the MTP layer takes in a token's final state and its successor."""
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
    """Multi-token prediction: from a token's final hidden state and its successor, guess the successor's successor."""

    def __init__(self, loader: Loader, arch: Arch, embed: torch.Tensor, cos_sin: torch.Tensor, head: LinearOp) -> None:
        prefix = f"model.layers.{arch.layers}"
        join = join_sublayer(loader, prefix, arch)
        final = Norm(loader.tensor(f"{prefix}.shared_head.norm.weight", arch.hidden), arch.norm_eps)
        layer = Layer(loader, prefix, arch, moe=arch.moe is not None)
        self.head = common = head.first(min(arch.vocab, max(_DRAFT_TOKENS, arch.vocab // 4)))
        parts = DraftParts(
            embed=embed, cos_sin=cos_sin, join=join, attention=layer.attention, mlp=layer.mlp, norm=final, head=common
        )
        self.draft = loader.kernels.draft(parts)
        self.choosing = self.draft if isinstance(self.draft, ChoosingDraftOp) else None


class Model:
    """Stateless but for its weights: the KV cache and the batch are arguments."""

    def __init__(self, arch: Arch, loader: Loader) -> None:
        self.arch = arch
        self._k: KernelTable = loader.kernels
        self._embed = loader.tensor("model.embed_tokens.weight", arch.vocab, arch.hidden)
        # Before the layers: what is largest takes most on the way, and nothing else is there yet.
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
        self._cos_sin = loader.derived("turns", lambda: turn_table(arch.rope, arch.context_tokens))
        self.mtp = Mtp(loader, arch, self._embed, self._cos_sin, self._head) if has_mtp else None
        self.num_bytes = loader.num_bytes
        self.stack = self._whole()

    def _whole(self) -> StackOp | None:
        """`hidden` and, after some rows, choices from `logits`, in one call; None where there is none."""
        if self._k.stack is None:
            return None
        sublayers = [(layer.attention, layer.mlp) for layer in self._layers]
        norm = Norm(self._norm, self.arch.norm_eps)
        return self._k.stack(
            StackParts(embed=self._embed, cos_sin=self._cos_sin, layers=sublayers, norm=norm, head=self._head)
        )

    @property
    def kv_layers(self) -> int:
        """Cache layers a sequence needs: one per layer, and one for the MTP layer."""
        return self.arch.layers + (self.mtp is not None)

    def hidden(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Final normed hidden state of every row. Writes the rows' KV into kv [kv_layers, slots, width]."""
        batch.cos_sin = self._cos_sin.index_select(0, batch.positions)
        x = self._embed.index_select(0, batch.tokens)
        for layer, layer_kv in zip(self._layers, kv.unbind(0), strict=False):
            layer(x, batch, layer_kv)
        return self._k.rms_norm(x, self._norm, self.arch.norm_eps)

    def mtp_hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """`batch.tokens` are the successors at their own positions, `hidden` that of the tokens before them (after the
        final norm), row by row."""
        assert self.mtp is not None
        return self.mtp.draft.hidden(batch, hidden, kv[self.arch.layers])

    def draft_logits(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """As `mtp_hidden`, and then what it says after some of the rows, of the commonest tokens only: a guess need not
        know rare words, and costs much less so."""
        assert self.mtp is not None
        return self.mtp.draft.logits(batch, hidden, kv[self.arch.layers], rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)
