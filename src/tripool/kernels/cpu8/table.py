"""The 8-bit CPU table."""

from tripool.kernels.cpu import attention as cpu_attention
from tripool.kernels.cpu import elementwise as cpu_elementwise
from tripool.kernels.cpu8 import attention, elementwise, experts, linear, mla
from tripool.kernels.ref import route
from tripool.kernels.table import KernelTable

CPU8 = KernelTable(
    name="cpu-int8",
    rms_norm=cpu_elementwise.rms_norm,
    rope_=cpu_elementwise.rope_,
    swiglu=elementwise.swiglu,
    linear=linear.Linear8,
    router=linear.Router8,
    experts=experts.Experts8,
    route=route.route,
    attend_prompt=attention.attend_prompt,
    attend_decode=cpu_attention.attend_decode,
    mla=mla.Mla8,
)
