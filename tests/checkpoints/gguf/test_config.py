from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tripool.checkpoints import GgufCheckpoint
from tripool.errors import CheckpointCorrupt, CheckpointError, WrongArchitecture


@pytest.fixture
def config_of(tmp_path, write_gguf, llama_parts):
    def read(architecture="llama", tensors=None, drop=(), **changes):
        metadata, stored = llama_parts()
        metadata = {key.replace("llama.", f"{architecture}."): value for key, value in metadata.items()}
        for key, value in changes.items():
            key = key.replace("__", ".")
            metadata[key if key.startswith(("split", "tokenizer", "general")) else f"{architecture}.{key}"] = value
        for key in drop:
            del metadata[f"{architecture}.{key}"]
        path = write_gguf(tmp_path / "m.gguf", architecture, metadata, stored | (tensors or {}))
        with GgufCheckpoint(path) as checkpoint:
            return checkpoint.config

    return read


def test_what_metadata_leaves_out_has_the_usual_value(config_of):
    config = config_of(drop=("attention.head_count_kv", "rope.freq_base"), attention__head_count=2)
    assert config["num_key_value_heads"] == 2
    assert config["rope_theta"] == 10000.0
    assert config["head_dim"] == 32
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert "rope_scaling" not in config
    assert config["vocab_size"] == 40


def test_biases_are_noticed(config_of):
    assert config_of()["attention_bias"] is False
    assert config_of(tensors={"blk.0.attn_q.bias": (np.zeros(64), "F32")})["attention_bias"] is True


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope__scaling__type": "none"}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
                "rope__scaling__yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_rope_scaling(config_of, changes, expected):
    scaling = config_of(**changes).get("rope_scaling")
    if expected is None:
        assert scaling is None
    else:
        assert {key: scaling[key] for key in expected} == expected
        assert "mscale" not in scaling


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_factors_are_recognised(config_of, factor):
    """The stored divisors are made with transformers' own Llama 3 frequencies."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, device="cpu")
    plain = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    factors = (np.asarray(plain / scaled), "F32")
    changes = {"rope__freq_base": 500000.0, "attention__key_length": 128}
    config = config_of(tensors={"rope_freqs.weight": factors}, **changes)
    assert config["rope_scaling"] == scaling
    wrong = (np.linspace(1, factor, 64), "F32")
    with pytest.raises(WrongArchitecture, match="Llama 3") as caught:
        config_of(tensors={"rope_freqs.weight": wrong}, **changes)
    assert caught.value.tensor == "rope_freqs.weight"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"architecture": "gemma"}, WrongArchitecture, "gemma"),
        ({"rope__scaling__type": "longrope"}, WrongArchitecture, "longrope"),
        ({"attention__head_count": [4, 4]}, WrongArchitecture, "layer to layer"),
        ({"split__count": 3}, CheckpointError, "split"),
        ({"drop": ("block_count",)}, CheckpointCorrupt, "llama.block_count is missing"),
        ({"embedding_length": "64"}, CheckpointCorrupt, "'64'"),
        ({"embedding_length": 64.5}, CheckpointCorrupt, "64.5"),
        ({"block_count": True}, CheckpointCorrupt, "True"),
        ({"split__count": [1]}, CheckpointCorrupt, "split.count"),
        ({"rope__scaling__type": [1]}, CheckpointCorrupt, "rope.scaling.type"),
    ],
)
def test_what_cannot_be_run_is_refused(config_of, changes, error, says):
    with pytest.raises(error, match=says) as caught:
        config_of(**changes)
    assert caught.value.hint
    assert caught.value.file.endswith("m.gguf")


def test_rope_factors_are_compared_with_the_head_before_memory_is_taken(config_of):
    factors = (np.ones(8), "F32")
    for width in (2**31, 0, 8):
        with pytest.raises(WrongArchitecture, match="Llama 3"):
            config_of(tensors={"rope_freqs.weight": factors}, attention__key_length=width)


@pytest.mark.parametrize(
    ("experts", "gating", "expected"), [(256, 2, (8, 4)), (160, 1, (8, 3)), (64, 1, (1, 1)), (384, 2, (1, 1))]
)
def test_expert_groups_of_files_older_than_their_keys(tmp_path, write_gguf, experts, gating, expected):
    integers = ("embedding_length", "feed_forward_length", "block_count", "context_length", "attention.head_count")
    integers += ("attention.kv_lora_rank", "rope.dimension_count", "expert_used_count", "expert_feed_forward_length")
    metadata = dict.fromkeys([f"deepseek2.{key}" for key in integers], 8)
    metadata |= {"deepseek2.attention.key_length": 24, "deepseek2.attention.value_length": 16}
    metadata |= {"deepseek2.attention.layer_norm_rms_epsilon": 1e-6}
    metadata |= {"deepseek2.expert_count": experts, "deepseek2.expert_gating_func": gating}
    path = write_gguf(tmp_path / "d.gguf", "deepseek2", metadata, {"token_embd.weight": (np.ones((3, 8)), "F32")})
    with GgufCheckpoint(path) as checkpoint:
        assert (checkpoint.config["n_group"], checkpoint.config["topk_group"]) == expected
        assert checkpoint.config["qk_nope_head_dim"] == 16
