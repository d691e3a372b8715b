"""Writes safetensors files tensor by tensor: the header first, then the tensors in any order.

Implements the file format and the int8 layout; callers decide which tensor is stored how.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from tripool.checkpoints.base import TensorInfo
from tripool.checkpoints.safetensors import TORCH_DTYPES, SafetensorsFile
from tripool.text.files import TextFiles

KEPT_AS_STORED = ("F32", "BF16", "F16")
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class SafetensorsWriter:
    """Writes an `.unfinished` file that `finish` renames when it is complete. In `with`, an exception removes it."""

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        # Widest types first: then everything is aligned without padding.
        self._infos = dict(sorted(infos.items(), key=lambda item: (-TORCH_DTYPES[item[1].dtype].itemsize, item[0])))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        position = 0
        for name, info in self._infos.items():
            end = position + math.prod(info.shape) * TORCH_DTYPES[info.dtype].itemsize
            header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [position, end]}
            self._offsets[name], position = position, end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._start = 8 + len(encoded)
        self._missing = set(self._infos)
        self._path, self._unfinished = path, path.with_suffix(".unfinished")
        self._file = self._unfinished.open("wb")
        self._file.write(struct.pack("<Q", len(encoded)) + encoded)
        self._file.truncate(self._start + position)

    def put(self, name: str, values: torch.Tensor) -> None:
        info = self._infos[name]
        assert tuple(values.shape) == info.shape and values.dtype == TORCH_DTYPES[info.dtype], name
        self._file.seek(self._start + self._offsets[name])
        if values.numel():
            self._file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def finish(self, *, sync: bool = True) -> None:
        """`sync` the file to disk, so that a crash right after recording its completion loses nothing."""
        assert not self._missing, f"never put: {sorted(self._missing)[:3]}"
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._unfinished, self._path)

    def abandon(self) -> None:
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Each in its own type."""
    infos = {name: TensorInfo(tuple(values.shape), _NAMES[values.dtype]) for name, values in tensors.items()}
    with SafetensorsWriter(path, infos) as writer:
        for name, values in tensors.items():
            writer.put(name, values.detach().cpu())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    file = SafetensorsFile(path)
    try:
        return {name: tensor.whole().clone() for name, tensor in file.tensors.items()}
    finally:
        file.close()


def int8_layout(targets: Sequence[str], ignore: Sequence[str]) -> dict[str, Any]:
    """config.json's quantization_config: compressed-tensors, weights per row, activations dynamically per token."""
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {
                "targets": list(targets),
                "weights": eight_bits | {"strategy": "channel", "dynamic": False},
                "input_activations": eight_bits | {"strategy": "token", "dynamic": True},
            }
        },
    }


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, in] → int8 [out, in] and float32 scales [out, 1]; weight ≈ int8 · scale, error ≤ scale / 2."""
    largest = weight.abs().amax(dim=1, keepdim=True) if weight.shape[1] else torch.zeros(weight.shape[0], 1)
    scale = torch.where(largest > 0, largest / 127, 1.0).clamp_(min=torch.finfo(torch.float32).tiny)
    return (weight / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def write_json(path: Path, value: Mapping[str, Any], indent: int | None = None) -> None:
    separators = (",", ":") if indent is None else None
    path.write_text(
        json.dumps(value, ensure_ascii=False, indent=indent, separators=separators) + "\n", encoding="utf-8"
    )


def write_text_files(target: Path, text: TextFiles) -> None:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **text.special_tokens}
    if text.chat_template is not None:
        settings["chat_template"] = text.chat_template
    write_json(target / "tokenizer.json", json.loads(text.tokenizer_json))
    write_json(target / "tokenizer_config.json", settings, indent=1)


def with_end_ids(config: dict[str, Any], text: TextFiles) -> dict[str, Any]:
    """The config with the token ids that end an answer."""
    ends = sorted(text.end_ids)
    return config | ({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})
