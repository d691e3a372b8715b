"""Turns a case into a checkpoint folder: a random network that transformers saves, with its tokenizer."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from oracle.case import Case
from oracle.quiet import quiet
from oracle.text import CHAT_TEMPLATE, train_tokenizer


def save_case(case: Case, folder: Path) -> Path:
    """Same case, same bytes."""
    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

        config = AutoConfig.for_model(case.model_type, **case.settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        rng = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
        randomise(model, rng)
        model.save_pretrained(folder, max_shard_size="40KB" if case.sharded else "1GB")
        if case.mtp:
            _add_tensors(folder, _mtp_tensors(model, rng))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=train_tokenizer(config.vocab_size), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)
    if case.published:
        path = folder / "config.json"
        path.write_text(json.dumps(_as_published(json.loads(path.read_text()))))
    return folder


@torch.no_grad()
def randomise(network: nn.Module, rng: torch.Generator) -> None:
    """Loud weights: attention that looks somewhere, norms that are not 1, biases that are not 0, logits with spread."""
    for name, weight in network.named_parameters():
        if weight.ndim == 1 and "norm" in name:
            weight.uniform_(0.6, 1.6, generator=rng)
        elif weight.ndim == 1:
            weight.normal_(0.0, 0.3, generator=rng)
        elif "embed_tokens" in name:
            weight.normal_(0.0, 0.2, generator=rng)
        else:
            gain = 1.6 if "lm_head" in name else 1.1
            weight.normal_(0.0, gain * weight.shape[-1] ** -0.5, generator=rng)
    for name, values in network.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values.normal_(-0.3, 0.3, generator=rng)


def mtp_names(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """From the parameters of transformers' MtpModel to the names that published checkpoints use."""
    named: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        if not name.startswith("layers.0."):
            continue  # embedding and head are the main model's own
        short = name.removeprefix("layers.0.").removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        prefix = f"model.layers.{layer}.{short}"
        if short == "mlp.experts.gate_up_proj":
            for i, both in enumerate(values):
                gate, up = both.chunk(2)
                named[f"model.layers.{layer}.mlp.experts.{i}.gate_proj.weight"] = gate.contiguous()
                named[f"model.layers.{layer}.mlp.experts.{i}.up_proj.weight"] = up.contiguous()
        elif short == "mlp.experts.down_proj":
            for i, down in enumerate(values):
                named[f"model.layers.{layer}.mlp.experts.{i}.down_proj.weight"] = down.contiguous()
        else:
            named[prefix] = values
    return named


def _mtp_tensors(model: Any, rng: torch.Generator) -> dict[str, torch.Tensor]:
    from transformers.modeling_layers import MtpModel

    mtp = MtpModel(model, 1)
    randomise(mtp.layers, rng)
    return mtp_names(mtp.state_dict(), model.config.num_hidden_layers)


def _add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """As one more shard, the way published checkpoints carry layers that the main network does not use."""
    single = folder / "model.safetensors"
    if single.exists():  # a file of this name would be taken for the whole model
        single.rename(folder / "model-00001-of-00001.safetensors")
    held = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    extra = "model-mtp.safetensors"
    save_file(tensors, folder / extra, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": held | dict.fromkeys(tensors, extra)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _as_published(config: dict[str, Any]) -> dict[str, Any]:
    """The layout that checkpoints on the hub have: older names, and nothing that only transformers 5 writes."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    deepseek = config["model_type"].startswith("deepseek")
    config["rope_scaling"] = None if kind == "default" else {"type" if deepseek else "rope_type": kind} | rope
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config.pop("layer_types", None)
    if deepseek:
        assert config.pop("rope_interleave", True), "published DeepSeek configs have no such key and interleave"
        for name in ("head_dim", "qk_head_dim"):
            config.pop(name)
        v3 = config["model_type"] == "deepseek_v3"
        config |= {"scoring_func": "sigmoid" if v3 else "softmax", "moe_layer_freq": 1, "ep_size": 1}
        if v3:
            config["topk_method"] = "noaux_tc"
    return config
