"""Writes the GGUF files llama.cpp runs: another tensor type of a file, and a DeepSeek-V3 folder as `deepseek2`.

Knows the file format and its names only; nothing here loads or runs a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as TensorType
from safetensors.torch import load_file

SIGMOID_GATING = gguf.ExpertGatingFuncType.SIGMOID


def requantise(source: Path, target: Path, tensor_type: TensorType) -> None:
    """The same model with every matrix stored as `tensor_type`; vectors (norms) stay as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=reader.fields["general.architecture"].contents())
    copy_fields(reader, writer, [name for name in reader.fields if name != "general.architecture"])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        add_tensor(writer, tensor.name, values, tensor_type)
    write(writer)


def deepseek_folder_to_gguf(folder: Path, tokenizer_source: Path, target: Path, tensor_type: TensorType) -> None:
    """A Hugging Face DeepSeek-V3 folder under the names and shapes llama.cpp's `deepseek2` expects."""
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, np.ndarray] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights |= {name: tensor.float().numpy() for name, tensor in load_file(shard).items()}
    writer = gguf.GGUFWriter(target, arch="deepseek2")
    reader = gguf.GGUFReader(tokenizer_source)
    copy_fields(reader, writer, [name for name in reader.fields if name.startswith("tokenizer.")])
    add_deepseek_fields(writer, config)
    for name, values in deepseek_tensors(weights, config):
        add_tensor(writer, name, values, tensor_type)
    write(writer)


def add_deepseek_fields(writer: gguf.GGUFWriter, config: dict) -> None:
    kv_rank, rope_dim, nope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_head_count(config["num_attention_heads"])
    # The absorbed form: all query heads attend over one latent "head" of width rank + rope.
    writer.add_head_count_kv(1)
    writer.add_key_length(kv_rank + rope_dim)
    writer.add_value_length(kv_rank)
    writer.add_key_length_mla(nope_dim + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(kv_rank)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(SIGMOID_GATING)


def deepseek_tensors(weights: dict[str, np.ndarray], config: dict) -> Iterable[tuple[str, np.ndarray]]:
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    yield "output.weight", weights["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        inner = {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}
        for name, values in (*attention_tensors(inner, config), *feed_forward_tensors(inner, config)):
            yield f"blk.{layer}.{name}", values


def attention_tensors(inner: dict[str, np.ndarray], config: dict) -> Iterable[tuple[str, np.ndarray]]:
    yield "attn_norm.weight", inner["input_layernorm.weight"]
    yield "attn_q_a.weight", inner["self_attn.q_a_proj.weight"]
    yield "attn_q_a_norm.weight", inner["self_attn.q_a_layernorm.weight"]
    yield "attn_q_b.weight", inner["self_attn.q_b_proj.weight"]
    yield "attn_kv_a_mqa.weight", inner["self_attn.kv_a_proj_with_mqa.weight"]
    yield "attn_kv_a_norm.weight", inner["self_attn.kv_a_layernorm.weight"]
    heads, nope_dim, v_dim = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    kv_b = inner["self_attn.kv_b_proj.weight"].reshape(heads, nope_dim + v_dim, config["kv_lora_rank"])
    # Absorption multiplies the query by the keys' half transposed, the latent result by the values' half as it is.
    yield "attn_k_b.weight", np.ascontiguousarray(kv_b[:, :nope_dim].transpose(0, 2, 1))
    yield "attn_v_b.weight", np.ascontiguousarray(kv_b[:, nope_dim:])
    yield "attn_output.weight", inner["self_attn.o_proj.weight"]


def feed_forward_tensors(inner: dict[str, np.ndarray], config: dict) -> Iterable[tuple[str, np.ndarray]]:
    yield "ffn_norm.weight", inner["post_attention_layernorm.weight"]
    if "mlp.gate.weight" not in inner:
        for part in ("gate", "up", "down"):
            yield f"ffn_{part}.weight", inner[f"mlp.{part}_proj.weight"]
        return
    yield "ffn_gate_inp.weight", inner["mlp.gate.weight"]
    yield "exp_probs_b.bias", inner["mlp.gate.e_score_correction_bias"]
    for part in ("gate", "up", "down"):
        experts = range(config["n_routed_experts"])
        yield f"ffn_{part}_exps.weight", np.stack([inner[f"mlp.experts.{e}.{part}_proj.weight"] for e in experts])
        yield f"ffn_{part}_shexp.weight", inner[f"mlp.shared_experts.{part}_proj.weight"]


def copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, names: list[str]) -> None:
    for name in names:
        field = reader.fields[name]
        if name.startswith("GGUF.") or name == "general.file_type":
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, tensor_type: TensorType) -> None:
    # llama.cpp wants vectors and the router in float32, whatever the file's type.
    if values.ndim == 1 or name.endswith("ffn_gate_inp.weight") or tensor_type == TensorType.F32:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(values, tensor_type), raw_dtype=tensor_type)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
