"""Network definitions. Weights come from `checkpoints`; computation goes through a kernel table."""

from tripool.kernels import Batch
from tripool.models.decoder import Model
from tripool.models.load import load_model, read_arch

__all__ = ["Batch", "Model", "load_model", "read_arch"]
