"""Maps GGUF tensor names to Hugging Face names, per architecture. An unknown name is refused, never skipped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tripool.checkpoints.gguf.header import Header
from tripool.checkpoints.gguf.tensors import GgufTensor, HalvesFromPairs, JoinedKeyValue, Rows, Source
from tripool.checkpoints.mapped import MappedFile
from tripool.errors import TensorMissing, TensorShape, WrongArchitecture

TOP_LEVEL: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

DENSE: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

QK_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

LATENT_MOE: Mapping[str, str] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}

BLOCK_NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": {**DENSE, **QK_NORMS},
    "deepseek2": {**DENSE, **LATENT_MOE},
}

IGNORED = ("rope_freqs.weight",)
"""Not weights: their information is in the config."""

MAX_EXPERTS = 2**16
"""Limit: each becomes a logical tensor, and a header can claim more than the file contains."""

BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")


def logical_tensors(file: MappedFile, header: Header, config: Mapping[str, Any]) -> dict[str, Source]:
    architecture = header.metadata["general.architecture"]
    logical: dict[str, Source] = {}
    for name, entry in header.tensors.items():
        if name in IGNORED:
            continue
        tensor = GgufTensor(file, entry)
        if name in TOP_LEVEL:
            logical[TOP_LEVEL[name]] = Rows(tensor, entry.shape)
            continue
        match = BLOCK.fullmatch(name)
        if match is None:
            raise _unknown(header, name)
        layer, part, suffix = f"model.layers.{match[1]}", match[2], match[3]
        if architecture == "deepseek2" and (experts := EXPERTS.fullmatch(part)):
            logical.update(_experts(tensor, f"{layer}.mlp.experts", f"{experts[1]}_proj.weight", header))
        elif architecture == "deepseek2" and part in ("attn_k_b", "attn_v_b"):
            _join_key_value(file, header, match[1], logical)
        elif architecture == "deepseek2" and part == "exp_probs_b":
            logical[f"{layer}.mlp.gate.e_score_correction_bias"] = Rows(tensor, entry.shape)
        elif part in BLOCK_NAMES[architecture]:
            full_name = f"{layer}.{BLOCK_NAMES[architecture][part]}.{suffix}"
            logical[full_name] = _reordered(tensor, architecture, part, config)
        else:
            raise _unknown(header, name)
    return logical


def _reordered(tensor: GgufTensor, architecture: str, part: str, config: Mapping[str, Any]) -> Source:
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    shape = tensor.entry.shape
    hint = "the file was converted wrongly; fetch it again or convert it again"
    if len(shape) > 2:
        problem = f"stored as {list(shape)}, which has too many dimensions"
        raise TensorShape(problem, hint=hint, file=tensor.file.path, tensor=tensor.entry.name)
    if architecture != "llama" or part not in heads:
        return Rows(tensor, shape)
    num_heads = config[heads[part]]
    if num_heads == 0 or shape[0] % (2 * num_heads):
        problem = f"{shape[0]} rows are not {num_heads} heads of an even size"
        raise TensorShape(problem, hint=hint, file=tensor.file.path, tensor=tensor.entry.name)
    return HalvesFromPairs(tensor, num_heads)


def _experts(tensor: GgufTensor, prefix: str, suffix: str, header: Header) -> dict[str, Source]:
    shape = tensor.entry.shape
    if len(shape) != 3:
        hint = "convert the model again with a current converter"
        problem = f"stored as {list(shape)}, a stack of experts has three dimensions"
        raise TensorShape(problem, hint=hint, file=header.path, tensor=tensor.entry.name)
    num_experts, num_rows, num_columns = shape
    if num_experts > MAX_EXPERTS:
        hint = "the file was converted wrongly; fetch it again or convert it again"
        raise TensorShape(f"holds {num_experts} experts", hint=hint, file=header.path, tensor=tensor.entry.name)
    return {
        f"{prefix}.{expert}.{suffix}": Rows(tensor, (num_rows, num_columns), first_row=expert * num_rows)
        for expert in range(num_experts)
    }


def _join_key_value(file: MappedFile, header: Header, layer: str, logical: dict[str, Source]) -> None:
    """Join the split tensors, unless the file has the joined one as well."""
    if f"blk.{layer}.attn_kv_b.weight" in header.tensors:
        return
    parts = {}
    for part in ("k", "v"):
        name = f"blk.{layer}.attn_{part}_b.weight"
        hint = "convert the model again with a current converter"
        if name not in header.tensors:
            problem = "the other part of the split tensor is present, this one is missing"
            hint = hint
            raise TensorMissing(problem, hint=hint, file=header.path, tensor=name)
        parts[part] = GgufTensor(file, header.tensors[name])
        if len(parts[part].entry.shape) != 3:
            problem = f"stored as {list(parts[part].entry.shape)}, one matrix per head has three dimensions"
            raise TensorShape(problem, hint=hint, file=header.path, tensor=name)
    key_shape, value_shape = parts["k"].entry.shape, parts["v"].entry.shape
    if key_shape[0] != value_shape[0] or key_shape[1] != value_shape[2]:
        problem = f"keys are {list(key_shape)} and values {list(value_shape)}; heads and latent width must agree"
        raise TensorShape(problem, hint=hint, file=header.path, tensor=f"blk.{layer}.attn_k_b.weight")
    logical[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] = JoinedKeyValue(parts["k"], parts["v"])


def _unknown(header: Header, name: str) -> WrongArchitecture:
    architecture = header.metadata["general.architecture"]
    problem = f"a tensor that this version's '{architecture}' does not have"
    hint = "the file is of a newer or different variant of the model; use its Hugging Face folder"
    return WrongArchitecture(problem, hint=hint, file=header.path, tensor=name)
