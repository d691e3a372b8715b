"""The float32 CPU set."""

from tripool.kernels.cpu import attention, elementwise, linear, mla
from tripool.kernels.ops import Ops
from tripool.kernels.ref import route

CPU_OPS = Ops(
    rms_norm=elementwise.rms_norm,
    rope_=elementwise.rope_,
    swiglu=elementwise.swiglu,
    linear=linear.Linear,
    router=linear.Linear,
    experts=linear.Experts,
    route=route.route,
    attend_prompt=attention.attend_prompt,
    attend_decode=attention.attend_decode,
    mla=mla.Mla,
)
