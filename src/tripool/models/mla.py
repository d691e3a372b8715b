"""Multi-head latent attention (DeepSeek): queries through a low rank, keys and values through a shared latent."""

from __future__ import annotations

from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.table import AttentionSublayer
from tripool.kernels.weights import LatentWeights, Norm
from tripool.models.arch import Arch, MlaShape
from tripool.models.loader import Loader
from tripool.models.rope import to_pairs


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
