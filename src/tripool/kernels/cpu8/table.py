"""The 8-bit CPU table."""

from functools import partial

from tripool.kernels.cpu8 import halves
from tripool.kernels.cpu8.draft import Draft8
from tripool.kernels.cpu8.stack import Stack8
from tripool.kernels.shelf import FRESH, Shelf
from tripool.kernels.table import KernelTable
from tripool.kernels.weights import INT8


def cpu8_table(shelf: Shelf) -> KernelTable:
    return KernelTable(
        name="cpu-int8",
        rms_norm=halves.rms_norm,
        linear=partial(halves.Linear8, shelf=shelf),
        join=partial(halves.Join8, shelf=shelf),
        gqa=partial(halves.Gqa8, shelf=shelf),
        mla=partial(halves.Mla8, shelf=shelf),
        mlp=partial(halves.Mlp8, shelf=shelf),
        moe=partial(halves.Moe8, shelf=shelf),
        draft=Draft8,
        stack=Stack8,
        over=cpu8_table,
        linear_of_scales=lambda weight, scales: halves.Linear8(weight, None, scales, shelf),
        stored=INT8,
    )


CPU8 = cpu8_table(FRESH)
