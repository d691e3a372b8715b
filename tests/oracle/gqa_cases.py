"""Llama, Qwen 2, Qwen 3 and Qwen3-MoE: grouped-query attention."""

from __future__ import annotations

from typing import Any

from oracle.case import make_case, rope


def _llama3(theta: float, factor: float) -> dict[str, Any]:
    return rope("llama3", theta, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)


def _gqa(hidden: int, heads: int, kv_heads: int, head_dim: int | None = None) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return sizes if head_dim is None else sizes | {"head_dim": head_dim}


def _qwen_moe(experts: int, top_k: int, width: int, *, normalise: bool) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "norm_topk_prob": normalise,
    }


LLAMA = [
    make_case("llama-3", "llama", _gqa(84, 7, 1), rope=_llama3(500000.0, 8.0), sharded=True, published=True, layers=3),
    make_case(
        "llama-wide-heads",
        "llama",
        _gqa(63, 9, 3, 20),
        rope=rope(theta=2000.0),
        tie_word_embeddings=True,
        attention_bias=True,
        vocab=197,
    ),
    make_case("llama-no-groups", "llama", _gqa(50, 5, 5), rope=rope(theta=500000.0), mlp_bias=True, rms_norm_eps=0.01),
    make_case(
        "llama-linear",
        "llama",
        _gqa(90, 15, 5, 10),
        rope=rope("linear", factor=2.5),
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        published=True,
    ),
    make_case("llama-yarn", "llama", _gqa(36, 3, 1), rope=rope("yarn", 3000.0, beta_fast=8), width=101),
]

QWEN2 = [
    make_case("qwen2-7-1", "qwen2", _gqa(84, 7, 1), rope=rope(theta=1000000.0), published=True, sharded=True),
    make_case("qwen2-tied", "qwen2", _gqa(90, 9, 3), rope=rope(), tie_word_embeddings=True, layers=3),
    make_case("qwen2-yarn", "qwen2", _gqa(60, 5, 5), rope=rope("yarn", 1000.0), vocab=193, rms_norm_eps=0.01),
    make_case("qwen2-15-3", "qwen2", _gqa(90, 15, 3), rope=rope(theta=400.0), tie_word_embeddings=True, published=True),
]

QWEN3 = [
    make_case(
        "qwen3-tied", "qwen3", _gqa(50, 5, 1, 12), rope=rope(theta=1000000.0), tie_word_embeddings=True, layers=3
    ),
    make_case("qwen3-no-groups", "qwen3", _gqa(70, 7, 7, 20), rope=rope(), published=True, sharded=True),
    make_case("qwen3-biased", "qwen3", _gqa(45, 9, 3, 10), rope=rope(), attention_bias=True, vocab=199),
    make_case("qwen3-yarn", "qwen3", _gqa(58, 3, 1, 24), rope=rope("yarn", 2000.0), rms_norm_eps=0.01),
]


QWEN3_MOE = [
    make_case(
        "qwen3-moe-normalised",
        "qwen3_moe",
        _gqa(50, 5, 1, 12),
        _qwen_moe(9, 3, 13, normalise=True),
        rope=rope(theta=1000000.0),
        published=True,
        sharded=True,
    ),
    make_case(
        "qwen3-moe-plain",
        "qwen3_moe",
        _gqa(70, 7, 7, 10),
        _qwen_moe(7, 4, 9, normalise=False),
        rope=rope(),
        layers=3,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
    ),
    make_case(
        "qwen3-moe-every-second",
        "qwen3_moe",
        _gqa(45, 9, 3, 20),
        _qwen_moe(5, 2, 17, normalise=True),
        rope=rope("yarn", 2000.0),
        layers=3,
        decoder_sparse_step=2,
        attention_bias=True,
    ),
    make_case(
        "qwen3-moe-one-expert",
        "qwen3_moe",
        _gqa(58, 3, 1, 14),
        _qwen_moe(11, 1, 21, normalise=False),
        rope=rope(),
        vocab=193,
        rms_norm_eps=0.01,
    ),
]
