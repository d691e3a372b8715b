"""Grouped-query attention with rotary positions: Llama, Qwen 2 and 3."""

from __future__ import annotations

import torch

from tripool.models.arch import Arch, GqaShape
from tripool.models.batch import Batch
from tripool.models.loader import Loader
from tripool.models.rope import to_pairs


class GroupedAttention:
    def __init__(self, loader: Loader, prefix: str, arch: Arch, shape: GqaShape) -> None:
        self._shape, self._k, self._eps = shape, loader.kernels, arch.norm_eps
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        weight = loader.fused(names, [query, key, key], arch.hidden)
        bias = loader.bias(names, [query, key, key]) if shape.qkv_bias else None
        for head in range(shape.heads + shape.kv_heads):
            rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            to_pairs(weight[rows], arch.rope)
            if bias is not None:
                to_pairs(bias[rows], arch.rope)
        self._qkv = loader.pack(weight, bias)
        self._out = loader.linear([f"{prefix}.o_proj"], [arch.hidden], query, bias=shape.out_bias)
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if shape.qk_norm:
            q_norm = loader.tensor(f"{prefix}.q_norm.weight", shape.head_dim)
            k_norm = loader.tensor(f"{prefix}.k_norm.weight", shape.head_dim)
            to_pairs(q_norm, arch.rope)
            to_pairs(k_norm, arch.rope)
            self._norms = q_norm, k_norm
        self._scale = shape.head_dim**-0.5

    def __call__(self, x: torch.Tensor, batch: Batch, turns: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        shape, k = self._shape, self._k
        rows, turned = len(x), shape.heads + shape.kv_heads
        qkv = self._qkv(x).view(rows, turned + shape.kv_heads, shape.head_dim)
        queries, keys = qkv[:, : shape.heads], qkv[:, shape.heads : turned]
        if self._norms is not None:
            qkv[:, : shape.heads] = k.rms_norm(queries, self._norms[0], self._eps)
            qkv[:, shape.heads : turned] = k.rms_norm(keys, self._norms[1], self._eps)
        k.rope_(qkv[:, :turned], turns)
        kv.index_copy_(0, batch.slots, qkv[:, shape.heads :].flatten(1))
        q, n = qkv[:, : shape.heads], batch.num_prompt_rows
        if n == 0:
            return self._out(k.attend_decode(q, kv, batch.decodes, shape.kv_heads, self._scale))
        if n == rows:
            return self._out(k.attend_prompt(q, kv, batch.prompts, shape.kv_heads, self._scale))
        prompt = k.attend_prompt(q[:n], kv, batch.prompts, shape.kv_heads, self._scale)
        decode = k.attend_decode(q[n:], kv, batch.decodes, shape.kv_heads, self._scale)
        return self._out(torch.cat((prompt, decode)))
