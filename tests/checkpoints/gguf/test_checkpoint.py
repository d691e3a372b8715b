"""Whole small models written as GGUF and read back, against what went in and against transformers' own reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tripool.checkpoints import GgufCheckpoint
from tripool.errors import TensorMissing, TensorShape

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)),
}


def pair(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The converter's order for `llama`: row i of a head beside row i + half."""
    heads = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    prefix = ""
    if name.startswith("model.layers."):
        _, _, layer, name = name.split(".", 3)
        prefix = f"blk.{layer}."
    stem, suffix = name.rsplit(".", 1)
    return f"{prefix}{NAMES[stem]}.{suffix}"


def convert(model, architecture: str, kind: str):
    config = model.config
    metadata = {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10000.0,
        "vocab_size": config.vocab_size,
    }
    if architecture != "qwen2":
        metadata["attention.key_length"] = config.head_dim
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            values = pair(values, heads)
        tensors[gguf_name(name)] = (values, kind if values.ndim == 2 else "F32")
    return {f"{architecture}.{key}": value for key, value in metadata.items()}, tensors


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_agrees_with_transformers(tmp_path, write_gguf, vocabulary, byte_level, read_all, architecture, kind):
    torch.manual_seed(0)
    model = FAMILIES[architecture]()
    metadata, tensors = convert(model, architecture, kind)
    metadata |= vocabulary(byte_level, pre="gpt-2")
    write_gguf(tmp_path / "m.gguf", architecture, metadata, tensors)
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)
    with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
        read = read_all(checkpoint)
        config = checkpoint.config
    state, their_config = theirs["tensors"], theirs["config"]
    assert read.keys() == state.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, state[name]), name
        if kind == "F32":
            assert torch.equal(tensor, model.state_dict()[name]), name
    assert {key: config[key] for key in SIZES} == SIZES
    for key in ("tie_word_embeddings", "rope_theta", "bos_token_id", "eos_token_id"):
        assert config[key] == their_config[key], key
    assert config["head_dim"] == (32 if architecture == "qwen3" else 16)


HEADS, NOPE, ROPE, V, LATENT, Q_LATENT, HIDDEN, EXPERTS = 2, 32, 16, 32, 64, 32, 64, 4
PROJECTIONS = {"gate": (32, HIDDEN), "up": (32, HIDDEN), "down": (HIDDEN, 32)}
DEEPSEEK_NAMES = NAMES | {
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in PROJECTIONS},
}


def deepseek_shapes(lite: bool) -> dict[str, tuple[int, ...]]:
    """A dense layer and a layer of experts, under Hugging Face names. `lite` has whole queries and no bias."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (40, HIDDEN)}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (40, HIDDEN)}
    queries = {
        "self_attn.q_a_proj.weight": (Q_LATENT, HIDDEN),
        "self_attn.q_a_layernorm.weight": (Q_LATENT,),
        "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_LATENT),
    }
    if lite:
        queries = {"self_attn.q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN)}
    attention = queries | {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (LATENT,),
        "self_attn.kv_b_proj.weight": (HEADS * (NOPE + V), LATENT),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * V),
    }
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in attention.items()}
    shapes["model.layers.1.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    if not lite:
        shapes["model.layers.1.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    for name, shape in PROJECTIONS.items():
        shapes[f"model.layers.0.mlp.{name}_proj.weight"] = shape
        shapes[f"model.layers.1.mlp.shared_experts.{name}_proj.weight"] = shape
        shapes |= {f"model.layers.1.mlp.experts.{e}.{name}_proj.weight": shape for e in range(EXPERTS)}
    return shapes


def deepseek_tensors(weights: dict[str, np.ndarray], split: bool) -> dict[str, tuple[np.ndarray, str]]:
    """As the converter stores them; `split` as newer ones do, with the keys' half of kv_b transposed."""
    tensors = {}
    for name, values in weights.items():
        if not name.startswith("model.layers."):
            tensors[gguf_name(name)] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        stem = rest.removesuffix(".weight")
        if stem == "self_attn.kv_b_proj" and split:
            per_head = values.reshape(HEADS, NOPE + V, LATENT)
            tensors[f"blk.{layer}.attn_k_b.weight"] = np.ascontiguousarray(per_head[:, :NOPE].swapaxes(1, 2))
            tensors[f"blk.{layer}.attn_v_b.weight"] = np.ascontiguousarray(per_head[:, NOPE:])
        elif stem == "mlp.gate.e_score_correction_bias":
            tensors[f"blk.{layer}.exp_probs_b.bias"] = values
        elif not stem.startswith("mlp.experts."):
            tensors[f"blk.{layer}.{DEEPSEEK_NAMES[stem]}.weight"] = values
    for projection in PROJECTIONS:
        experts = [weights[f"model.layers.1.mlp.experts.{e}.{projection}_proj.weight"] for e in range(EXPERTS)]
        tensors[f"blk.1.ffn_{projection}_exps.weight"] = np.stack(experts)
    return {name: (values, "F32") for name, values in tensors.items()}


