"""Checkpoints in e4m3 with a scale for each block of 128 x 128, as DeepSeek publishes its models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128


def to_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 values and the float32 factor of each block, as DeepSeek publishes them."""
    rows, columns = weight.shape
    grid = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            grid[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / grid[i, j]).to(torch.float8_e4m3fn)
    return values, grid


def multiplied_out(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    wide = torch.kron(grid, torch.ones(BLOCK, BLOCK))[:rows, :columns]
    return values.float() * wide


def is_rounded(name: str, values: torch.Tensor) -> bool:
    return (values.ndim == 2 and name.endswith("_proj.weight")) or name.endswith("with_mqa.weight")


def to_fp8(fp8: Path, plain: Path) -> None:
    """The saved case in `fp8` becomes an FP8 checkpoint; `plain` holds its very values in float32."""
    shards = list(fp8.glob("*.safetensors"))
    held = {name: values for shard in shards for name, values in load_file(shard).items()}
    for old in (*shards, *fp8.glob("*.index.json")):
        old.unlink()
    shutil.copytree(fp8, plain, dirs_exist_ok=True)
    stored, floats = {}, {}
    for name, values in held.items():
        if is_rounded(name, values):
            stored[name], stored[f"{name}_scale_inv"] = to_blocks(values)
            floats[name] = multiplied_out(stored[name], stored[f"{name}_scale_inv"])
        else:
            stored[name] = floats[name] = values.bfloat16()
    save_file(stored, fp8 / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (fp8 / "config.json").write_text(json.dumps(config))
