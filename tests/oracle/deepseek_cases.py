"""DeepSeek V3, V2 and V2-Lite (no low-rank query): latent attention and routed experts."""

from __future__ import annotations

from typing import Any

from oracle.case import make_case, rope


def _mla(hidden: int, heads: int, nope: int, rope: int, v: int, kv: int, q: int | None) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v,
        "kv_lora_rank": kv,
        "q_lora_rank": q,
    }


def _moe(experts: int, top_k: int, width: int, shared: int, dense_layers: int, scaling: float) -> dict[str, Any]:
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense_layers,
        "routed_scaling_factor": scaling,
    }


V3 = [
    make_case(
        "v3-groups",
        "deepseek_v3",
        _mla(60, 3, 10, 12, 14, 22, 18),
        _moe(12, 3, 13, 1, 1, 2.5),
        rope=rope("yarn", beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        layers=3,
        n_group=3,
        topk_group=2,
        sharded=True,
        published=True,
        mtp=True,
    ),
    make_case(
        "v3-unnormalised",
        "deepseek_v3",
        _mla(44, 5, 14, 10, 6, 26, 20),
        _moe(6, 2, 9, 2, 0, 1.3),
        rope=rope("yarn", 5000.0, beta_fast=8, beta_slow=2, mscale=0.7, mscale_all_dim=1.1),
        vocab=197,
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        attention_bias=True,
        rms_norm_eps=0.01,
        mtp=True,
    ),
    make_case(
        "v3-one-group",
        "deepseek_v3",
        _mla(100, 7, 6, 20, 10, 18, 30),
        _moe(7, 5, 11, 1, 2, 0.9),
        rope=rope(theta=500.0),
        layers=3,
        vocab=223,
        n_group=1,
        topk_group=1,
        tie_word_embeddings=True,
        published=True,
    ),
    make_case(
        "v3-plain-query",
        "deepseek_v3",
        _mla(52, 3, 18, 14, 22, 34, None),
        _moe(8, 3, 15, 2, 1, 2.0),
        rope=rope("yarn", beta_fast=16, beta_slow=1),
        n_group=4,
        topk_group=3,
        norm_topk_prob=False,
        mtp=True,
    ),
    make_case(
        "v3-all-experts",
        "deepseek_v3",
        _mla(70, 5, 12, 6, 12, 10, 14),
        _moe(9, 9, 7, 1, 0, 1.1),
        rope=rope("yarn", mscale=1.0, mscale_all_dim=0.5, attention_factor=1.2, truncate=False),
        vocab=199,
        n_group=3,
        topk_group=3,
        rope_interleave=False,
        sharded=True,
    ),
]

V2 = [
    make_case(
        "v2-groups",
        "deepseek_v2",
        _mla(60, 3, 10, 12, 14, 22, 18),
        _moe(12, 3, 13, 2, 1, 1.7),
        rope=rope("yarn", mscale=0.707, mscale_all_dim=0.707),
        layers=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        sharded=True,
        published=True,
    ),
    make_case(
        "v2-biased",
        "deepseek_v2",
        _mla(45, 5, 14, 10, 6, 26, 20),
        _moe(6, 2, 9, 1, 1, 0.5),
        rope=rope(theta=700.0),
        vocab=197,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=0.01,
    ),
    make_case(
        "v2-two-groups",
        "deepseek_v2",
        _mla(84, 7, 6, 18, 10, 18, 30),
        _moe(10, 4, 11, 1, 0, 3.1),
        rope=rope("yarn", beta_fast=8, beta_slow=2, mscale=0.6, mscale_all_dim=1.2),
        topk_method="group_limited_greedy",
        n_group=2,
        topk_group=1,
    ),
    make_case(
        "v2-all-dense",
        "deepseek_v2",
        _mla(55, 5, 12, 14, 16, 20, 22),
        _moe(5, 2, 9, 2, 2, 1.4),
        rope=rope("yarn", beta_fast=16),
        tie_word_embeddings=True,
    ),
]

V2_LITE = [
    make_case(
        "v2-lite-published",
        "deepseek_v2",
        _mla(60, 5, 10, 12, 14, 22, None),
        _moe(9, 4, 13, 2, 1, 1.0),
        rope=rope("yarn", mscale=0.707, mscale_all_dim=0.707),
        published=True,
    ),
    make_case(
        "v2-lite-scaled",
        "deepseek_v2",
        _mla(42, 7, 18, 6, 10, 14, None),
        _moe(5, 2, 17, 1, 0, 2.2),
        rope=rope(theta=300.0),
        vocab=193,
        attention_bias=True,
    ),
    make_case(
        "v2-lite-groups",
        "deepseek_v2",
        _mla(90, 3, 20, 10, 26, 30, None),
        _moe(9, 4, 9, 3, 1, 1.6),
        rope=rope("yarn", mscale=1.3, mscale_all_dim=0.8),
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        sharded=True,
    ),
    make_case(
        "v2-lite-one-expert",
        "deepseek_v2",
        _mla(39, 3, 6, 22, 18, 12, None),
        _moe(7, 1, 21, 1, 0, 4.0),
        rope=rope("linear", factor=2.5),
        rms_norm_eps=0.01,
    ),
]
