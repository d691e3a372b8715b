"""A Hugging Face folder as a checkpoint: config.json, safetensors (one file or shards) and the text files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from tripool.checkpoints.base import TensorInfo, check_out
from tripool.checkpoints.folder_text import read_text_files
from tripool.checkpoints.json_files import read_object
from tripool.checkpoints.safetensors import MappedTensor, SafetensorsFile
from tripool.checkpoints.stored import Stored, logical_tensors
from tripool.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, TensorMissing, WrongDtype
from tripool.text.files import TextFiles

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class FolderCheckpoint:
    """See `Checkpoint`. Either every shard opens and holds what the index says, or none stays open."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        if not path.is_dir():
            raise CheckpointMissing("no such folder", hint="check the path", file=path)
        self.path = path
        self.name = name or path.resolve().name
        config_path = path / "config.json"
        self.config: Mapping[str, Any] = read_object(config_path, hint="a checkpoint folder needs its config.json")
        self._files: list[SafetensorsFile] = []
        try:
            self._tensors: Mapping[str, Stored] = logical_tensors(self._mapped(), self.config, config_path)
            self._infos = {name: stored.weight.info for name, stored in self._tensors.items()}
        except BaseException:
            self.close()
            raise

    @cached_property
    def text(self) -> TextFiles:
        return read_text_files(self.path, self.config)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, out: torch.Tensor) -> None:
        stored = self._stored(name)
        check_out(stored.weight.file.path, name, stored.weight.info.shape, out)
        stored.read(out)

    def row_scales(self, name: str) -> torch.Tensor | None:
        return self._stored(name).row_scales()

    def stored_bytes(self) -> int:
        return sum(file.num_bytes for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []
        self._tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, name: str) -> Stored:
        assert self._files, "read after close"
        if name not in self._tensors:
            problem = "the config promises a tensor that no file holds"
            hint = "config.json and the weights belong to different models, or a shard is old; fetch them again"
            raise TensorMissing(problem, hint=hint, file=self.path, tensor=name)
        return self._tensors[name]

    def _mapped(self) -> dict[str, MappedTensor]:
        if (self.path / SINGLE_FILE).exists():
            return dict(self._open(self.path / SINGLE_FILE).tensors)
        if (self.path / INDEX_FILE).exists():
            return self._sharded(self.path / INDEX_FILE)
        pickled = sorted([*self.path.glob("*.bin"), *self.path.glob("*.pt"), *self.path.glob("*.pth")])
        if pickled:
            problem = "the weights are pickled, which can run code when read and is refused"
            hint = "convert them with transformers: save_pretrained(..., safe_serialization=True)"
            raise WrongDtype(problem, hint=hint, file=pickled[0])
        hint = f"the folder needs {SINGLE_FILE} or {INDEX_FILE} with its shards"
        raise CheckpointMissing("no weights in the folder", hint=hint, file=self.path / SINGLE_FILE)

    def _sharded(self, index_path: Path) -> dict[str, MappedTensor]:
        shard_of = read_object(index_path).get("weight_map")
        if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
            raise CheckpointCorrupt("the index has no weight_map", hint="fetch the file again", file=index_path)
        shards: dict[str, SafetensorsFile] = {}
        for shard in sorted(set(shard_of.values())):
            if Path(shard).name != shard:  # an index must not reach outside its folder
                hint = "the index was written wrongly; fetch it again"
                raise CheckpointError(f"the index names a shard '{shard}'", hint=hint, file=index_path)
            shards[shard] = self._open(self.path / shard)
        tensors: dict[str, MappedTensor] = {}
        for name, shard in shard_of.items():
            if name not in shards[shard].tensors:
                hint = "index and shard come from different downloads; fetch both again"
                path = self.path / shard
                raise TensorMissing("it is not in the shard that the index names", hint=hint, file=path, tensor=name)
            tensors[name] = shards[shard].tensors[name]
        return tensors

    def _open(self, path: Path) -> SafetensorsFile:
        file = SafetensorsFile(path)
        self._files.append(file)
        return file
