"""Write a checkpoint as int8 (compressed-tensors, one scale per row): how the bundled model was made.

Plain rounding. Scale search, outliers and error compensation belong to the quantiser, not here.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tripool.checkpoints.base import Checkpoint, TensorInfo
from tripool.checkpoints.folder import FolderCheckpoint
from tripool.checkpoints.safetensors import TORCH_DTYPES
from tripool.errors import CheckpointCorrupt

KEPT_AS_STORED = ("F32", "BF16", "F16")
ROUTER = ".mlp.gate.weight"
"""Small, and a rounding error here sends a token to the wrong expert: kept in floats."""

QUANTISATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["re:.*mlp\\.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, in] → int8 [out, in] and float32 scales [out, 1]; weight ≈ int8 · scale, error ≤ scale / 2."""
    largest = weight.abs().amax(dim=1, keepdim=True) if weight.shape[1] else torch.zeros(weight.shape[0], 1)
    scale = torch.where(largest > 0, largest / 127, 1.0).clamp_(min=torch.finfo(torch.float32).tiny)
    return (weight / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def bundle_int8(source: Checkpoint, target: Path) -> None:
    """Same source, same bytes. `target` becomes a folder that `FolderCheckpoint` reads."""
    text = source.text
    config = dict(source.config) | {"quantization_config": QUANTISATION}
    if text.end_ids:
        ends = sorted(text.end_ids)
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **text.special_tokens}
    if text.chat_template is not None:
        settings["chat_template"] = text.chat_template
    target.mkdir(parents=True, exist_ok=True)
    _write_weights(source, target / "model.safetensors")
    _write_json(target / "config.json", config, indent=1)
    _write_json(target / "tokenizer.json", json.loads(text.tokenizer_json))
    _write_json(target / "tokenizer_config.json", settings, indent=1)


def _write_json(path: Path, value: dict[str, Any], indent: int | None = None) -> None:
    separators = (",", ":") if indent is None else None
    path.write_text(
        json.dumps(value, ensure_ascii=False, indent=indent, separators=separators) + "\n", encoding="utf-8"
    )


def _plan(source: Checkpoint) -> dict[str, TensorInfo]:
    """What will be stored, widest types first: then everything is aligned without padding."""
    stored: dict[str, TensorInfo] = {}
    for name, info in source.infos().items():
        if _is_quantised(name, info):
            stored[name] = TensorInfo(info.shape, "I8")
            stored[name + "_scale"] = TensorInfo((info.shape[0], 1), "F32")
        else:
            stored[name] = TensorInfo(info.shape, info.dtype if info.dtype in KEPT_AS_STORED else "F32")
    return dict(sorted(stored.items(), key=lambda item: (-TORCH_DTYPES[item[1].dtype].itemsize, item[0])))


def _is_quantised(name: str, info: TensorInfo) -> bool:
    return len(info.shape) == 2 and name.endswith(".weight") and not name.endswith(ROUTER)


def _write_weights(source: Checkpoint, path: Path) -> None:
    plan = _plan(source)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, info in plan.items():
        end = position + math.prod(info.shape) * TORCH_DTYPES[info.dtype].itemsize
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(file.tell() + position)
        for name, values in _stored_values(source, plan):
            _write_at(file, 8 + len(encoded) + header[name]["data_offsets"][0], values)
    os.replace(unfinished, path)


def _stored_values(source: Checkpoint, plan: dict[str, TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, info in source.infos().items():
        weight = torch.empty(info.shape, dtype=torch.float32)
        source.read(name, weight)
        if not weight.isfinite().all():
            hint = "the training run diverged or the file is damaged; fetch it again"
            raise CheckpointCorrupt("holds infinities or NaNs", hint=hint, file=source.path, tensor=name)
        if _is_quantised(name, info):
            values, scale = quantise_rows(weight)
            yield name, values
            yield name + "_scale", scale
        else:
            yield name, weight.to(TORCH_DTYPES[plan[name].dtype])


def _write_at(file: BinaryIO, offset: int, values: torch.Tensor) -> None:
    file.seek(offset)
    file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data if values.numel() else b"")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m tripool.checkpoints.bundle SOURCE_FOLDER TARGET_FOLDER\n")
        return 2
    source_path, target = (Path(argument) for argument in arguments)
    with FolderCheckpoint(source_path) as source:
        bundle_int8(source, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
