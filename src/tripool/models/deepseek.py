"""DeepSeek V2, V2-Lite, V3 and R1 (Kimi-K2 and Moonlight share the V3 network): MLA and routed experts."""

from __future__ import annotations

from tripool.kernels.ref.route import RoutePlan
from tripool.models.arch import Arch, ConfigReader, MlaShape, MoeShape
from tripool.models.rope import read_rope, yarn_sharpness

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def read_arch(config: ConfigReader) -> Arch:
    config.demand("hidden_act", ("silu", "swish"), "silu")
    config.positive("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "kv_lora_rank")
    config.positive("max_position_embeddings", "v_head_dim", "intermediate_size", "qk_nope_head_dim")
    v2 = config.get("model_type") == "deepseek_v2"
    rope_dim, nope = config.int("qk_rope_head_dim"), config.int("qk_nope_head_dim")
    rope = read_rope(config, rope_dim, paired=v2 or config.flag("rope_interleave", True))
    scale = (rope_dim + nope) ** -0.5
    if rope.kind != "default" and rope.extra.get("mscale_all_dim"):
        sharpness = config.finite("mscale_all_dim", rope.extra["mscale_all_dim"])
        scale *= yarn_sharpness(rope.extra["factor"], sharpness) ** 2
    attention = MlaShape(
        heads=config.int("num_attention_heads"),
        q_rank=config.int("q_lora_rank") if config.get("q_lora_rank") else None,
        kv_rank=config.int("kv_lora_rank"),
        nope=nope,
        rope=rope_dim,
        v=config.int("v_head_dim"),
        bias=config.flag("attention_bias", False),
        scale=scale,
    )
    layers = config.int("num_hidden_layers")
    first, every = config.int("first_k_dense_replace", 0), config.int("moe_layer_freq", 1)
    experts = config.int("n_routed_experts", 0)
    if experts and every == 0:
        raise config.error("'moe_layer_freq' is 0")
    moe_layers = [i for i in range(layers) if experts and i >= first and i % every == 0]
    return Arch(
        family="deepseek",
        vocab=config.int("vocab_size"),
        hidden=config.int("hidden_size"),
        layers=layers,
        context_tokens=config.int("max_position_embeddings"),
        norm_eps=config.float("rms_norm_eps", 1e-6),
        tied_head=config.flag("tie_word_embeddings", False),
        rope=rope,
        attention=attention,
        dense_width=config.int("intermediate_size"),
        mlp_bias=v2 and config.flag("mlp_bias", False),
        moe=_experts(config, experts, v2=v2) if experts else None,
        moe_layers=frozenset(moe_layers),
        mtp_layers=config.int("num_nextn_predict_layers", 0),
    )


def _experts(config: ConfigReader, experts: int, *, v2: bool) -> MoeShape:
    if v2:
        method = config.demand("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        config.demand("scoring_func", ("softmax",), "softmax")
        grouped = method == "group_limited_greedy"
    else:
        config.demand("topk_method", ("noaux_tc",), "noaux_tc")
        config.demand("scoring_func", ("sigmoid",), "sigmoid")
        grouped = config.int("n_group", 1) > 1
    groups = config.int("n_group") if grouped else 1
    top_groups = config.int("topk_group") if grouped else 1
    top_k = config.int("num_experts_per_tok")
    config.positive("moe_intermediate_size")
    if (
        groups == 0
        or top_groups == 0
        or top_k == 0
        or experts % groups
        or top_groups > groups
        or top_k > experts // groups * top_groups
    ):
        raise config.error(f"{top_k} of {experts} experts cannot come from {top_groups} of {groups} groups")
    route = RoutePlan(
        top_k=top_k,
        score="softmax" if v2 else "sigmoid",
        groups=groups,
        top_groups=top_groups,
        group_top=1 if v2 else 2,
        # V2's published networks either normalise or scale, and all of them scale.
        normalise=config.flag("norm_topk_prob", not v2) and not v2,
        scaling=config.float("routed_scaling_factor", 1.0 if v2 else 2.5),
    )
    width = config.int("moe_intermediate_size")
    shared = width * config.int("n_shared_experts", 0)
    return MoeShape(experts=experts, width=width, shared_width=shared, route=route, correction_bias=not v2)
