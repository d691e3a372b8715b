"""The kernel table of the 8-bit CPU kernels."""

from functools import partial

from tripool.kernels.cpu8 import sublayers
from tripool.kernels.cpu8.draft import Draft8
from tripool.kernels.cpu8.stack import Stack8
from tripool.kernels.table import KernelTable
from tripool.kernels.weight_store import FRESH, WeightStore
from tripool.kernels.weights import INT8


def cpu8_table(store: WeightStore) -> KernelTable:
    return KernelTable(
        name="cpu-int8",
        rms_norm=sublayers.rms_norm,
        linear=partial(sublayers.Linear8, store=store),
        join=partial(sublayers.Join8, store=store),
        gqa=partial(sublayers.Gqa8, store=store),
        mla=partial(sublayers.Mla8, store=store),
        mlp=partial(sublayers.Mlp8, store=store),
        moe=partial(sublayers.Moe8, store=store),
        draft=Draft8,
        stack=Stack8,
        over=cpu8_table,
        linear_of_scales=lambda weight, scales: sublayers.Linear8(weight, None, scales, store),
        stored=INT8,
    )


CPU8 = cpu8_table(FRESH)
