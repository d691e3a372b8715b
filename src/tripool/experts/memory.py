"""The shared memory of an exchange as compiled code gets it: `ExchangeMemory` in `kernels/native/slabs.h`."""

from __future__ import annotations

from ctypes import POINTER, Array, Structure, c_int32, c_int64, c_uint64, c_void_p

from tripool.experts.layout import Layout, Memory

_OFFSETS = (
    "control", "dispatch_bells", "combine_bells", "routed", "routed_bytes", "assigned", "assigned_bytes",
    "dispatch", "combine", "dispatch_bytes", "combine_bytes", "segment_list", "entry_list", "scales", "fixes", "values",
)  # fmt: skip
_SIZES = ("layers", "experts", "top_k", "hidden", "slab_rows")


class ExchangeMemory(Structure):
    _fields_ = (
        ("map", c_void_p),
        *((name, c_uint64) for name in _OFFSETS),
        *((name, c_int32) for name in ("ranks", "rank", *_SIZES)),
        ("moe", POINTER(c_void_p)),
        ("deadline_ns", c_int64),
        ("microbatch_rows", c_int64),
    )


def exchange_memory(
    layout: Layout,
    memory: Memory,
    rank: int = 0,
    moe: Array[c_void_p] | None = None,
    deadline_ns: int = 0,
    microbatch_rows: int = 0,
) -> ExchangeMemory:
    """It does not keep the memory alive."""
    offsets, sizes = ([getattr(layout, name) for name in names] for names in (_OFFSETS, _SIZES))
    map_ = memory.ctypes.data
    return ExchangeMemory(map_, *offsets, layout.ranks, rank, *sizes, moe, deadline_ns, microbatch_rows)
