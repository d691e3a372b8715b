"""Interface of checkpoints: names, shapes, bytes, config and text files. Independent of networks and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from tripool.errors import TensorShape
from tripool.text.files import TextFiles

FLOAT_OUT = (torch.float32, torch.bfloat16, torch.float16)
"""Types a caller may request; stored values are dequantised or cast into them."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: str
    """As stored: "F32", "BF16", "I8", "F8_E4M3", "Q4_1", …"""


class Checkpoint(Protocol):
    """One model on disk, mapped. Opening validates every header; only `read` touches the data.

    Tensors are *logical*, under Hugging Face names: a quantised weight is one tensor and its scale is not listed.
    """

    @property
    def name(self) -> str:
        """Short: "tiny", the folder's name, the file's stem."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """In the layout of Hugging Face's config.json, as stored (or synthesised, where the format has its own)."""

    @property
    def text(self) -> TextFiles:
        """Read on first use, so that a folder of bare weights still opens; raises if there is no tokenizer."""

    def infos(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (any strides, float32/bfloat16/float16) in small pieces; touched pages are released."""

    def row_scales(self, name: str) -> torch.Tensor | None:
        """Row scales of an 8-bit weight, float32 [out], or [out, blocks of columns] where a row has several. None for
        anything else."""

    def stored_bytes(self) -> int:
        """Size of the weight files."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def check_out(path: Path, name: str, stored: tuple[int, ...], out: torch.Tensor) -> None:
    assert out.dtype in FLOAT_OUT, f"read() fills float tensors, not {out.dtype}"
    check_shape(path, name, stored, tuple(out.shape))


def check_shape(path: Path, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """The caller's shape comes from the config, so a mismatch means that the checkpoint is inconsistent."""
    if wanted != stored:
        problem = f"stored as {list(stored)}, the config asks for {list(wanted)}"
        hint = "config.json and the weights belong to different models; fetch both again from one place"
        raise TensorShape(problem, hint=hint, file=path, tensor=name)
