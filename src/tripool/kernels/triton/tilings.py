"""Tilings of the int8 product, the choice among its four kernels, and measured best tilings.

Chosen from shapes alone: nothing is tuned or synchronised at run time, and calls can be captured in a CUDA graph. The
tilings were measured with `bench/gpu/gemm.py`. Uses no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_SMS = 132
"""Multiprocessors of the GPU the table was measured on; another count costs speed, never correctness."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """Tokens, channels and depth of a tile, and the number of splits of the depth."""

    block_m: int
    block_n: int = 64
    block_k: int = 256
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    band: int = 0
    """Blocks of tokens processed together through all channels, so that both operands stay in the L2; 0: all."""
    early: int = 0
    """1: starts while the previous kernel ends; 2: also prefetches its weights before that kernel's results are
    ready.
    """


@dataclass(frozen=True, slots=True)
class Wide:
    """Tokens, channels and depth of a tile; `band` as in `Narrow`; `per_sm` programs share a multiprocessor."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    num_stages: int = 4
    num_warps: int = 8
    band: int = 8
    per_sm: int = 1
    early: int = 0
    """1: starts while the previous kernel ends."""
    programs: int = 0
    """Multiprocessors to use, where others hold some; 0: all."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens, channels and depth of a tile; `per_sm` programs share a multiprocessor; all programs have even shares."""

    block_m: int
    block_n: int = 64
    block_k: int = 128
    num_stages: int = 9
    num_warps: int = 4
    per_sm: int = 1
    whole: bool = False
    """Whole tiles only: fewer programs, and no partial sums."""
    early: int = 2
    """1: starts while the previous kernel ends; 2: also loads weights before that kernel's results are ready."""
    programs: int = 0
    """Multiprocessors to use, where others hold some; 0: all."""
    before: int = 0
    """Weight tiles loaded before the rows; 0: as many as the ring has."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Tokens, channels and depth of a step; `stages` + `held` steps make a piece, `splits` pieces the depth."""

    block_m: int
    stages: int
    held: int = 0
    splits: int = 1
    block_n: int = 64
    block_k: int = 256
    early: int = 2
    """As in `Stream`."""


Tiling = Narrow | Wide | Stream | Resident

EARLY = 1
"""How products of few rows start (see `Narrow.early`): saves half a microsecond of seven to fourteen."""

MANY_ROWS = Wide(block_m=256, block_n=128)
"""For more rows than a decode batch has."""

