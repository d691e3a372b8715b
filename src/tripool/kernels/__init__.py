"""The kernel room: one op per file. `ref/` is plain torch, the oracle; `cpu/` is fast on a CPU."""

from tripool.kernels.cpu.table import CPU
from tripool.kernels.cpu8.table import CPU8
from tripool.kernels.table import REFERENCE, KernelTable

__all__ = ["CPU", "CPU8", "REFERENCE", "KernelTable"]
