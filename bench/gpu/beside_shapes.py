"""Shapes and weights that our engine and vLLM share: published configs, and random weights of one distribution.

Imports torch only inside functions that need it, and neither engine. `vllm_beside.py` compares the two.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

_ALL: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    # DeepSeek-V2-Lite
    "lite": _ALL | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_shared_experts": 2,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "aux_loss_alpha": 0.001, "seq_aux": True, "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
    # Llama-3-8B
    "llama": _ALL | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "mlp_bias": False,
    },
    # Qwen3-30B-A3B
    "qwen": _ALL | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "use_sliding_window": False,
        "sliding_window": None, "max_window_layers": 48, "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    },
}  # fmt: skip
TITLES = {"lite": "V2-Lite", "llama": "Llama-3-8B", "qwen": "Qwen3-30B-A3B"}

_SMALL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "num_experts": 8, "num_experts_per_tok": 3,
}  # fmt: skip


def settings_of(shape: str, *, small: bool = False) -> dict[str, Any]:
    """The shape's config. `small`: the same architecture, narrow enough for a CPU."""
    settings = SHAPES[shape]
    return settings | {name: value for name, value in _SMALL.items() if name in settings} if small else settings


def write_folder(folder: Path, settings: dict[str, Any]) -> Path:
    """A model folder with a config and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    return folder


def tokenizer_json(vocab: int) -> str:
    """A tokenizer in which every id is a word of its own, so that each token is text in a stream."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ("".join(word) for word in itertools.product(letters, repeat=4))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
        "vocab": {f"\u0120{word}": i for i, word in enumerate(itertools.islice(words, vocab))}, "merges": [],
    }  # fmt: skip
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    return json.dumps(parts | whole)


def write_tokenizer(folder: Path, settings: dict[str, Any]) -> None:
    """The same tokenizer in a model folder, as transformers finds it."""
    (folder / "tokenizer.json").write_text(tokenizer_json(settings["vocab_size"]))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "\u0120aaab"}  # id 1, as in the config
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def draw(name: str, tensor: Any, generator: Any = None) -> None:
    """Fill a weight with random values that keep the signal's size through the layers.

    Sequences then differ to their ends, and the experts are chosen about as evenly as in real traffic. The input width
    comes last in every matrix, stacked ones included.
    """
    if tensor.ndim == 1:
        tensor.fill_(1.0)
    elif "embed_tokens" in name:
        tensor.normal_(0.0, 1.0, generator=generator)
    else:
        gain = 2.0 if "lm_head" in name else 0.5
        tensor.normal_(0.0, gain * tensor.shape[-1] ** -0.5, generator=generator)
