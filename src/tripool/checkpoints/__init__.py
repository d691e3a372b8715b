"""Checkpoints on disk, read into tensors that the caller owns.

Provides bytes, config and text files. Which tensors a model needs is decided in `models`.
"""

import importlib
from typing import TYPE_CHECKING

from tripool.checkpoints.names import ModelEntry, list_models, locate, open_checkpoint, pinned, registered
from tripool.checkpoints.registry import Registered, Registry, RegistryError, Version

if TYPE_CHECKING:
    from tripool.checkpoints.base import Checkpoint, TensorInfo
    from tripool.checkpoints.folder import FolderCheckpoint
    from tripool.checkpoints.gguf import GgufCheckpoint

_LATER = {"Checkpoint": "base", "TensorInfo": "base", "FolderCheckpoint": "folder", "GgufCheckpoint": "gguf"}

__all__ = [
    "Checkpoint", "FolderCheckpoint", "GgufCheckpoint", "ModelEntry", "Registered", "Registry", "RegistryError",
    "TensorInfo", "Version", "list_models", "locate", "open_checkpoint", "pinned", "registered",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Imported on first use: a server whose engine has a process of its own looks up names and needs no torch, and GPU
    test machines do not have the package of GGUF."""
    if name in _LATER:
        return getattr(importlib.import_module(f"tripool.checkpoints.{_LATER[name]}"), name)
    raise AttributeError(f"module 'tripool.checkpoints' has no attribute '{name}'")
