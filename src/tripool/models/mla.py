"""Multi-head latent attention (DeepSeek): queries through a low rank, keys and values through a shared latent."""

from __future__ import annotations

import torch

from tripool.kernels.ref.mla import MlaWeights
from tripool.models.arch import Arch, MlaShape
from tripool.models.batch import Batch
from tripool.models.loader import Loader
from tripool.models.rope import to_pairs


class LatentAttention:
    def __init__(self, loader: Loader, prefix: str, arch: Arch, shape: MlaShape) -> None:
        self._shape, self._k = shape, loader.kernels
        q_out, latent = shape.heads * (shape.nope + shape.rope), shape.kv_rank + shape.rope
        down = [] if shape.q_rank is None else [f"{prefix}.q_a_proj"]
        outs = [] if shape.q_rank is None else [shape.q_rank]
        names = [*down, f"{prefix}.kv_a_proj_with_mqa"]
        weight = loader.fused(names, [*outs, latent], arch.hidden)
        bias = loader.bias(names, [*outs, latent]) if shape.bias else None
        to_pairs(weight[-shape.rope :], arch.rope)
        if bias is not None:
            to_pairs(bias[-shape.rope :], arch.rope)
        if shape.q_rank is None:
            query = loader.fused([f"{prefix}.q_proj"], [q_out], arch.hidden)
        else:
            self._q_norm = loader.tensor(f"{prefix}.q_a_layernorm.weight", shape.q_rank)
            query = loader.fused([f"{prefix}.q_b_proj"], [q_out], shape.q_rank)
        for head in query.view(shape.heads, shape.nope + shape.rope, -1):
            to_pairs(head[shape.nope :], arch.rope)
        self._down = loader.pack(weight, bias)
        self._kv_norm = loader.tensor(f"{prefix}.kv_a_layernorm.weight", shape.kv_rank)
        up = loader.fused([f"{prefix}.kv_b_proj"], [shape.heads * (shape.nope + shape.v)], shape.kv_rank)
        out = [f"{prefix}.o_proj"]
        weights = MlaWeights(
            query=query,
            up=up.view(shape.heads, shape.nope + shape.v, shape.kv_rank),
            out=loader.fused(out, [arch.hidden], shape.heads * shape.v),
            out_bias=loader.bias(out, [arch.hidden]) if shape.bias else None,
            nope=shape.nope,
            scale=shape.scale,
        )
        self._attend = loader.mla(weights)

    def __call__(self, x: torch.Tensor, batch: Batch, turns: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        shape, k = self._shape, self._k
        down = self._down(x)
        if shape.q_rank is not None:
            x = k.rms_norm(down[:, : shape.q_rank], self._q_norm, shape.norm_eps)
            down = down[:, shape.q_rank :]
        k.rope_(down[:, None, shape.kv_rank :], turns)
        down[:, : shape.kv_rank] = k.rms_norm(down[:, : shape.kv_rank], self._kv_norm, shape.norm_eps)
        kv.index_copy_(0, batch.slots, down)
        n = batch.num_prompt_rows
        if n == 0:
            return self._attend.decode(x, kv, batch.decodes, turns)
        if n == len(x):
            return self._attend.prompt(x, kv, batch.prompts, turns)
        prompt = self._attend.prompt(x[:n], kv, batch.prompts, turns[:n])
        return torch.cat((prompt, self._attend.decode(x[n:], kv, batch.decodes, turns[n:])))
