"""Run manifest: data shared by the processes of a run, written once into its folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tripool.control.allocation import Place
from tripool.errors import ModelNotFound
from tripool.text.files import TextFiles

_FILE = "plan.json"


class ServedModel(msgspec.Struct, frozen=True):
    """A gateway can start again without opening a checkpoint."""

    name: str
    text: TextFiles
    cache: tuple[str, ...] = ()
    """Names of its cache members."""
    follows: str = ""
    """The name, with its registry's folder, whose published version this was at the start; empty: it stays as it is."""


class RunManifest(msgspec.Struct, frozen=True):
    models: tuple[ServedModel, ...]
    """The first is the default."""
    model_cache: str = ""
    """Folder of the weight cache; empty: there is none."""
    model_cache_bytes: int = 0
    places: tuple[Place, ...] = ()
    """Where the workers of this host run."""

    @property
    def cache(self) -> tuple[str, ...]:
        """Names of all cache members."""
        return tuple(member for model in self.models for member in model.cache)

    def model(self, name: str) -> ServedModel:
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(f"'{model.name}'" for model in self.models)
        raise ModelNotFound(f"this server has no model '{name}'", hint=f"it has {known}")

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_bytes(msgspec.json.encode(self))


def read_manifest(folder: Path) -> RunManifest:
    return msgspec.json.decode((folder / _FILE).read_bytes(), type=RunManifest)
