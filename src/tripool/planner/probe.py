"""Describes the user's own machine as hardware: memory bandwidth and GEMM rate, measured with numpy in about a second.

Reads a clock and the system's memory; no other module of the planner imports it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_COPY_BYTES = 64 * 2**20
_GEMM_SIZE = 1024
_WITHIN_S = 0.4


@dataclass(frozen=True, slots=True)
class Probed:
    gemm_flops: float
    copy_bytes_per_s: float
    memory_bytes: float
    num_cores: int


def probe() -> Probed:
    source = np.ones(_COPY_BYTES // 8)
    target = np.empty_like(source)
    left = np.ones((_GEMM_SIZE, _GEMM_SIZE), dtype=np.float32)
    copy_s = _fastest_s(lambda: np.copyto(target, source))
    gemm_s = _fastest_s(lambda: left @ left)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A copy reads and writes.
    return Probed(2.0 * _GEMM_SIZE**3 / gemm_s, 2.0 * _COPY_BYTES / copy_s, float(memory), len(os.sched_getaffinity(0)))


def _fastest_s(run: Callable[[], object]) -> float:
    """Shortest of several runs: other load only makes a run slower."""
    run()
    best, end = float("inf"), time.perf_counter() + _WITHIN_S
    while True:
        began = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= end:
            return best


def describe(found: Probed) -> str:
    """TOML in the format of `hardware/*.toml`."""
    gb_s = found.copy_bytes_per_s / 1e9
    assumed: dict[str, dict[str, float]] = {
        "chip": {"ranks": 1, "node_chips": 1, "hbm_usable": 0.7},
        "tflops": {},
        "shares": {"gemm": 1, "memory": 1, "attention_compute": 0.5, "attention_memory": 0.8},
        "exchange": {
            "fixed_us": 50, "per_peer_us": 0, "token_us": 0, "prefill_core_share": 0, "decode_exposed": 1,
            "prefill_exposed": 1,
        },
        "overheads": {"layer_us": 50, "step_us": 1000, "gemm_rows": 4, "prefill_stack": 1.3, "buffers_gb": 0.6},
        "cache": {"service_gb_s": 0.5},
    }  # fmt: skip
    tera = found.gemm_flops / 1e12
    measured: dict[str, dict[str, float]] = {
        "chip": {"hbm_gb": found.memory_bytes / 1e9, "hbm_tb_s": gb_s / 1e3},
        "tflops": {"bf16": tera, "int8": tera},
        "cache": {"memory_gb_s": gb_s / 2},
    }
    head = f'name = "this"\ntitle = "this machine ({found.num_cores} cores)"\nfamily = "this"\ncurrency = "USD"\n'
    body = ""
    for section, entries in assumed.items():
        body += f"\n[{section}]\n" + "".join(_fact(key, value, "assumed") for key, value in entries.items())
        body += "".join(_fact(key, value, "measured") for key, value in measured.get(section, {}).items())
    return head + body + "".join(_plane(kind, gb_s / 2) for kind in ("memory", "transfer", "service"))


def _plane(kind: str, gb_s: float) -> str:
    """One machine has one plane, its own memory, used for all three kinds."""
    alone = (_fact(key, 1, "assumed") for key in ("share", "latency_us", "domain_chips"))
    return f'\n[[planes]]\nname = "memory"\nkind = "{kind}"\n' + _fact("gb_s", gb_s, "measured") + "".join(alone)


def _fact(key: str, value: float, kind: str) -> str:
    source = "probe of this machine" if kind == "measured" else "a CPU, roughly"
    return f'{key} = {{ value = {value:.6g}, source = "{source}", kind = "{kind}" }}\n'
