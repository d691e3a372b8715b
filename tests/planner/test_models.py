"""Shapes from configs, against totals that the models' own pages state."""

from __future__ import annotations

import json
from importlib.resources import files

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
    "deepseek-v3.2": (671, 37, 0.04),  # the indexer beside V3's 37 B
    "kimi-k2": (1040, 32, 0.03),
    "glm-4.5": (355, 32, 0.06),
    "glm-5": (744, 40, 0.05),
    "gpt-oss-120b": (116.8, 5.1, 0.13),  # "5.1 B active" leaves the embedding out
    "qwen3-next-80b-a3b": (80, 3, 0.3),  # "A3B" leaves embedding and head out
    "qwen3.5-397b-a17b": (397, 17, 0.03),
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
        ("deepseek-v3.2", 70_272 + 61 * 132),  # and the indexer's keys in 8 bits
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2),  # a quarter of the layers keeps a cache
        ("gpt-oss-120b", 18 * 2 * 8 * 64 * 2),  # half of the layers keeps a window
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
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"n_routed_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok"),
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


V3 = {
    "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 64,
    "num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def test_sparse_attention_is_read_whatever_a_config_calls_itself() -> None:
    keys = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 64}
    dense, sparse = read_config(V3, "dense").attention, read_config(V3 | keys, "sparse").attention
    assert dense.attended(1000) == 1000 and sparse.attended(1000) == 64 == sparse.index_topk
    assert sparse.attended(10) == 10 and sparse.index_bytes > 0 == dense.index_bytes
    with pytest.raises(BadModelConfig, match="index_head_dim"):
        read_config(V3 | {"index_topk": 64, "index_n_heads": 2}, "half")


@pytest.mark.parametrize("key", ["zero_expert_num", "compress_ratios"])
def test_a_design_without_a_shape_is_refused(key: str) -> None:
    with pytest.raises(BadModelConfig, match=key):
        read_config(V3 | {key: 256}, "other")


def test_hybrids_keep_states_of_fixed_size() -> None:
    hybrid, windows = named_model("qwen3-next-80b-a3b"), named_model("gpt-oss-120b")
    assert (hybrid.full_layers, hybrid.linear_layers) == (12, 36)
    assert hybrid.state_bytes() == 36 * 32 * 128 * 128 * 4
    assert (windows.full_layers, windows.windowed_layers, windows.window) == (18, 18, 128)
    assert windows.state_bytes() == 18 * 128 * 2 * 8 * 64 * 2 and named_model("deepseek-r1").state_bytes() == 0


def test_every_bundled_config_names_its_source() -> None:
    for name in model_names():
        text = files("tripool.planner.models").joinpath(f"{name}.json").read_text("utf-8")
        assert json.loads(text)["_source"].startswith("huggingface.co/")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadModelConfig, match="deepseek-r1"):
        named_model("gpt-5")


@pytest.mark.parametrize("name", ["DeepSeek-R1", "deepseek-ai/DeepSeek-R1", "deepseek-r1"])
def test_a_model_by_the_name_it_has_on_hugging_face(name: str) -> None:
    assert named_model(name) == named_model("deepseek-r1")
