"""Qwen 2, 2.5 and 3 (R1-Distill-Qwen is one of them), and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from tripool.kernels.ref.route import RoutePlan
from tripool.models.arch import Arch, ConfigReader, GqaShape, MoeShape
from tripool.models.llama import dense_arch

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")


def read_arch(config: ConfigReader) -> Arch:
    config.demand("hidden_act", ("silu", "swish"), "silu")
    config.demand("use_sliding_window", (False,), False)
    kind = config.get("model_type")
    heads = config.int("num_attention_heads")
    attention_bias = config.flag("attention_bias", False)
    default_dim = 128 if kind == "qwen3" else config.int("hidden_size") // max(heads, 1)
    shape = GqaShape(
        heads=heads,
        kv_heads=config.int("num_key_value_heads", heads),
        head_dim=config.int("head_dim", default_dim),
        qkv_bias=attention_bias or kind == "qwen2",
        out_bias=attention_bias and kind != "qwen2",
        qk_norm=kind != "qwen2",
    )
    arch = dense_arch("qwen", config, shape)
    return _with_experts(config, arch) if kind == "qwen3_moe" else arch


def _with_experts(config: ConfigReader, arch: Arch) -> Arch:
    experts = config.int("num_experts", config.int("num_local_experts", 0))
    top_k = config.int("num_experts_per_tok")
    if experts and not 1 <= top_k <= experts:
        raise config.error(f"{top_k} of {experts} experts cannot be used")
    route = RoutePlan(top_k=top_k, score="softmax", normalise=config.flag("norm_topk_prob", False))
    shape = MoeShape(
        experts=experts,
        width=config.int("moe_intermediate_size"),
        shared_width=0,
        route=route,
        correction_bias=False,
    )
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise config.error("'mlp_only_layers' is no list of layers")
    every = config.int("decoder_sparse_step", 1)
    if experts and every == 0:
        raise config.error("'decoder_sparse_step' is 0")
    if experts:
        config.positive("moe_intermediate_size")
    moe = {i for i in range(arch.layers) if i not in dense and experts > 0 and (i + 1) % every == 0}
    return replace(arch, moe=shape, moe_layers=frozenset(moe))
