"""Checkpoints on disk, read into tensors that the caller owns.

Supplies bytes, config and text files. Refuses to know networks: which tensors a model needs is `models`' business.
"""

from typing import TYPE_CHECKING

from tripool.checkpoints.base import Checkpoint, TensorInfo
from tripool.checkpoints.folder import FolderCheckpoint
from tripool.checkpoints.names import ModelEntry, list_models, locate, open_checkpoint

if TYPE_CHECKING:
    from tripool.checkpoints.gguf import GgufCheckpoint

__all__ = [
    "Checkpoint",
    "FolderCheckpoint",
    "GgufCheckpoint",
    "ModelEntry",
    "TensorInfo",
    "list_models",
    "locate",
    "open_checkpoint",
]


def __getattr__(name: str) -> object:
    """GGUF on first use: machines that measure GPUs do not have the format's package."""
    if name == "GgufCheckpoint":
        from tripool.checkpoints.gguf import GgufCheckpoint

        return GgufCheckpoint
    raise AttributeError(f"module 'tripool.checkpoints' has no attribute '{name}'")
