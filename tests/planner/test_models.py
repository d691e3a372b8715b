"""Shapes from configs, against totals that the models' own pages state."""

from __future__ import annotations

import pytest

from tripool.planner.errors import BadModelConfig
from tripool.planner.models import model_names, named_model, read_config

BILLION = 1e9

# Total and active parameters as published, in billions, and how closely they are stated.
PUBLISHED = {
    "deepseek-v3": (671, 37, 0.02),
    "deepseek-r1": (671, 37, 0.02),
    "deepseek-v2": (236, 21, 0.02),
    "deepseek-v2-lite": (15.7, 2.4, 0.12),  # "2.4 B activated" leaves the embedding out
    "kimi-k2": (1040, 32, 0.03),
    "qwen3-235b-a22b": (235, 22, 0.01),
    "qwen3-30b-a3b": (30.5, 3.3, 0.02),
    "llama-3-8b": (8.03, 8.03, 0.001),
    "llama-3-70b": (70.55, 70.55, 0.001),
}


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_the_published_ones(name: str) -> None:
    total, active, within = PUBLISHED[name]
    model = named_model(name)
    assert model.total_params / BILLION == pytest.approx(total, rel=within)
    assert model.active_params / BILLION == pytest.approx(active, rel=within)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("deepseek-v3", 70_272),  # "70 KB per token" in the V3 report's follow-up
        ("llama-3-70b", 327_680),  # 80 layers x 2 x 8 heads x 128 x 2 bytes
        ("llama-3-8b", 131_072),
        ("qwen3-30b-a3b", 98_304),
    ],
)
def test_kv_per_token(name: str, kv_bytes: int) -> None:
    assert named_model(name).kv_bytes_per_token() == kv_bytes


def test_operations_of_one_token() -> None:
    """Two per active parameter; the V3 report's 37 B count the embedding, which is only looked up."""
    model = named_model("deepseek-v3")
    assert model.flops_per_token / BILLION == pytest.approx(2 * (37.55 - 0.927), rel=0.002)


def test_a_head_tied_to_the_embedding_is_counted_once() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    tied, apart = read_config(config, "tied"), read_config(config | {"tie_word_embeddings": False}, "apart")
    assert apart.total_params - tied.total_params == 64_000
    assert tied.flops_per_token == apart.flops_per_token


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "sizes of 0"),
        ({"n_routed_experts": 4, "num_experts_per_tok": 8}, "8 of 4 experts"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_odd_configs_are_refused_by_name(change: dict[str, object], named: str) -> None:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "intermediate_size": 64, "num_attention_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }  # fmt: skip
    read_config(config, "plain")
    with pytest.raises(BadModelConfig, match=named):
        read_config(config | change, "odd")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadModelConfig, match="deepseek-r1"):
        named_model("gpt-5")


@pytest.mark.parametrize("name", ["DeepSeek-R1", "deepseek-ai/DeepSeek-R1", "deepseek-r1"])
def test_a_model_by_the_name_it_has_on_hugging_face(name: str) -> None:
    assert named_model(name) == named_model("deepseek-r1")