def deepseek_metadata(split: bool, lite: bool) -> dict[str, object]:
    metadata = {
        "embedding_length": HIDDEN,
        "feed_forward_length": 32,
        "block_count": 2,
        "context_length": 4096,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1 if split else HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.kv_lora_rank": LATENT,
        "attention.key_length": LATENT + ROPE if split else NOPE + ROPE,
        "attention.value_length": LATENT if split else V,
        "rope.dimension_count": ROPE,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 1024,
        "rope.scaling.yarn_log_multiplier": 0.0707 if lite else 0.1,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 32,
        "expert_weights_scale": 1.0 if lite else 2.5,
        "leading_dense_block_count": 1,
    }
    if split:
        metadata |= {"attention.key_length_mla": NOPE + ROPE, "attention.value_length_mla": V}
    if not lite:
        metadata |= {"attention.q_lora_rank": Q_LATENT, "expert_gating_func": 2, "expert_weights_norm": True}
        metadata |= {"expert_group_count": 2, "expert_group_used_count": 1}
    return {f"deepseek2.{key}": value for key, value in metadata.items()}


@pytest.mark.parametrize("lite", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_deepseek_comes_back_under_its_own_names(tmp_path, write_gguf, read_all, split, lite):
    random = np.random.default_rng(7)
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in deepseek_shapes(lite).items()}
    tensors = deepseek_tensors(weights, split)
    write_gguf(tmp_path / "d.gguf", "deepseek2", deepseek_metadata(split, lite), tensors)
    with GgufCheckpoint(tmp_path / "d.gguf") as checkpoint:
        read = read_all(checkpoint)
        config = checkpoint.config
    assert read.keys() == weights.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, torch.from_numpy(weights[name])), name
    expected = {
        "model_type": "deepseek_v2" if lite else "deepseek_v3",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "kv_lora_rank": 64,
        "q_lora_rank": None if lite else 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0 if lite else 2.5,
        "norm_topk_prob": not lite,
        "scoring_func": "softmax" if lite else "sigmoid",
        "topk_method": "greedy" if lite else "noaux_tc",
        "n_group": 1 if lite else 2,
        "topk_group": 1,
    }
    assert {key: config[key] for key in expected} == expected
    mscale = 0.707 if lite else 1.0
    scaling = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024, "mscale": mscale}
    scaling |= {"mscale_all_dim": mscale, "beta_fast": 32, "beta_slow": 1}
    assert {key: config["rope_scaling"][key] for key in scaling} == scaling


def test_errors_name_the_tensor(gguf_file):
    with GgufCheckpoint(gguf_file) as checkpoint:
        assert checkpoint.row_scales("model.norm.weight") is None
        with pytest.raises(TensorMissing) as missing:
            checkpoint.read("lm_head.weight", torch.empty(1))
        with pytest.raises(TensorShape) as shape:
            checkpoint.read("model.norm.weight", torch.empty(65))
    assert missing.value.tensor == "lm_head.weight"
    assert shape.value.file == str(gguf_file)


def test_closing_unmaps(gguf_file, mapped):
    checkpoint = GgufCheckpoint(gguf_file)
    checkpoint.read("model.norm.weight", torch.empty(64))
    assert mapped(gguf_file)
    checkpoint.close()
    assert not mapped(gguf_file)
    with pytest.raises(AssertionError, match="after close"):
        checkpoint.read("model.norm.weight", torch.empty(64))
