"""Multi-head latent attention (DeepSeek): queries through a low rank, keys and values through a shared latent."""

from __future__ import annotations

from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.table import AttentionHalf
from tripool.kernels.weights import LatentWeights, Norm
from tripool.models.arch import Arch, MlaShape
from tripool.models.loader import Loader
from tripool.models.rope import to_pairs


def latent_attention(loader: Loader, prefix: str, norm: Norm, arch: Arch, shape: MlaShape) -> AttentionHalf:
    q_out, latent = shape.heads * (shape.nope + shape.rope), shape.kv_rank + shape.rope
    names, outs = [f"{prefix}.kv_a_proj_with_mqa"], [latent]
    q_norm: Norm | None = None
    if shape.q_rank is None:
        query = loader.fused([f"{prefix}.q_proj"], [q_out], arch.hidden)
    else:
        names, outs = [f"{prefix}.q_a_proj", *names], [shape.q_rank, *outs]
        q_norm = Norm(loader.tensor(f"{prefix}.q_a_layernorm.weight", shape.q_rank), shape.norm_eps)
        query = loader.fused([f"{prefix}.q_b_proj"], [q_out], shape.q_rank)
    down = loader.fused(names, outs, arch.hidden)
    down_bias = loader.bias(names, outs) if shape.bias else None
    to_pairs(down[-shape.rope :], arch.rope)
    if down_bias is not None:
        to_pairs(down_bias[-shape.rope :], arch.rope)
    for head in query.view(shape.heads, shape.nope + shape.rope, -1):
        to_pairs(head[shape.nope :], arch.rope)
    up = loader.fused([f"{prefix}.kv_b_proj"], [shape.heads * (shape.nope + shape.v)], shape.kv_rank)
    out = [f"{prefix}.o_proj"]
    core = MlaWeights(
        query=query,
        up=up.view(shape.heads, shape.nope + shape.v, shape.kv_rank),
        out=loader.fused(out, [arch.hidden], shape.heads * shape.v),
        out_bias=loader.bias(out, [arch.hidden]) if shape.bias else None,
        nope=shape.nope,
        scale=shape.scale,
    )
    kv_norm = Norm(loader.tensor(f"{prefix}.kv_a_layernorm.weight", shape.kv_rank), shape.norm_eps)
    weights = LatentWeights(norm=norm, down=down, down_bias=down_bias, q_norm=q_norm, kv_norm=kv_norm, core=core)
    return loader.counted(loader.kernels.mla(weights))
