"""Grouped-query attention with rotary positions: Llama, Qwen 2 and 3."""

from __future__ import annotations

from functools import partial

from tripool.kernels.table import AttentionSublayer
from tripool.kernels.weights import GqaWeights, Norm
from tripool.models.arch import Arch, GqaShape
from tripool.models.loader import Loader
from tripool.models.rope import to_pairs


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
