"""The float32 CPU set."""

from functools import partial

from tripool.kernels.cpu import attention, elementwise, linear, mla
from tripool.kernels.ops import Ops
from tripool.kernels.ref import route
from tripool.kernels.shelf import FRESH, Shelf


def cpu_ops(shelf: Shelf) -> Ops:
    return Ops(
        rms_norm=elementwise.rms_norm,
        rope_=elementwise.rope_,
        swiglu=elementwise.swiglu,
        linear=partial(linear.Linear, shelf=shelf),
        router=partial(linear.Linear, shelf=shelf),
        experts=partial(linear.Experts, shelf=shelf),
        route=route.route,
        attend_prompt=attention.attend_prompt,
        attend_decode=attention.attend_decode,
        mla=partial(mla.Mla, shelf=shelf),
    )


CPU_OPS = cpu_ops(FRESH)
