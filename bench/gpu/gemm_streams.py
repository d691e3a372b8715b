"""Which tilings of the streamed product compete in `gemm.py --only stream`, and how a winner is said.

A ring of about 100 KB leaves room on the multiprocessor for the next product, which then fills its own before this one
ends; one of 200 KB does not, but has more on its way. Which pays, and whether a tile should be shared, is measured.
"""

from __future__ import annotations

from dataclasses import fields, replace

from gemm_check import Tiling

from tripool.kernels.triton.int8_gemm import Stream

ROWS = (16, 32, 128, 256)
EARLIES = (0, 1, 2)
FULL_BYTES = 227 << 10
UP_TO_128 = [
    Stream(128, 128, 128, 6, 8), Stream(128, 256, 128, 4, 8), Stream(128, 128, 128, 3, 4, 2), Stream(128, 64, 128, 4),
    Stream(128, 128, 128, 3, 4), Stream(128, 64, 128, 4, 4, 2), Stream(128, 64, 128, 8),
    Stream(128, 64, 128, 4, 4, 2, True), Stream(128, 128, 128, 3, 4, 2, True), Stream(128, 64, 128, 8, whole=True),
]  # fmt: skip
UP_TO_256 = [
    Stream(256, 128, 128, 4, 8), Stream(256, 128, 128, 4, 8, whole=True), Stream(256, 64, 128, 5),
    Stream(256, 64, 128, 5, whole=True),
]  # fmt: skip


def candidates(m: int, n: int, k: int) -> list[Tiling]:
    """Starting with weights before their turn; how early is best is tried with the winner alone."""
    if m > 32:
        return [*(UP_TO_256 if m > 128 else []), *UP_TO_128]
    shapes = [(64, 128, 1), (64, 256, 1), (128, 128, 1), (64, 128, 2), (64, 256, 2), (128, 256, 1)]
    found = [
        Stream(m, block_n, block_k, ring // ((m + block_n) * block_k), 4, per_sm, whole)
        for ring in (51 << 10, 108 << 10, 216 << 10)
        for block_n, block_k, per_sm in shapes
        for whole in (False, True)
        if ring // ((m + block_n) * block_k) >= 3 and ring * per_sm <= FULL_BYTES and (ring > 51 << 10 or per_sm > 1)
    ]
    small = n * k < 40_000_000
    found = [t for t in found if small or (t.block_n == 64 and t.per_sm == 1)]
    return [t for t in found if not t.whole or -(-n // t.block_n) >= 100]  # fewer would leave many with nothing to do


def forms(shapes: list[tuple[int, int]]) -> list[Tiling]:
    """Every variant that may be timed, for compiling ahead."""
    every = [t for m in ROWS for k, n in shapes for t in candidates(m, n, k)]
    return [replace(t, early=early) for t in dict.fromkeys(every) for early in EARLIES]


def spelt(tiling: Tiling) -> str:
    """As one would write it: the values in order, up to the last that is not the default."""
    values = [(f.name, getattr(tiling, f.name), f.default) for f in fields(tiling)]
    said = [f"{name}={value!r}" for name, value, default in values if value != default]
    return f"{type(tiling).__name__}({', '.join(said)})"
