"""The 8-bit CPU table."""

from tripool.kernels.cpu8 import halves
from tripool.kernels.table import KernelTable

CPU8 = KernelTable(
    name="cpu-int8",
    rms_norm=halves.rms_norm,
    linear=halves.Linear8,
    join=halves.Join8,
    gqa=halves.Gqa8,
    mla=halves.Mla8,
    mlp=halves.Mlp8,
    moe=halves.Moe8,
)
