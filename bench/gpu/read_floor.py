"""How fast weights can be read at all, as one of many kernels in a graph: the floor of a product with few rows.

    python bench/gpu/read_floor.py [--quick] [--json FILE] [--commit ID]

A kernel that does nothing but read the bytes of one weight matrix, each program its part, and keep one number of them:
no product, no scales, no result to speak of. It is launched as our products are (a graph of calls that rotate among
more weights than the L2 holds, with and without starting before the kernel before has ended), with several sizes of
part, and its best time stands beside the bar of 70 % of copy bandwidth. Where reading alone stays below the bar, no
product can reach it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from timing import (
    Row,
    arguments,
    copy_bandwidth,
    gpu_origin,
    graph_time_us,
    print_rows,
    rate_row,
    sets_beyond_cache,
    write_json,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SHAPES = [(7168, 2112), (2048, 7168), (512, 32768), (7168, 4096), (1536, 24576)]
BAR = 0.7


@triton.jit
def read(words, kept, num_words, steps, EARLY: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Program i reads blocks i, i + programs, ...; AT_ONCE of them are on their way together."""
    if EARLY:
        gdc_launch_dependents()
    me, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for step in tl.range(0, steps, num_stages=AT_ONCE):
        at = (step * programs + me) * BLOCK + lanes
        found += tl.load(words + at, mask=at < num_words, other=0)
    if EARLY:
        gdc_wait()
    tl.store(kept + me, tl.sum(found, 0))


def forms(quick: bool) -> Iterator[tuple[int, int, int, int, bool]]:
    """Words of a block, blocks at once, programs, warps, early."""
    for block in (1024, 2048, 4096, 8192):
        for at_once in (1, 3) if quick else (1, 2, 3, 4, 6):
            for per_sm in (1, 2, 4) if quick else (1, 2, 4, 8, 16):
                for warps in (4, 8):
                    for early in (False, True):
                        yield block, at_once, per_sm * 132, warps, early


def floor_of(k: int, n: int, quick: bool) -> tuple[float, str]:
    sets = [torch.randint(-(2**31), 2**31 - 1, (n * k // 4,), dtype=torch.int32, device="cuda")
            for _ in range(sets_beyond_cache(n * k, most=24))]  # fmt: skip
    kept = torch.zeros(132 * 16, dtype=torch.int32, device="cuda")
    best = (float("inf"), "")
    for block, at_once, programs, warps, early in forms(quick):
        if programs > 2 * triton.cdiv(n * k // 4, block):
            continue
        more = {"num_warps": warps, **({"launch_pdl": True} if early else {})}

        def call(words: torch.Tensor, block=block, at_once=at_once, programs=programs, early=early, more=more) -> None:
            read[(programs,)](
                words,
                kept,
                words.numel(),
                triton.cdiv(words.numel(), programs * block),
                EARLY=early,
                BLOCK=block,
                AT_ONCE=at_once,
                **more,
            )

        us = graph_time_us([lambda words=words: call(words) for words in sets], repetitions=8, rounds=2)
        name = f"{programs} programs, blocks of {4 * block} bytes, {at_once} at once, {warps} warps"
        best = min(best, (us, name + (", early" if early else "")))
    return best


def checked() -> None:
    """That it reads everything: the number it keeps is that of all words."""
    words = torch.randint(-(2**31), 2**31 - 1, (100_003,), dtype=torch.int32, device="cuda")
    kept = torch.zeros(132, dtype=torch.int32, device="cuda")
    read[(132,)](words, kept, words.numel(), triton.cdiv(words.numel(), 132 * 1024), EARLY=False, BLOCK=1024, AT_ONCE=3)
    assert (words.sum() - kept.sum()) % 2**32 == 0, "words were missed"


def main() -> None:
    given = arguments(__doc__).parse_args()
    origin, rows = gpu_origin(given.commit), []
    checked()
    copy = copy_bandwidth() / 1e9
    for k, n in SHAPES:
        us, form = floor_of(k, n, given.quick)
        rate = n * k / us / 1e3
        more = {"us": us, "bar_us": n * k / (BAR * copy) / 1e3}
        row: Row = rate_row(
            f"{k}->{n}, only read", rate, copy, "GB/s", target=None, note=f"{us:.2f} µs; {form}", **more
        )
        rows.append(row)
        print(f"{row}  {row.note}; the bar is {more['bar_us']:.2f} µs", flush=True)
        if given.json:
            write_json(rows, origin, given.json)
    print_rows(rows, origin)


if __name__ == "__main__":
    main()
