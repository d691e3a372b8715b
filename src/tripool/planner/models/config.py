"""Reads Hugging Face configs into shapes: DeepSeek-V2/V3/R1 and Kimi-K2, Qwen3(-MoE) and Qwen2, Llama.

Takes dicts, and opens no file but the small bundled configs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from tripool.planner.errors import BadModelConfig
from tripool.planner.models.shape import Gqa, Mla, ModelShape, Moe

_MLA_KINDS = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_GQA_KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


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
    kind = config.get("model_type")
    reader = _Reader(config, name)
    if kind in _MLA_KINDS:
        attention: Mla | Gqa = _mla(reader)
        moe = _deepseek_moe(reader, gate_bias=kind != "deepseek_v2")
    elif kind in _GQA_KINDS:
        attention = _gqa(reader, str(kind))
        moe = _qwen_moe(reader) if kind == "qwen3_moe" else None
    else:
        known = ", ".join((*_MLA_KINDS, *_GQA_KINDS))
        raise BadModelConfig(f"{name}: 'model_type' is {kind!r}", hint=f"known: {known}")
    shape = ModelShape(
        name=name, attention=attention, moe=moe, hidden=reader.int("hidden_size"),
        layers=reader.int("num_hidden_layers"),
        vocab=reader.int("vocab_size"), dense_width=reader.int("intermediate_size", 0),
        mtp_layers=reader.int("num_nextn_predict_layers", 0), tied_head=reader.flag("tie_word_embeddings"),
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
        v=reader.int("v_head_dim"),
    )  # fmt: skip


def _gqa(reader: _Reader, kind: str) -> Gqa:
    heads = reader.int("num_attention_heads")
    head_dim = reader.int("head_dim", 0) or reader.int("hidden_size") // max(heads, 1)
    return Gqa(
        heads=heads, kv_heads=reader.int("num_key_value_heads", heads), head_dim=head_dim,
        bias=kind == "qwen2" or reader.flag("attention_bias"), qk_norm=kind.startswith("qwen3"),
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


def _qwen_moe(reader: _Reader) -> Moe:
    dense = reader.get("mlp_only_layers") or []
    every = reader.int("decoder_sparse_step", 1)
    layers = sum(
        1 for layer in range(reader.int("num_hidden_layers")) if layer not in dense and (layer + 1) % max(every, 1) == 0
    )
    return Moe(
        experts=reader.int("num_experts"), top_k=reader.int("num_experts_per_tok"),
        width=reader.int("moe_intermediate_size"), shared_width=0, layers=layers,
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
