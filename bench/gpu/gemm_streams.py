"""Which tilings of the streamed and the resident product compete in `gemm.py --only stream`, and how a winner is said.

A ring of about 100 KB leaves room on the multiprocessor for the next product, which then fills its own before this one
ends; one of 200 KB does not, but has more on its way. Which pays, how much should be asked for before the rows, and
whether a tile should be shared, is measured.
"""

from __future__ import annotations

from dataclasses import fields, replace

import timing  # noqa: F401  (puts `src/` on the import path)

from tripool.kernels.triton.stream import STAGING_BYTES
from tripool.kernels.triton.tilings import Resident, Stream, Tiling

ROWS = (16, 32, 128, 256)
EARLIES = (0, 1, 2)
SM_BYTES = 228 << 10
"""Shared memory of a multiprocessor, of which each program costs 1 KB more than it asks for."""
UP_TO_128 = [
    Stream(128, 128, 128, 3, 4, 2, True), Stream(128, 128, 128, 3, 4, 1, True), Stream(128, 128, 128, 6, 8, 1, True),
    Stream(128, 64, 128, 4, 4, 2, True), Stream(128, 64, 128, 8, whole=True), Stream(128, 64, 128, 4, 4, 1, True),
    Stream(128, 64, 128, 8), Stream(128, 64, 128, 4), Stream(64, 64, 128, 6), Stream(64, 64, 128, 12),
]  # fmt: skip
UP_TO_256 = [
    Stream(256, 128, 128, 4, 8, whole=True), Stream(256, 64, 128, 5, whole=True), Stream(256, 64, 128, 4, whole=True),
]  # fmt: skip


def ring(m: int, block_n: int, block_k: int, programs: int) -> int:
    """Stages that leave room for so many programs on a multiprocessor, of this product and of the next."""
    free = SM_BYTES // programs - 1024 - min(STAGING_BYTES, 2 * m * block_n) - 1024
    return free // ((m + block_n) * block_k)


def stages_for(m: int, n: int, k: int, block_n: int, block_k: int) -> set[int]:
    """What one and two programs have room for; and no more than an even share needs."""
    share = -(-(-(-n // block_n) * -(-k // block_k)) // 132)
    return {min(most, share) for most in (ring(m, block_n, block_k, 1), ring(m, block_n, block_k, 2)) if most > 1}


def candidates(m: int, n: int, k: int) -> list[Tiling]:
    """Starting with weights before their turn; how early is best is tried with the winner alone."""
    if m > 32:
        return [*(UP_TO_256 if m > 128 else []), *UP_TO_128]
    small = n * k < 40_000_000
    shapes = [(64, 128, 4), (64, 256, 4), (64, 512, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8)]
    found = [
        Stream(m, block_n, block_k, stages, warps, 1, whole, programs=programs, before=before)
        for block_n, block_k, warps in (shapes if small else shapes[:2])
        for stages in stages_for(m, n, k, block_n, block_k)
        for whole in (False, True)
        for programs in ((0,) if whole or not small else (0, 99, 128))
        for before in ((0, stages - 1) if stages > 2 else (0,))
    ]
    streams = [
        t for t in found if not t.whole or -(-n // t.block_n) >= 100
    ]  # fewer would leave many with nothing to do
    return [*streams, *residents(m, n, k)]


def residents(m: int, n: int, k: int) -> list[Tiling]:
    """Where whole steps make pieces, and pieces of two products have room together."""
    tiles, steps = -(-n // 64), k // 256
    even = [s for s in (2, 4, 7) if k == steps * 256 and steps % s == 0 and 64 < tiles * s <= 132]
    pieces = [(splits, steps // splits) for splits in even if 2 < steps // splits <= 7]
    return [Resident(m, stages, piece - stages, splits) for splits, piece in pieces for stages in (2, 3)]


def forms(shapes: list[tuple[int, int]]) -> list[Tiling]:
    """Every variant that may be timed, for compiling ahead."""
    every = [t for m in ROWS for k, n in shapes for t in candidates(m, n, k)]
    return [replace(t, early=early) for t in dict.fromkeys(every) for early in EARLIES[2:]]


def spelt(tiling: Tiling) -> str:
    """As one would write it: the values in order, up to the last that is not the default."""
    values = [(f.name, getattr(tiling, f.name), f.default) for f in fields(tiling)]
    said = [f"{name}={value!r}" for name, value, default in values if value != default]
    return f"{type(tiling).__name__}({', '.join(said)})"
