"""The operations of the float32 CPU kernels."""

from functools import partial

from tripool.kernels.cpu import attention, elementwise, linear, mla
from tripool.kernels.ops import Ops
from tripool.kernels.ref import route
from tripool.kernels.weight_store import FRESH, WeightStore


def cpu_ops(store: WeightStore) -> Ops:
    return Ops(
        rms_norm=elementwise.rms_norm,
        rope_=elementwise.rope_,
        swiglu=elementwise.swiglu,
        linear=partial(linear.Linear, store=store),
        router=partial(linear.Linear, store=store),
        experts=partial(linear.Experts, store=store),
        route=route.route,
        attend_prompt=attention.attend_prompt,
        attend_decode=attention.attend_decode,
        mla=partial(mla.Mla, store=store),
    )


CPU_OPS = cpu_ops(FRESH)
