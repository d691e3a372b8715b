"""Memory-mapped safetensors files. Every claim of the header is checked against the file."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tripool.checkpoints.base import TensorInfo
from tripool.checkpoints.json_files import parse_object
from tripool.checkpoints.mapped import MappedFile, row_pieces
from tripool.errors import CheckpointCorrupt, CheckpointTruncated, WrongDtype

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

MAX_HEADER_BYTES = 2**25
"""Enough for some hundred thousand tensors. Also bounds memory: parsed, a header takes many times its size."""
_MAX_DIMENSIONS = 8
_MAX_SIZE = 2**62
LFS_MARK = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor of one file, read by rows of its first dimension."""

    file: MappedFile
    name: str
    info: TensorInfo
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.info.dtype]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.info.shape[1:]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    def rows(self, first: int, last: int, device: torch.device | None = None) -> torch.Tensor:
        """View of rows `first` to `last` (a copy where the file is not aligned). On another device: a copy through
        pinned memory, which does not wait for the device."""
        assert self.info.shape, "a scalar has no rows"
        start = self.start + first * self.row_bytes
        flat = self.file.tensor(start, start + (last - first) * self.row_bytes, self.dtype)
        if device is not None and device.type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        return flat.view(last - first, *self.row_shape)

    def drop(self, first: int, last: int) -> None:
        self.file.drop(self.start + first * self.row_bytes, self.start + last * self.row_bytes)

    def whole(self) -> torch.Tensor:
        """The whole tensor as a view; for small tensors."""
        return self.file.tensor(self.start, self.stop, self.dtype).view(self.info.shape)

    def read(self, out: torch.Tensor) -> None:
        if not self.info.shape:
            out.copy_(self.whole())
            return
        for first, last in row_pieces(self.info.shape[0], self.row_bytes):
            out[first:last].copy_(self.rows(first, last, out.device))
            self.drop(first, last)


class SafetensorsFile:
    """`tensors` by name. The header was validated when the file was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            header, data_start = _header(self._file)
            self.tensors = _tensors(self._file, header, data_start)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def close(self) -> None:
        self._file.close()


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    begin = bytes(file.view(0, min(file.num_bytes, len(LFS_MARK))))
    if begin == LFS_MARK:
        hint = "run `git lfs pull` in the folder to get the weights"
        raise CheckpointTruncated("the file is a git-lfs pointer, not the weights", hint=hint, file=file.path)
    if len(begin) < 8:
        hint = "fetch it again"
        raise CheckpointTruncated(f"ends after {len(begin)} bytes, inside its header", hint=hint, file=file.path)
    (header_bytes,) = struct.unpack("<Q", begin[:8])
    if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > file.num_bytes:
        problem = f"its header claims {header_bytes} bytes, the file has {file.num_bytes}"
        hint = "the download broke off or this is no safetensors file; fetch it again"
        raise CheckpointTruncated(problem, hint=hint, file=file.path)
    data_start = 8 + header_bytes
    return parse_object(bytes(file.view(8, data_start)), file.path, what="the header"), data_start


def _tensors(file: MappedFile, header: dict[str, Any], data_start: int) -> dict[str, MappedTensor]:
    tensors = {name: _tensor(file, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"}
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start != position:
            problem = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            hint = "the file was written wrongly; fetch it again"
            raise CheckpointCorrupt(problem, hint=hint, file=file.path, tensor=tensor.name)
        position = tensor.stop
    if position != file.num_bytes:
        extra = file.num_bytes - position
        hint = "the file was written wrongly; fetch it again"
        raise CheckpointCorrupt(f"{extra} bytes follow the last tensor", hint=hint, file=file.path)
    return tensors


def _tensor(file: MappedFile, name: str, entry: Any, data_start: int) -> MappedTensor:
    """Checks one header entry on its own: types, then shape against bytes, then bytes against the file."""
    hint = "the file was written wrongly; fetch it again"
    shape, dtype, offsets = _fields(entry)
    if shape is None or offsets is None or not isinstance(dtype, str):
        raise CheckpointCorrupt("malformed header entry", hint=hint, file=file.path, tensor=name)
    if dtype not in TORCH_DTYPES:
        known = f"readable types: {', '.join(TORCH_DTYPES)}"
        raise WrongDtype(f"stored as {dtype}, which is not read", hint=known, file=file.path, tensor=name)
    begin, end = offsets
    if begin > end or end - begin != math.prod(shape) * TORCH_DTYPES[dtype].itemsize:
        problem = f"{dtype} {list(shape)} does not fill bytes {begin} to {end}"
        raise CheckpointCorrupt(problem, hint=hint, file=file.path, tensor=name)
    if data_start + end > file.num_bytes:
        problem = f"its data ends at byte {data_start + end}, the file at {file.num_bytes}"
        hint = "the download broke off; fetch the file again"
        raise CheckpointTruncated(problem, hint=hint, file=file.path, tensor=name)
    return MappedTensor(file, name, TensorInfo(shape, dtype), data_start + begin, data_start + end)


def _fields(entry: Any) -> tuple[tuple[int, ...] | None, Any, tuple[int, int] | None]:
    if not isinstance(entry, dict):
        return None, None, None
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    pair = (offsets[0], offsets[1]) if offsets is not None and len(offsets) == 2 else None
    return shape, entry.get("dtype"), pair


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A short list of non-negative integers; JSON's true and 1.0 are not accepted."""
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return None
    if all(type(item) is int and 0 <= item <= _MAX_SIZE for item in value):
        return tuple(value)
    return None
