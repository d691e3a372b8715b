"""A GGUF file as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from tripool.checkpoints.base import TensorInfo, check_out
from tripool.checkpoints.gguf.config import read_config
from tripool.checkpoints.gguf.header import read_header
from tripool.checkpoints.gguf.names import logical_tensors
from tripool.checkpoints.gguf.tensors import Source
from tripool.checkpoints.gguf.text import read_text_files
from tripool.checkpoints.mapped import MappedFile
from tripool.errors import TensorMissing
from tripool.text.files import TextFiles


class GgufCheckpoint:
    """See `Checkpoint`. Tensors come under Hugging Face names, in Hugging Face order of rows."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.stem
        self._file = MappedFile(path, anywhere=True)  # the file that the user named
        try:
            self._header = read_header(self._file)
            self.config: Mapping[str, Any] = read_config(self._file, self._header)
            self._tensors: Mapping[str, Source] = logical_tensors(self._file, self._header, self.config)
            self._infos = {
                name: TensorInfo(source.shape, source.tensor.entry.kind.name) for name, source in self._tensors.items()
            }
        except BaseException:
            self._file.close()
            raise

    @cached_property
    def text(self) -> TextFiles:
        return read_text_files(self._header)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, out: torch.Tensor) -> None:
        if name not in self._tensors:
            problem = "the metadata promises a tensor that the file does not hold"
            hint = "the file was converted wrongly or for another program; fetch or convert it again"
            raise TensorMissing(problem, hint=hint, file=self.path, tensor=name)
        source = self._tensors[name]
        check_out(self.path, name, source.shape, out)
        source.read(out)

    def row_scales(self, name: str) -> torch.Tensor | None:
        return None  # no GGUF type has one scale per row

    def stored_bytes(self) -> int:
        return self._file.num_bytes

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
