"""The network every family shares: embed, layers of attention and feed-forward around a residual stream, norm, head."""

from __future__ import annotations

import torch

from tripool.kernels import Batch, KernelTable
from tripool.kernels.weights import JoinWeights, Norm
from tripool.models.arch import Arch, MlaShape
from tripool.models.gqa import grouped_attention
from tripool.models.loader import Loader
from tripool.models.mla import latent_attention
from tripool.models.mlp import dense_mlp, expert_mlp
from tripool.models.rope import turn_table

_DRAFT_TOKENS = 2048
"""Least number of tokens a draft chooses from. Ids follow the order in which a vocabulary was learned: common first."""


class Layer:
    def __init__(self, loader: Loader, prefix: str, arch: Arch, *, moe: bool) -> None:
        before, after = (
            Norm(loader.tensor(f"{prefix}.{name}_layernorm.weight", arch.hidden), arch.norm_eps)
            for name in ("input", "post_attention")
        )
        if isinstance(arch.attention, MlaShape):
            self._attention = latent_attention(loader, f"{prefix}.self_attn", before, arch, arch.attention)
        else:
            self._attention = grouped_attention(loader, f"{prefix}.self_attn", before, arch, arch.attention)
        if moe:
            assert arch.moe is not None
            self._mlp = expert_mlp(loader, f"{prefix}.mlp", after, arch, arch.moe)
        else:
            self._mlp = dense_mlp(loader, f"{prefix}.mlp", after, arch)

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> None:
        """Adds to x, in place."""
        self._attention(x, batch, kv)
        self._mlp(x)


class Mtp:
    """Multi-token prediction: from a token's final hidden state and its successor, guess the successor's successor."""

    def __init__(self, loader: Loader, arch: Arch) -> None:
        prefix = f"model.layers.{arch.layers}"
        self._k, self._eps = loader.kernels, arch.norm_eps
        embedded, hidden = (
            Norm(loader.tensor(f"{prefix}.{name}.weight", arch.hidden), arch.norm_eps) for name in ("enorm", "hnorm")
        )
        weight = loader.fused([f"{prefix}.eh_proj"], [arch.hidden], 2 * arch.hidden)
        self._join = loader.counted(loader.kernels.join(JoinWeights(left=embedded, right=hidden, weight=weight)))
        self._layer = Layer(loader, prefix, arch, moe=arch.moe is not None)
        self._norm = loader.tensor(f"{prefix}.shared_head.norm.weight", arch.hidden)

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """`embedded`: of the successors; `hidden`: the main model's output (after its final norm), row by row."""
        x = self._join(embedded, hidden)
        self._layer(x, batch, kv)
        return self._k.rms_norm(x, self._norm, self._eps)


class Model:
    """Stateless but for its weights: the KV cache and the batch are arguments."""

    def __init__(self, arch: Arch, loader: Loader) -> None:
        self.arch = arch
        self._k: KernelTable = loader.kernels
        self._embed = loader.tensor("model.embed_tokens.weight", arch.vocab, arch.hidden)
        self._layers = [Layer(loader, f"model.layers.{i}", arch, moe=i in arch.moe_layers) for i in range(arch.layers)]
        self._norm = loader.tensor("model.norm.weight", arch.hidden)
        if arch.tied_head:
            self._head = loader.pack(self._embed)
        else:
            self._head = loader.linear(["lm_head"], [arch.vocab], arch.hidden)
        has_mtp = arch.mtp_layers > 0 and loader.has(f"model.layers.{arch.layers}.eh_proj.weight")
        self.mtp = Mtp(loader, arch) if has_mtp else None
        self._draft_head = self._head.first(min(arch.vocab, max(_DRAFT_TOKENS, arch.vocab // 4)))
        self._turns = turn_table(arch.rope, arch.context_tokens)
        self.num_bytes = loader.num_bytes

    @property
    def kv_layers(self) -> int:
        """Cache layers a sequence needs: one per layer, and one for the MTP layer."""
        return self.arch.layers + (self.mtp is not None)

    def hidden(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Final normed hidden state of every row. Writes the rows' KV into kv [kv_layers, slots, width]."""
        batch.turns = self._turns.index_select(0, batch.positions)
        x = self._embed.index_select(0, batch.tokens)
        for layer, layer_kv in zip(self._layers, kv.unbind(0), strict=False):
            layer(x, batch, layer_kv)
        return self._k.rms_norm(x, self._norm, self.arch.norm_eps)

    def mtp_hidden(self, batch: Batch, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """`batch.tokens` are the successors at their own positions, `hidden` that of the tokens before them."""
        assert self.mtp is not None
        embedded = self._embed.index_select(0, batch.tokens)
        batch.turns = self._turns.index_select(0, batch.positions)
        return self.mtp(embedded, hidden, batch, kv[self.arch.layers])

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the commonest tokens, -inf for all others: a guess need not know rare words, and costs much less so."""
        common = self._draft_head(hidden)
        logits = common.new_full((common.shape[0], self.arch.vocab), float("-inf"))
        logits[:, : common.shape[1]] = common
        return logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)
