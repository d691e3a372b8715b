"""The network in training: embedding, layers, head and the MTP layer, with the shapes that `tripool.models` reads.

Parameters are float32. Two of them are stored wider than a checkpoint has them (gates with ups, all experts together);
`tripool.train.export` gives them their published names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tripool.models.arch import Arch, MlaShape
from tripool.models.rope import rope_table
from tripool.train.attention import Attend, LatentAttention, Linear, Norm
from tripool.train.config import TrainError
from tripool.train.experts import Dense, Experts


def trainable(arch: Arch) -> MlaShape:
    """The attention's shape, of a network that this room can train."""
    if not isinstance(arch.attention, MlaShape) or arch.attention.bias or not arch.rope.paired:
        hint = "the trainer makes DeepSeek-V3 networks: no attention_bias, rope_interleave on"
        raise TrainError("another attention than can be trained here", hint=hint, key="model")
    if arch.moe is not None and not arch.moe.correction_bias:
        raise TrainError("routing without a bias", hint='give model_type = "deepseek_v3"', key="model.model_type")
    if arch.mtp_layers > 1:
        hint = "one layer is all that drafts use"
        raise TrainError(f"is {arch.mtp_layers}", hint=hint, key="model.num_nextn_predict_layers")
    return arch.attention


class Layer(nn.Module):
    def __init__(self, arch: Arch, attend: Attend, *, moe: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(arch.hidden, arch.norm_eps)
        self.self_attn = LatentAttention(arch, attend)
        self.post_attention_layernorm = Norm(arch.hidden, arch.norm_eps)
        assert arch.moe is not None or not moe
        self.mlp: Dense | Experts
        self.mlp = Experts(arch, arch.moe) if moe and arch.moe else Dense(arch.hidden, arch.dense_width)

    def forward(
        self, x: torch.Tensor, sight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, real: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), sight, cos, sin)
        added, load = self.mlp(self.post_attention_layernorm(x), real)
        return x + added, load


class Mtp(nn.Module):
    """From a token's final state and its successor, the state that says the successor's successor."""

    def __init__(self, arch: Arch, attend: Attend) -> None:
        super().__init__()
        self.enorm = Norm(arch.hidden, arch.norm_eps)
        self.hnorm = Norm(arch.hidden, arch.norm_eps)
        self.eh_proj = Linear(2 * arch.hidden, arch.hidden)
        self.layer = Layer(arch, attend, moe=arch.moe is not None)
        self.norm = Norm(arch.hidden, arch.norm_eps)


@dataclass(slots=True)
class States:
    """What the head reads, and how the experts were used."""

    hidden: torch.Tensor
    """[rows, row_tokens, hidden]: says the next token."""
    mtp: torch.Tensor | None
    """The same shape: says the one after it. Without meaning at a document's last token."""
    loads: list[torch.Tensor]
    """Tokens per expert, of each layer that has experts, the MTP layer's last."""


class Network(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, arch: Arch, attend: Attend, row_tokens: int) -> None:
        super().__init__()
        self.arch = arch
        self.embed = nn.Parameter(torch.empty(arch.vocab, arch.hidden))
        self.layers = nn.ModuleList([Layer(arch, attend, moe=i in arch.moe_layers) for i in range(arch.layers)])
        self.norm = Norm(arch.hidden, arch.norm_eps)
        self.head = self.embed if arch.tied_head else nn.Parameter(torch.empty(arch.vocab, arch.hidden))
        self.mtp = Mtp(arch, attend) if arch.mtp_layers else None
        cos_sin = rope_table(arch.rope, row_tokens)[:, None]
        self.register_buffer("cos", cos_sin.real.contiguous(), persistent=False)
        self.register_buffer("sin", cos_sin.imag.contiguous(), persistent=False)

    @torch.no_grad()
    def begin(self, std: float, seed: int) -> None:
        """Random weights; those that write into the stream smaller, so that it does not grow with depth."""
        rng = torch.Generator().manual_seed(seed)
        smaller = (2 * self.arch.layers) ** -0.5
        outs = {id(one.weight) for one in self.modules() if isinstance(one, Linear) and one.out}
        for weight in self.parameters():
            if weight.ndim > 1:
                values = torch.randn(weight.shape, generator=rng) * std
                weight.copy_(values * smaller if id(weight) in outs else values)

    def forward(self, tokens: torch.Tensor, sight: torch.Tensor, real: torch.Tensor) -> States:
        """tokens int64 [rows, row_tokens]."""
        hidden, loads = self.trunk(tokens, sight, real)
        mtp = None
        if self.mtp is not None:
            mtp, load = self.ahead(hidden, tokens, sight, real)
            loads.append(load)
        return States(hidden, mtp, [load for load in loads if load.numel()])

    def trunk(
        self, tokens: torch.Tensor, sight: torch.Tensor, real: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`States.hidden`, and the load of each layer."""
        loads = []
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            x, load = layer(x, sight, self.cos, self.sin, real)
            loads.append(load)
        return self.norm(x), loads

    def ahead(
        self, hidden: torch.Tensor, tokens: torch.Tensor, sight: torch.Tensor, real: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`States.mtp` of final states, and the load of its experts."""
        mtp = self.mtp
        assert mtp is not None
        successors = F.embedding(tokens.roll(-1, 1), self.embed)
        joined = torch.cat((mtp.enorm(successors), mtp.hnorm(hidden)), -1)
        x, load = mtp.layer(mtp.eh_proj(joined).float(), sight, self.cos, self.sin, real)
        return mtp.norm(x), load

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.head)

    def experts(self) -> list[Experts]:
        """In the order of `States.loads`."""
        return [one for one in self.modules() if isinstance(one, Experts)]
