"""Loads the compiled kernels for this CPU and declares their functions and structures to ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch

from tripool.errors import ExchangeError, RankFenced, TripoolError

FOLDER = Path(__file__).parent.parent / "native"


class KernelsMissing(TripoolError):
    """The 8-bit kernels were not compiled for this CPU."""

    code = "kernels_missing"


class Weight(Structure):
    _fields_ = (("panels", c_void_p), ("bias", c_void_p), ("out", c_int32), ("in_", c_int32))


class Norm(Structure):
    _fields_ = (("gain", c_void_p), ("eps", c_float), ("width", c_int32))


class Mlp(Structure):
    _fields_ = (("norm", Norm), ("gate_up", Weight), ("down", Weight))


class Join(Structure):
    _fields_ = (("left", Norm), ("right", Norm), ("weight", Weight))


class Gqa(Structure):
    _fields_ = (
        ("norm", Norm),
        ("qkv", Weight),
        ("out", Weight),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("scale", c_float),
        ("q_norm", Norm),
        ("k_norm", Norm),
    )


class Mla(Structure):
    _fields_ = (
        ("norm", Norm),
        ("down", Weight),
        ("q_norm", Norm),
        ("kv_norm", Norm),
        *((name, Weight) for name in ("query", "out")),
        *((name, POINTER(Weight)) for name in ("expand", "to_latent", "from_latent")),
        *((name, c_int32) for name in ("heads", "rank", "rope", "nope", "v")),
        ("scale", c_float),
    )


class Moe(Structure):
    _fields_ = (
        ("norm", Norm),
        ("gate", c_void_p),
        ("bias", c_void_p),
        ("gate_up", POINTER(Weight)),
        ("down", POINTER(Weight)),
        ("shared_gate_up", Weight),
        ("shared_down", Weight),
        *(
            (name, c_int32)
            for name in ("experts", "top_k", "softmax", "groups", "top_groups", "group_top", "normalise")
        ),
        ("scaling", c_float),
        ("exchange", c_void_p),
        ("layer", c_int32),
    )


class Layer(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("mla", "gqa", "moe", "mlp"))


class Entry(Structure):
    _fields_ = (
        ("embed", c_void_p),
        ("cos_sin", c_void_p),
        ("width", c_int32),
        ("rope_width", c_int32),
        ("positions", c_int32),
    )


class Stack(Structure):
    _fields_ = (
        ("entry", Entry),
        ("layers", c_int64),
        ("layer", POINTER(Layer)),
        ("norm", Norm),
        ("head", Weight),
        ("prompts", c_void_p),
    )


class Draft(Structure):
    _fields_ = (("entry", Entry), ("join", c_void_p), ("layer", Layer), ("norm", Norm), ("head", Weight))


class PromptMemory(Structure):
    _fields_ = (
        ("map", c_void_p),
        *(
            (name, c_uint64)
            for name in (
                "owners", "owner_bytes", "tokens", "prior", "areas", "area_bytes", "stream", "queries", "kv",
                "attended",
            )
        ),
        *(
            (name, c_int32)
            for name in (
                "ranks", "rank", "rows", "context", "hidden", "query_width", "kv_width", "attended_width",
            )
        ),
        ("stack", c_void_p),
    )  # fmt: skip


_FUNCTIONS: dict[str, Sequence[type]] = {
    "tripool_norm": (c_void_p, c_void_p, c_void_p, c_int),
    "tripool_linear": (c_void_p, c_void_p, c_void_p, c_int),
    "tripool_join": (c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "tripool_draft": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p),
    "tripool_draft_choose": (c_void_p,) * 6,
    "tripool_step": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
    "tripool_step_guess": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p),
    "tripool_largest": (c_void_p, c_int, c_int, c_void_p),
    "tripool_mlp": (c_void_p, c_void_p, c_int),
    "tripool_moe": (c_void_p, c_void_p, c_int),
    "tripool_gqa": (c_void_p, c_void_p, c_void_p, c_void_p),
    "tripool_mla": (c_void_p, c_void_p, c_void_p, c_void_p),
    "tripool_exchange_close": (c_void_p,),
    "tripool_exchange_map": (c_void_p, c_uint32, c_void_p, c_int, c_void_p),
    "tripool_exchange_fence": (c_void_p, c_int, c_uint32),
    "tripool_exchange_silence": (c_void_p, c_void_p),
    "tripool_prompts_close": (c_void_p,),
    "tripool_expert": (c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_float, c_void_p),
}
_EXCHANGING = ("tripool_draft", "tripool_draft_choose", "tripool_step", "tripool_step_guess", "tripool_moe")
"""Return 0, or why the exchange with other ranks failed."""
_FENCED = 2
_VARIANTS = ("avx512", "avx2", "plain")
"""Best first."""


def variants() -> list[str]:
    """Names of the compiled kernels that this CPU can run, best first."""
    vector = torch.backends.cpu.get_cpu_capability()
    able = {"plain"}
    if vector.startswith(("AVX2", "AVX512")):
        able.add("avx2")
    if vector.startswith("AVX512") and torch.cpu._is_vnni_supported():
        able.add("avx512")
    return [name for name in _VARIANTS if name in able and _file_of(name) is not None]


def _file_of(variant: str) -> Path | None:
    return next(FOLDER.glob(f"_{variant}.*"), None)


@cache
def library(variant: str | None = None) -> ctypes.CDLL:
    """The best kernels for this CPU, or those of a given variant."""
    found = variants()
    if variant not in (None, *found) or not found:
        hint = "install a C compiler and then the package again, or run with --precision float32"
        raise KernelsMissing("the 8-bit kernels are not compiled for this CPU", hint=hint)
    file = _file_of(variant or found[0])
    assert file is not None
    loaded = ctypes.CDLL(str(file))
    for name, arguments in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
        if name in _EXCHANGING:
            function.restype, function.errcheck = c_int, _check_exchange
    loaded.tripool_exchange_open.argtypes, loaded.tripool_exchange_open.restype = (c_void_p,), c_void_p
    loaded.tripool_prompts_open.argtypes, loaded.tripool_prompts_open.restype = (c_void_p,), c_void_p
    loaded.tripool_draw.argtypes, loaded.tripool_draw.restype = (c_void_p, c_int, c_float, c_uint64), c_int
    loaded.tripool_threads.argtypes, loaded.tripool_threads.restype = (c_int,), c_int
    return loaded


def _check_exchange(failure: int, *_: object) -> None:
    if failure == _FENCED:
        raise RankFenced
    if failure:
        raise ExchangeError("another rank did not answer in time", hint="see the log of the instance's other ranks")


def set_threads(threads: int) -> None:
    """Set the number of threads of all kernels of this process."""
    library().tripool_threads(threads)
