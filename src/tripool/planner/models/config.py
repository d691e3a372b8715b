"""Reads Hugging Face configs into shapes: DeepSeek, Kimi-K2, GLM, Qwen (dense, MoE and hybrids), gpt-oss, Llama.

Takes dicts, and opens no file but the small bundled configs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from tripool.planner.checks import check_config
from tripool.planner.errors import BadModelConfig
from tripool.planner.models.shape import Gqa, Linear, Mla, ModelShape, Moe

_MLA_KINDS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa")
_HYBRID_KINDS = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
_GQA_KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "gpt_oss", *_HYBRID_KINDS)
_BESIDE_FP4 = {
    "kimi_k2": "bf16", "glm_moe_dsa": "bf16", "glm4_moe": "bf16", "gpt_oss": "bf16", "qwen3_moe": "fp4",
    **dict.fromkeys(_HYBRID_KINDS, "bf16"),
}  # fmt: skip
"""By the modules that NVIDIA's NVFP4 checkpoints and OpenAI's MXFP4 one leave out; DeepSeek's have queries in BF16 and
outputs in FP4, which is as much as 8 bits.
"""
_SPARSE_KEYS = ("index_n_heads", "index_head_dim", "index_topk")
_UNREAD = {
    "zero_expert_num": "experts that compute nothing", "compress_ratios": "compressed attention",
    "sliding_window_pattern": "a pattern of windows", "attn_type_list": "a list of attention types",
}  # fmt: skip
"""Keys of designs that the shapes cannot say: such a config is refused, never read as another model."""


class _Reader:
    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        self._config, self._origin = config, origin

    def int(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadModelConfig(f"{self._origin}: '{key}' is {value!r}, not a whole number", hint="is it config.json?")
        return value

    def flag(self, key: str) -> bool:
        return bool(self._config.get(key, False))

    def get(self, key: str) -> Any:
        return self._config.get(key)


def read_config(config: Mapping[str, Any], name: str) -> ModelShape:
    check_config(config, lambda key, wrong: BadModelConfig(f"{name}: '{key}' {wrong}", hint="is it config.json?"))
    kind = config.get("model_type")
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]  # the language model of a config that also has an image encoder
        kind = kind if kind in (*_MLA_KINDS, *_GQA_KINDS) else config.get("model_type")
    unread = [f"'{key}' ({what})" for key, what in _UNREAD.items() if config.get(key)]
    if unread:
        raise BadModelConfig(f"{name}: has {', '.join(unread)}", hint="no shape describes this design yet")
    reader = _Reader(config, name)
    if kind in _MLA_KINDS:
        attention: Mla | Gqa = _mla(reader)
        moe = _deepseek_moe(reader, gate_bias=kind != "deepseek_v2")
    elif kind in _GQA_KINDS:
        attention = _gqa(reader, str(kind))
        moe = _moe(reader, str(kind))
    else:
        known = ", ".join((*_MLA_KINDS, *_GQA_KINDS))
        raise BadModelConfig(f"{name}: 'model_type' is {kind!r}", hint=f"known: {known}")
    windowed, linear_layers = _layer_types(reader, str(kind))
    shape = ModelShape(
        name=name, attention=attention, moe=moe, hidden=reader.int("hidden_size"),
        layers=reader.int("num_hidden_layers"),
        vocab=reader.int("vocab_size"), dense_width=reader.int("intermediate_size", 0),
        mtp_layers=reader.int("num_nextn_predict_layers", 0) or reader.int("mtp_num_hidden_layers", 0),
        tied_head=reader.flag("tie_word_embeddings"),
        beside_fp4=_BESIDE_FP4.get(str(kind), "fp8"), windowed_layers=windowed, linear_layers=linear_layers,
        window=reader.int("sliding_window", 0) if windowed else 0, linear=_linear(reader) if linear_layers else None,
    )  # fmt: skip
    if not (shape.hidden and shape.layers and shape.vocab and attention.heads) or shape.moe_layers > shape.layers:
        raise BadModelConfig(f"{name}: sizes of 0, or more MoE layers than layers", hint="is it config.json?")
    if moe is not None and not 0 < moe.top_k <= moe.experts:
        raise BadModelConfig(f"{name}: {moe.top_k} of {moe.experts} experts are chosen", hint="is it config.json?")
    return shape


def _mla(reader: _Reader) -> Mla:
    return Mla(
        heads=reader.int("num_attention_heads"), q_rank=reader.int("q_lora_rank", 0) or None,
        kv_rank=reader.int("kv_lora_rank"), nope=reader.int("qk_nope_head_dim"), rope=reader.int("qk_rope_head_dim"),
        v=reader.int("v_head_dim"), **_sparse(reader),
    )  # fmt: skip


def _sparse(reader: _Reader) -> dict[str, int]:
    """The indexer of sparse attention, whatever the config calls itself: all of its keys, or none."""
    if not any(reader.get(key) for key in _SPARSE_KEYS):
        return {}
    heads, dim, topk = (reader.int(key) for key in _SPARSE_KEYS)
    return {"index_heads": heads, "index_dim": dim, "index_topk": topk}


def _linear(reader: _Reader) -> Linear:
    return Linear(
        key_heads=reader.int("linear_num_key_heads"), value_heads=reader.int("linear_num_value_heads"),
        key_dim=reader.int("linear_key_head_dim"), value_dim=reader.int("linear_value_head_dim"),
        conv=reader.int("linear_conv_kernel_dim"),
    )  # fmt: skip


def _layer_types(reader: _Reader, kind: str) -> tuple[int, int]:
    """(layers with a window, layers with linear attention)."""
    types = reader.get("layer_types")
    layers = reader.int("num_hidden_layers")
    if isinstance(types, list):
        return types.count("sliding_attention"), types.count("linear_attention")
    every = reader.int("full_attention_interval", 0)
    if kind in _HYBRID_KINDS and every:
        return 0, layers - layers // every
    return (layers // 2 if kind == "gpt_oss" else 0), 0


def _gqa(reader: _Reader, kind: str) -> Gqa:
    heads = reader.int("num_attention_heads")
    head_dim = reader.int("head_dim", 0) or reader.int("hidden_size") // max(heads, 1)
    return Gqa(
        heads=heads, kv_heads=reader.int("num_key_value_heads", heads), head_dim=head_dim,
        bias=kind == "qwen2" or reader.flag("attention_bias"), gated=kind in _HYBRID_KINDS,
        qk_norm=kind.startswith("qwen3") or reader.flag("use_qk_norm"),
    )  # fmt: skip


def _deepseek_moe(reader: _Reader, *, gate_bias: bool) -> Moe | None:
    experts = reader.int("n_routed_experts", 0)
    if not experts:
        return None
    width = reader.int("moe_intermediate_size")
    return Moe(
        experts=experts, top_k=reader.int("num_experts_per_tok"), width=width,
        shared_width=width * reader.int("n_shared_experts", 0), gate_bias=gate_bias,
        layers=reader.int("num_hidden_layers") - reader.int("first_k_dense_replace", 0),
        groups=reader.int("n_group", 1), groups_chosen=reader.int("topk_group", 1),
    )  # fmt: skip


def _moe(reader: _Reader, kind: str) -> Moe | None:
    if kind == "glm4_moe":
        return _deepseek_moe(reader, gate_bias=True)
    if kind == "gpt_oss":
        return Moe(
            experts=reader.int("num_local_experts"), top_k=reader.int("num_experts_per_tok"), gate_bias=True,
            width=reader.int("intermediate_size"), shared_width=0, layers=reader.int("num_hidden_layers"),
        )  # fmt: skip
    return _qwen_moe(reader) if kind == "qwen3_moe" or kind in _HYBRID_KINDS else None


def _qwen_moe(reader: _Reader) -> Moe:
    dense = reader.get("mlp_only_layers") or []
    every = reader.int("decoder_sparse_step", 1)
    layers = sum(
        1 for layer in range(reader.int("num_hidden_layers")) if layer not in dense and (layer + 1) % max(every, 1) == 0
    )
    return Moe(
        experts=reader.int("num_experts"), top_k=reader.int("num_experts_per_tok"),
        width=reader.int("moe_intermediate_size"), layers=layers,
        shared_width=reader.int("shared_expert_intermediate_size", 0),
    )  # fmt: skip


def model_names() -> list[str]:
    here = files("tripool.planner.models")
    return sorted(entry.name.removesuffix(".json") for entry in here.iterdir() if entry.name.endswith(".json"))


def named_model(name: str) -> ModelShape:
    """By its name here or on Hugging Face: `deepseek-r1` is `deepseek-ai/DeepSeek-R1`."""
    known = name.rpartition("/")[2].lower()
    if known not in model_names():
        hint = f"known: {', '.join(model_names())}; or the path of a config.json"
        raise BadModelConfig(f"no model called '{name}'", hint=hint)
    return read_config(json.loads(files("tripool.planner.models").joinpath(f"{known}.json").read_text("utf-8")), known)
