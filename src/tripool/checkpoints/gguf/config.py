"""Builds a Hugging Face config from a GGUF file's metadata, with the same keys as in a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tripool.checkpoints.gguf.header import Header
from tripool.checkpoints.gguf.tensors import GgufTensor
from tripool.checkpoints.mapped import MappedFile
from tripool.errors import CheckpointError, TensorMissing, WrongArchitecture

MODEL_TYPES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
}

SIGMOID_GATING = 2

EXPERT_GROUPS: Mapping[tuple[int, str], tuple[int, int]] = {(160, "softmax"): (8, 3), (256, "sigmoid"): (8, 4)}
"""(experts, scoring) → (groups, groups used) of DeepSeek-V2 and V3, for files that predate those keys."""

LLAMA3_LOW_FREQ, LLAMA3_HIGH_FREQ, LLAMA3_ORIGINAL_POSITIONS = 1.0, 4.0, 8192
"""Every published Llama 3.x model; files keep only the resulting factors, which are checked against these."""
MAX_HEAD_DIM = 2**12


class _Keys:
    """Metadata under the architecture's prefix; a missing required key raises a typed error."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header = header.under(architecture)
        self.flag = self._header.flag

    def text(self, name: str, default: str) -> str:
        return self._header.text(name, default) or default

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not isinstance(value, int) or value < 0:
            raise self._header.wrong(name)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._header.metadata.get(self._header.prefix + name, default)
        if isinstance(value, list):
            hint = "use the model's Hugging Face folder"
            problem = f"{self._header.prefix}{name} differs from layer to layer, which is not run"
            raise WrongArchitecture(problem, hint=hint, file=self._header.path)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._header.wrong(name)
        return value


def read_config(file: MappedFile, header: Header) -> dict[str, Any]:
    architecture = header.text("general.architecture") or "none"
    if architecture not in MODEL_TYPES:
        hint = f"readable architectures: {', '.join(MODEL_TYPES)}"
        raise WrongArchitecture(f"GGUF architecture '{architecture}'", hint=hint, file=header.path)
    if header.integer("split.count", 0) not in (0, 1):
        hint = "join the parts first with llama.cpp's gguf-split --merge"
        raise CheckpointError("one part of a split model", hint=hint, file=header.path)
    keys = _Keys(header, architecture)
    config = _shared(header, keys, architecture)
    config |= _deepseek(header, keys) if architecture == "deepseek2" else _dense(header, keys, config)
    scaling = _rope_scaling(file, header, keys, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _shared(header: Header, keys: _Keys, architecture: str) -> dict[str, Any]:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        hint = "this is no language model, or a part of one; fetch the whole file"
        raise TensorMissing("no embeddings", hint=hint, file=header.path, tensor="token_embd.weight")
    model_type, class_name = MODEL_TYPES[architecture]
    num_nextn = keys.integer("nextn_predict_layers", 0)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count") - num_nextn,
        "num_attention_heads": keys.integer("attention.head_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
    }
    for ours, theirs in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        token_id = header.integer(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            config[f"{ours}_token_id"] = token_id
    return config


def _dense(header: Header, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    num_heads = config["num_attention_heads"]
    return {
        "num_key_value_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": keys.integer("attention.key_length", config["hidden_size"] // max(num_heads, 1)),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "use_sliding_window": False,
    }


def _deepseek(header: Header, keys: _Keys) -> dict[str, Any]:
    num_rope = keys.integer("rope.dimension_count")
    # Files made for absorbed attention store the head widths under `_mla` and treat the rest as one wide head.
    key_width = keys.integer("attention.key_length_mla", 0) or keys.integer("attention.key_length")
    value_width = keys.integer("attention.value_length_mla", 0) or keys.integer("attention.value_length")
    scoring = "sigmoid" if keys.integer("expert_gating_func", 0) == SIGMOID_GATING else "softmax"
    num_experts = keys.integer("expert_count")
    groups, groups_used = EXPERT_GROUPS.get((num_experts, scoring), (1, 1))
    groups = keys.integer("expert_group_count", 0) or groups
    has_bias = any(name.endswith("exp_probs_b.bias") for name in header.tensors)
    config: dict[str, Any] = {
        "num_key_value_heads": keys.integer("attention.head_count"),
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": num_rope,
        "qk_nope_head_dim": key_width - num_rope,
        "v_head_dim": value_width,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "moe_layer_freq": 1,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "scoring_func": scoring,
        "n_group": groups,
        "topk_group": keys.integer("expert_group_used_count", 0) or groups_used,
        "topk_method": "noaux_tc" if has_bias else "group_limited_greedy" if groups > 1 else "greedy",
        "num_nextn_predict_layers": keys.integer("nextn_predict_layers", 0),
        "attention_bias": False,
        "rope_interleave": True,
    }
    if has_bias or scoring == "sigmoid":
        config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    return config


def _rope_scaling(file: MappedFile, header: Header, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(file, header, config)
    if kind == "none" or (kind == "linear" and keys.number("rope.scaling.factor", 1.0) == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": keys.number("rope.scaling.factor")}
    if kind != "yarn":
        hint = "readable: none, linear, yarn and Llama 3's factors; use the model's Hugging Face folder"
        raise WrongArchitecture(f"rope scaling '{kind}'", hint=hint, file=header.path)
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if log_multiplier := keys.number("rope.scaling.yarn_log_multiplier", 0.0):
        # The converter writes a tenth of mscale_all_dim and drops mscale, which equals it in every published model.
        scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * log_multiplier, 6)
    return scaling


def _llama3_scaling(file: MappedFile, header: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """Files store one divisor per frequency instead of Llama 3's four numbers: recover the numbers, check the
    divisors.
    """
    entry = header.tensors["rope_freqs.weight"]
    head_dim = config.get("head_dim", 2 * math.prod(entry.shape))
    if 2 * math.prod(entry.shape) != head_dim or head_dim > MAX_HEAD_DIM:
        raise _not_llama3(header)
    stored = GgufTensor(file, entry).values(0, 1).view(-1).to(torch.float64)
    factor = float(f"{stored.max().item():.6g}")
    theta = float(config["rope_theta"])
    wave_lengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = (LLAMA3_ORIGINAL_POSITIONS / wave_lengths - LLAMA3_LOW_FREQ) / (LLAMA3_HIGH_FREQ - LLAMA3_LOW_FREQ)
    smooth = smooth.clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(stored, expected, rtol=1e-4, atol=0):
        raise _not_llama3(header)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ,
        "high_freq_factor": LLAMA3_HIGH_FREQ,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_POSITIONS,
    }


def _not_llama3(header: Header) -> WrongArchitecture:
    problem = "rope factors that are not Llama 3's"
    hint = "use the model's Hugging Face folder, whose config has the original numbers"
    return WrongArchitecture(problem, hint=hint, file=header.path, tensor="rope_freqs.weight")
