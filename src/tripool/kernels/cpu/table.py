"""The float32 CPU table."""

from tripool.kernels.cpu import attention, elementwise, linear, mla
from tripool.kernels.ref import route
from tripool.kernels.table import KernelTable

CPU = KernelTable(
    name="cpu-float32",
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
