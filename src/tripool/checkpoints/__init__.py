"""Checkpoints on disk, read into tensors that the caller owns.

Provides bytes, config and text files. Which tensors a model needs is decided in `models`.
"""

from typing import TYPE_CHECKING

from tripool.checkpoints.base import Checkpoint, TensorInfo
from tripool.checkpoints.folder import FolderCheckpoint
from tripool.checkpoints.names import ModelEntry, list_models, locate, open_checkpoint, pinned, registered
from tripool.checkpoints.registry import Registered, Registry, RegistryError, Version

if TYPE_CHECKING:
    from tripool.checkpoints.gguf import GgufCheckpoint

__all__ = [
    "Checkpoint", "FolderCheckpoint", "GgufCheckpoint", "ModelEntry", "Registered", "Registry", "RegistryError",
    "TensorInfo", "Version", "list_models", "locate", "open_checkpoint", "pinned", "registered",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import GGUF on first use: GPU test machines do not have the format's package."""
    if name == "GgufCheckpoint":
        from tripool.checkpoints.gguf import GgufCheckpoint

        return GgufCheckpoint
    raise AttributeError(f"module 'tripool.checkpoints' has no attribute '{name}'")
