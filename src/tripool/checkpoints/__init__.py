"""Checkpoints on disk, read into tensors that the caller owns.

Supplies bytes, config and text files. Refuses to know networks: which tensors a model needs is `models`' business.
"""

from tripool.checkpoints.base import Checkpoint, TensorInfo
from tripool.checkpoints.folder import FolderCheckpoint
from tripool.checkpoints.gguf import GgufCheckpoint
from tripool.checkpoints.names import ModelEntry, list_models, locate, open_checkpoint

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
