"""A checkpoint written again in e4m3 with a scale for each block of 128 x 128, as DeepSeek publishes its models.

Not a benchmark by itself: `engine_cuda.py` reads what it writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import timing  # noqa: F401  (first: it puts src/ on the path)
import torch

from tripool.checkpoints import Checkpoint, TensorInfo
from tripool.checkpoints.write import SafetensorsWriter, write_text_files

BLOCK = 128
E4M3 = torch.float8_e4m3fn


def blocks_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [out, in] -> e4m3 of the same shape, and float32 scales by block."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = tiles.abs().amax((1, 3)).clamp_min(1e-10) / torch.finfo(E4M3).max
    return (tiles / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns].to(E4M3), scales


def write_fp8(checkpoint: Checkpoint, folder: Path) -> Path:
    """Linears in e4m3; embedding, head, router and norms in bfloat16."""
    tensors: dict[str, torch.Tensor] = {}
    for name, info in checkpoint.infos().items():
        values = torch.empty(info.shape)
        checkpoint.read(name, values)
        if len(info.shape) == 2 and "_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = blocks_of(values)
        else:
            tensors[name] = values.bfloat16()
    kinds = {E4M3: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}
    infos = {name: TensorInfo(tuple(values.shape), kinds[values.dtype]) for name, values in tensors.items()}
    writer = SafetensorsWriter(folder / "model.safetensors", infos)
    for name, values in tensors.items():
        writer.put(name, values)
    writer.finish()
    write_text_files(folder, checkpoint.text)
    layout = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({**checkpoint.config, "quantization_config": layout}))
    return folder
