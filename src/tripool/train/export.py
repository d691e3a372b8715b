"""The trained network as a Hugging Face folder: published names, bfloat16, shards that are easy to carry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tripool.checkpoints import Checkpoint
from tripool.checkpoints.folder import INDEX_FILE
from tripool.checkpoints.write import with_end_ids, write_json, write_tensors, write_text_files
from tripool.text import TextFiles
from tripool.train.attention import LatentAttention
from tripool.train.experts import Dense, Experts
from tripool.train.network import Layer, Network


# Tokens are numbered by their frequency in the training text. A draft chooses among the first few thousand numbers only
# (a head of the whole vocabulary costs as much to read as two layers); 94 % of our answers lie below 2,048 so, and 81 %
# in the order of the tokenizer. The tokens themselves, and how text is cut into them, stay as they are.
def order_by_use(text: TextFiles, counts: Sequence[int]) -> list[int]:
    """`counts` by old number -> old numbers in their new order. Special tokens keep their numbers."""
    fixed = {added["id"] for added in json.loads(text.tokenizer_json).get("added_tokens", ())}
    others = [number for number in range(len(counts)) if number not in fixed]
    others.sort(key=lambda number: (-counts[number], number))
    rest = iter(others)
    return [number if number in fixed else next(rest) for number in range(len(counts))]


def renumbered(text: TextFiles, order: Sequence[int]) -> TextFiles:
    tokenizer = json.loads(text.tokenizer_json)
    number_of = {old: new for new, old in enumerate(order)}
    vocab = {token: number_of[number] for token, number in tokenizer["model"]["vocab"].items()}
    tokenizer["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda pair: pair[1]))
    return replace(text, tokenizer_json=json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")))


SHARD_BYTES = 14_500_000
"""With a header to spare, a shard stays below 15 MB."""

VOCABULARY = {"model.embed_tokens.weight", "lm_head.weight"}
"""Tensors with a row for each token."""

STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Named = Iterator[tuple[str, torch.Tensor]]


def export(
    network: Network,
    config: Mapping[str, Any],
    text: TextFiles,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    counts: Sequence[int] | None = None,
) -> int:
    """Number of parameters. config.json comes last: a folder that has it is whole. `counts`: how often each token was
    used in training; tokens are numbered by it."""
    label = next(name for name, kind in STORED.items() if kind is dtype)
    tensors = dict(published(network))
    if counts is not None:
        order = order_by_use(text, counts)
        text = renumbered(text, order)
        for name in tensors.keys() & VOCABULARY:
            tensors[name] = tensors[name][torch.tensor(order, device=tensors[name].device)]
    labels = {name: _label(name, label) for name in tensors}
    kind = str(dtype).removeprefix("torch.")
    write_model(folder, tensors, labels, with_end_ids(published_config(config, kind), text), text)
    return sum(values.numel() for values in tensors.values())


def write_model(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    labels: Mapping[str, str],
    config: Mapping[str, Any],
    text: TextFiles,
) -> None:
    """`labels`: the type each tensor is stored in, as safetensors calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD_BYTES
    total = 0
    for name, values in tensors.items():
        size = values.numel() * STORED[labels[name]].itemsize
        if shards[-1] and size > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = values
        room -= size
        total += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(path, {name: values.to(STORED[labels[name]]) for name, values in shard.items()})
        weight_map |= dict.fromkeys(shard, path.name)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    write_text_files(folder, text)
    write_json(folder / "config.json", config, indent=1)


def published_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    return {"architectures": ["DeepseekV3ForCausalLM"], **config, "torch_dtype": dtype, "use_cache": True}


@torch.no_grad()
def fill(network: Network, checkpoint: Checkpoint) -> None:
    """The way back: a network's tensors from a checkpoint of its shape. What else that has stays there."""
    for name, values in published(network):
        checkpoint.read(name, values)


def published(network: Network) -> Named:
    """Every tensor under the name that transformers and our loader know."""
    arch = network.arch
    yield "model.embed_tokens.weight", network.embed
    if not arch.tied_head:
        yield "lm_head.weight", network.head
    yield "model.norm.weight", network.norm.weight
    for i, layer in enumerate(network.layers):
        assert isinstance(layer, Layer)
        yield from _layer(f"model.layers.{i}", layer)
    if network.mtp is not None:
        prefix = f"model.layers.{arch.layers}"
        yield from _layer(prefix, network.mtp.layer)
        yield f"{prefix}.enorm.weight", network.mtp.enorm.weight
        yield f"{prefix}.hnorm.weight", network.mtp.hnorm.weight
        yield f"{prefix}.eh_proj.weight", network.mtp.eh_proj.weight
        yield f"{prefix}.shared_head.norm.weight", network.mtp.norm.weight


def _layer(prefix: str, layer: Layer) -> Named:
    yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
    yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
    yield from _attention(f"{prefix}.self_attn", layer.self_attn)
    mlp = layer.mlp
    if isinstance(mlp, Dense):
        gate, up = mlp.gate_up.weight.chunk(2)
        yield from _swiglu(f"{prefix}.mlp", gate, up, mlp.down.weight)
    else:
        yield from _experts(f"{prefix}.mlp", mlp)


def _attention(prefix: str, attention: LatentAttention) -> Named:
    query = "q_proj"
    if attention.shape.q_rank is not None:
        query = "q_b_proj"
        yield f"{prefix}.q_a_proj.weight", attention.q_a_proj.weight
        yield f"{prefix}.q_a_layernorm.weight", attention.q_a_layernorm.weight
    yield f"{prefix}.{query}.weight", attention.queries.weight
    for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"):
        yield f"{prefix}.{name}.weight", getattr(attention, name).weight


def _experts(prefix: str, experts: Experts) -> Named:
    yield f"{prefix}.gate.weight", experts.router.weight
    yield f"{prefix}.gate.e_score_correction_bias", experts.bias
    gate, up = experts.gate_up.weight.chunk(2)
    down = experts.down.weight
    width = experts.shape.width
    for i in range(experts.shape.experts):
        own = slice(i * width, (i + 1) * width)
        yield from _swiglu(f"{prefix}.experts.{i}", gate[own], up[own], down[:, own])
    if experts.shape.shared_width:
        own = slice(experts.wide, None)
        yield from _swiglu(f"{prefix}.shared_experts", gate[own], up[own], down[:, own])


def _swiglu(prefix: str, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Named:
    yield f"{prefix}.gate_proj.weight", gate
    yield f"{prefix}.up_proj.weight", up
    yield f"{prefix}.down_proj.weight", down


def _label(name: str, label: str) -> str:
    """The bias decides who is chosen by differences that bfloat16 would round away."""
    return "F32" if name.endswith("e_score_correction_bias") else label
