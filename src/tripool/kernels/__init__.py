"""The kernel room: what a layer computes. `ref/` is plain torch, the oracle; `cpu/` is fast torch; `cpu8/` is C."""

from tripool.kernels.batch import Batch
from tripool.kernels.cpu8.table import CPU8
from tripool.kernels.table import CPU, REFERENCE, KernelTable

__all__ = ["CPU", "CPU8", "REFERENCE", "Batch", "KernelTable"]