MEASURED: dict[tuple[int, int, int], Tiling] = {
    (16, 2112, 7168): Resident(16, stages=2, held=5, splits=4),  # 4.3 µs
    (16, 24576, 1536): Stream(16, block_k=256, num_stages=11, whole=True),  # 10.5 µs
    (16, 32768, 512): Stream(16, block_n=256, num_stages=4, num_warps=8, whole=True, before=3),  # 5.5 µs
    (16, 7168, 16384): Stream(16, block_k=256, num_stages=10, whole=True),  # 29.6 µs
    (16, 4096, 7168): Stream(16, block_k=512, num_stages=5, before=4),  # 8.6 µs
    (16, 7168, 2048): Stream(16, block_k=512, num_stages=4, whole=True, before=3),  # 4.6 µs
    (16, 36864, 7168): Stream(16, block_k=256, num_stages=5, whole=True),  # 65.2 µs
    (16, 7168, 18432): Stream(16, block_k=256, num_stages=11, whole=True),  # 33.2 µs
    (32, 2112, 7168): Resident(32, stages=2, held=5, splits=4),  # 4.9 µs
    (32, 24576, 1536): Stream(32, block_k=256, whole=True),  # 10.8 µs
    (32, 32768, 512): Stream(32, block_n=256, num_stages=4, num_warps=8, whole=True, before=3),  # 6.0 µs
    (32, 7168, 16384): Stream(32, block_k=256, whole=True),  # 30.2 µs
    (32, 4096, 7168): Stream(32, block_k=256, programs=128),  # 9.2 µs
    (32, 7168, 2048): Stream(32, block_k=512, num_stages=4, whole=True, before=3),  # 4.9 µs
    (32, 36864, 7168): Stream(32, block_k=256, whole=True),  # 66.4 µs
    (32, 7168, 18432): Stream(32, block_k=256, whole=True),  # 33.5 µs
    (128, 2112, 7168): Stream(128, num_stages=8, whole=True),  # 11.4 µs
    (128, 24576, 1536): Stream(128, num_stages=8, whole=True),  # 13.8 µs
    (128, 32768, 512): Stream(128, num_stages=8, whole=True),  # 9.1 µs
    (128, 7168, 16384): Stream(128, num_stages=8, whole=True),  # 36.4 µs
    (128, 4096, 7168): Stream(128, num_stages=8, whole=True),  # 13.1 µs
    (128, 7168, 2048): Stream(128, num_stages=8, whole=True),  # 6.7 µs
    (128, 36864, 7168): Stream(128, block_n=128, num_stages=6, num_warps=8, whole=True),  # 74.7 µs
    (128, 7168, 18432): Stream(128, num_stages=8, whole=True),  # 38.4 µs
    (256, 2112, 7168): Stream(128, num_stages=8),  # 13.6 µs
    (256, 24576, 1536): Stream(256, num_stages=5, whole=True),  # 19.7 µs
    (256, 32768, 512): Stream(256, num_stages=5, whole=True),  # 13.4 µs
    (256, 7168, 16384): Stream(256, num_stages=5, whole=True),  # 46.7 µs
    (256, 4096, 7168): Stream(128, num_stages=8, whole=True),  # 16.1 µs
    (256, 7168, 2048): Stream(128, num_stages=4, per_sm=2, whole=True),  # 9.1 µs
    (256, 36864, 7168): Stream(256, num_stages=5, whole=True),  # 112 µs
    (256, 7168, 18432): Stream(256, num_stages=5, whole=True),  # 52.7 µs
}
"""(most rows, channels, depth) of model products -> fastest tiling; `gemm.py --only stream` prints such lines."""


def choose(m: int, n: int, k: int) -> Tiling:
    """Chosen by shape alone: the fastest on an H200 in the sweep of `bench/gpu/gemm.py`."""
    if m > 256:
        return MANY_ROWS
    known = MEASURED.get((max(16, 1 << (m - 1).bit_length()), n, k))
    if known is not None:
        return known
    block_m = 16
    while block_m < min(m, 128):
        block_m *= 2
    if block_m <= 32:
        tiles = -(-n // 64)
        if k <= 1536 and block_m == 16:  # shallow: few steps to hide a load behind, so more of them at once
            return Narrow(16, 128, 128, 1, 4, 6, early=EARLY)
        if tiles < NUM_SMS // 2:
            return Narrow(block_m, 64, 256, max(1, min(NUM_SMS // tiles, k // 1024)), 4, 4, early=EARLY)
        return Narrow(block_m, 64, 256, 1, 4, 4 if tiles > 2 * NUM_SMS else 6, early=EARLY)
    tiles = -(-m // block_m) * -(-n // 64)
    if tiles > 2 * NUM_SMS and block_m == 64:
        return Narrow(64, 128, 128, 1, 4, 3, early=EARLY)
    if tiles > 2 * NUM_SMS:  # two programs on each multiprocessor: one loads while the other computes
        if k <= 1536 or m > 128:
            return Wide(128, 128, num_stages=3, num_warps=4, per_sm=2, early=EARLY if k <= 1536 else 0)
        return Wide(128, 64, per_sm=2)
    splits = max(1, min(2 * NUM_SMS // tiles, k // 1536, 4))
    return Narrow(block_m, 64, 128, splits, 4, 4, early=EARLY)
