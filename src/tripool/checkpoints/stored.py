"""Storage formats of a logical tensor in a Hugging Face folder: plain, int8 rows, or float8 blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tripool.checkpoints.mapped import row_pieces
from tripool.checkpoints.safetensors import MappedTensor
from tripool.errors import TensorMissing, TensorShape, WrongDtype

UNSCALED_8_BIT = frozenset({"I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"})


class Stored(Protocol):
    @property
    def weight(self) -> MappedTensor: ...

    def read(self, out: torch.Tensor) -> None: ...

    def row_scales(self) -> torch.Tensor | None:
        """See `Checkpoint`."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    weight: MappedTensor

    def read(self, out: torch.Tensor) -> None:
        if self.weight.info.dtype in UNSCALED_8_BIT:
            problem = f"stored as {self.weight.info.dtype}, and nothing says how it is scaled"
            hint = "config.json needs the quantization_config that the checkpoint was made with"
            raise WrongDtype(problem, hint=hint, file=self.weight.file.path, tensor=self.weight.name)
        self.weight.read(out)

    def row_scales(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """compressed-tensors "int-quantized": weight[o, i] = int8[o, i] · scale[o]."""

    weight: MappedTensor
    scale: MappedTensor

    def __post_init__(self) -> None:
        num_rows = self.weight.info.shape[0]
        _check_scale(self.weight, self.scale, {(num_rows, 1), (num_rows,)})

    def row_scales(self) -> torch.Tensor:
        scales = torch.empty(self.weight.info.shape[0], dtype=torch.float32)
        self.scale.read(scales.view(self.scale.info.shape))
        return scales

    def read(self, out: torch.Tensor) -> None:
        scales = self.row_scales().unsqueeze(1).to(out.device)
        num_rows, num_columns = self.weight.info.shape
        for first, last in row_pieces(num_rows, _float_bytes(out) * num_columns):
            values = self.weight.rows(first, last, out.device).to(torch.float32)
            out[first:last].copy_(values.mul_(scales[first:last]))
            self.weight.drop(first, last)


@dataclass(frozen=True, slots=True)
class Float8Blocks:
    """DeepSeek's format: one float32 scale per block of weights; blocks at the edges may be smaller."""

    weight: MappedTensor
    scale: MappedTensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        num_rows, num_columns = self.weight.info.shape
        grid = (-(-num_rows // self.block[0]), -(-num_columns // self.block[1]))
        _check_scale(self.weight, self.scale, {grid})

    def row_scales(self) -> torch.Tensor:
        """[rows, blocks of columns]."""
        return self._grid().repeat_interleave(self.block[0], 0)[: self.weight.info.shape[0]]

    def _grid(self) -> torch.Tensor:
        scales = torch.empty(self.scale.info.shape, dtype=torch.float32)
        self.scale.read(scales)
        return scales

    def read(self, out: torch.Tensor) -> None:
        scales = self._grid().to(out.device)
        block_rows, block_columns = self.block
        num_rows, num_columns = self.weight.info.shape
        for first, last in row_pieces(num_rows, _float_bytes(out) * num_columns, multiple=block_rows):
            values = self.weight.rows(first, last, out.device).to(torch.float32)
            factors = scales[first // block_rows : -(-last // block_rows)].repeat_interleave(block_columns, dim=1)
            values.mul_(factors.repeat_interleave(block_rows, dim=0)[: last - first, :num_columns])
            out[first:last].copy_(values)
            self.weight.drop(first, last)


def _float_bytes(out: torch.Tensor) -> int:
    """Bytes by which pieces are measured: a CPU's memory holds them in float32, to a GPU they go in 8 bits."""
    return 1 if out.is_cuda else 4


def _float8(weight: MappedTensor, scale: MappedTensor, block: tuple[int, int]) -> Float8Blocks:
    """A block larger than the weight covers all of it."""
    num_rows, num_columns = weight.info.shape
    return Float8Blocks(weight, scale, (min(block[0], max(num_rows, 1)), min(block[1], max(num_columns, 1))))


def _check_scale(weight: MappedTensor, scale: MappedTensor, allowed: set[tuple[int, ...]]) -> None:
    if scale.info.shape not in allowed:
        problem = f"scales are {list(scale.info.shape)} for a weight of {list(weight.info.shape)}"
        hint = "the checkpoint was quantised in a layout that this version does not read"
        raise TensorShape(problem, hint=hint, file=scale.file.path, tensor=scale.name)


def logical_tensors(
    tensors: Mapping[str, MappedTensor], config: Mapping[str, Any], config_path: Path
) -> dict[str, Stored]:
    """Pair weights with their scales according to config.json's quantization_config."""
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return {name: Plain(tensor) for name, tensor in tensors.items()}
    if not isinstance(quantisation, dict):
        hint = "fetch config.json again"
        raise WrongDtype("quantization_config is not an object", hint=hint, file=config_path)
    method = quantisation.get("quant_method")
    if method == "compressed-tensors":
        _check_int8(quantisation, config_path)
        return _paired(tensors, "I8", "_scale", Int8Rows)
    if method == "fp8":
        block = _block(quantisation, config_path)
        return _paired(tensors, "F8_E4M3", "_scale_inv", lambda weight, scale: _float8(weight, scale, block))
    hint = "readable: compressed-tensors (int8 per channel), fp8 (block scales), or an unquantised checkpoint"
    raise WrongDtype(f"quantised with '{method}', which is not read", hint=hint, file=config_path)


def _paired(
    tensors: Mapping[str, MappedTensor],
    dtype: str,
    suffix: str,
    join: Callable[[MappedTensor, MappedTensor], Stored],
) -> dict[str, Stored]:
    logical: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if name.endswith(suffix) and name.removesuffix(suffix) in tensors:
            continue
        if tensor.info.dtype != dtype or len(tensor.info.shape) != 2:
            logical[name] = Plain(tensor)
            continue
        scale = tensors.get(name + suffix)
        if scale is None:
            hint = "the checkpoint is incomplete; fetch it again"
            raise TensorMissing(
                "a quantised weight has no scale", hint=hint, file=tensor.file.path, tensor=name + suffix
            )
        logical[name] = join(tensor, scale)
    return logical


def _check_int8(quantisation: Mapping[str, Any], config_path: Path) -> None:
    """Accept only what `Int8Rows` implements: 8-bit symmetric integers with one scale per output row."""
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    layout = quantisation.get("format")
    groups = quantisation.get("config_groups")
    named = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") if isinstance(group, dict) else None for group in named]
    differing = [w for w in weights if not isinstance(w, dict) or any(w.get(k) != v for k, v in wanted.items())]
    if layout != "int-quantized" or not weights or differing:
        detail = f"format '{layout}'" + (f", weights {differing[0]}" if differing else "")
        hint = "readable: format int-quantized with 8-bit symmetric integer weights per channel"
        raise WrongDtype(f"compressed-tensors of a kind that is not read: {detail}", hint=hint, file=config_path)


def _block(quantisation: Mapping[str, Any], config_path: Path) -> tuple[int, int]:
    block = quantisation.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    hint = "readable: fp8 with one scale per block of weights, such as [128, 128]"
    raise WrongDtype(f"fp8 with weight_block_size {block}, which is not read", hint=hint, file=config_path)
