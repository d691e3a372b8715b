"""Kernels: the operations of a layer. `ref/` is plain torch and the test oracle; `cpu/` uses torch's fused operators;
`cpu8/` is C with 8-bit weights; `cuda/` and `triton/` are for GPUs.
"""

from tripool.kernels.batch import Batch
from tripool.kernels.cpu8.table import CPU8
from tripool.kernels.table import CPU, REFERENCE, KernelTable

__all__ = ["CPU", "CPU8", "REFERENCE", "Batch", "KernelTable"]
