"""The main kernel of `mla_decode` for Hopper, in Gluon: three roles in one program, so that loads, products and softmax
run at the same time. 64 rows a program; a tile is one page of 64 tokens, two tiles in shared memory.

| warps | role | per tile |
|---|---|---|
| 4 | scores | Q.K over the whole width, softmax, P to shared memory, P.V for the left half of the columns |
| 4 | right | P.V for the right half |
| 1 | loads | bulk copies of the next page: left half with the rotary part, right half |

Each half of a tile is released as soon as the role that reads its values is done with it: `left_free` by scores,
`right_free` by right. P and the rescaling factor of older sums go from scores to right through `passed` and are
released through `taken`; one last pass carries the row sums. Barriers have two phases; a wait names the phase that must
be over.

Whole pages are copied, so every slot of a page in use must hold finite numbers: a masked token's weight is zero, and
zero times NaN is NaN. Caches start as zeros and are overwritten by tokens only.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

RANK, ROPE = 512, 64
BLOCK_ROWS = 64
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
MAX_REGISTERS = 168
"""Registers per thread of 12 warps (9, rounded up to warp groups) at start; the roles then reallocate among
themselves.
"""


@gluon.jit
def _store(acc, total, out, parts, place, column: gl.constexpr, WHOLE: gl.constexpr):
    """place: first row within the request, rows of a request, request, index of the part, number of tiles."""
    first_row, num_rows, request, part, any_tile = place
    layout: gl.constexpr = acc.type.layout
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, 256, gl.SliceLayout(0, layout))
    share = acc * (1.0 / gl.where(total > 0, total, 1.0))[:, None]
    if WHOLE:
        at = (request.to(gl.int64) * num_rows + rows) * 512
        gl.store(out + at[:, None] + columns[None, :], share.to(gl.bfloat16), mask=(rows < num_rows)[:, None])
    else:
        at = (part.to(gl.int64) * num_rows + rows) * 512
        keep = (rows < num_rows) & (any_tile > 0)
        gl.store(parts + at[:, None] + columns[None, :], share, mask=keep[:, None])


@gluon.jit
def _scores(
    q_left, q_right, q_rope, left, right, rope, p, fade_s, bars, out, parts, sums, place,
    num_tiles, first, stop, sees_first, heads, scale, WHOLE: gl.constexpr,
):  # fmt: skip
    q_ready, left_ready, right_ready, left_free, passed, taken = bars
    flat: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    rows = place[0] + gl.arange(0, 64, gl.SliceLayout(1, flat))
    limit = gl.minimum(sees_first + rows // heads, stop)
    top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, flat))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, flat))
    acc = gl.zeros([64, 256], gl.float32, wide)
    mbarrier.wait(q_ready, 0)
    for i in range(num_tiles):
        b = i & 1
        phase = (i >> 1) & 1
        mbarrier.wait(left_ready.index(b), phase)
        s = gl.zeros([64, 64], gl.float32, flat)
        s = warpgroup_mma(q_left, left.index(b).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope, rope.index(b).permute((1, 0)), s, is_async=True)
        mbarrier.wait(right_ready.index(b), phase)
        s = warpgroup_mma(q_right, right.index(b).permute((1, 0)), s, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(s,)) * scale
        tokens = first + i * 64 + gl.arange(0, 64, gl.SliceLayout(0, flat))
        scores = gl.where(tokens[None, :] < limit[:, None], scores, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - new_top[:, None])
        fade = gl.exp2(top - new_top)
        total = total * fade + gl.sum(weights, 1)
        top = new_top
        mbarrier.wait(taken, (i & 1) ^ 1)
        p.store(weights.to(gl.bfloat16))
        fade_s.store(fade)
        fence_async_shared()
        mbarrier.arrive(passed)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, wide))[:, None]
        acc = warpgroup_mma(p, left.index(b), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(left_free.index(b))
    mbarrier.wait(taken, (num_tiles & 1) ^ 1)
    fade_s.store(total)
    mbarrier.arrive(passed)
    if not WHOLE:
        at = place[3] * place[1] + rows
        gl.store(sums + at, gl.where(total > 0, top + gl.log2(total), float("-inf")), mask=rows < place[1])
    _store(acc, gl.convert_layout(total, gl.SliceLayout(1, wide)), out, parts, place, 0, WHOLE)


@gluon.jit
def _right(right, p, fade_s, bars, out, parts, place, num_tiles, WHOLE: gl.constexpr):
    right_ready, right_free, passed, taken = bars
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    acc = gl.zeros([64, 256], gl.float32, wide)
    for i in range(num_tiles):
        b = i & 1
        mbarrier.wait(right_ready.index(b), (i >> 1) & 1)
        mbarrier.wait(passed, i & 1)
        fade = fade_s.load(gl.SliceLayout(1, wide))
        acc = acc * fade[:, None]
        acc = warpgroup_mma(p, right.index(b), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(taken)
        mbarrier.arrive(right_free.index(b))
    mbarrier.wait(passed, num_tiles & 1)
    total = fade_s.load(gl.SliceLayout(1, wide))
    _store(acc, total, out, parts, place, 256, WHOLE)


@gluon.jit
def _loads(
    q_half_desc, q_rope_desc, half_desc, rope_desc, q_left, q_right, q_rope, left, right, rope, bars,
    table_row, q_row, num_tiles, first_page,
):  # fmt: skip
    q_ready, left_ready, right_ready, left_free, right_free = bars
    mbarrier.expect(q_ready, 64 * 576 * 2)
    tma.async_copy_global_to_shared(q_half_desc, [q_row, 0], q_ready, q_left)
    tma.async_copy_global_to_shared(q_half_desc, [q_row, 256], q_ready, q_right)
    tma.async_copy_global_to_shared(q_rope_desc, [q_row, 512], q_ready, q_rope)
    page = gl.load(table_row + first_page, mask=num_tiles > 0, other=0)  # without tiles the entry may not exist
    for i in range(num_tiles):
        b = i & 1
        free = ((i >> 1) & 1) ^ 1
        row = page * 64
        page = gl.load(table_row + first_page + gl.minimum(i + 1, num_tiles - 1))
        mbarrier.wait(left_free.index(b), free)
        mbarrier.expect(left_ready.index(b), 64 * 320 * 2)
        tma.async_copy_global_to_shared(half_desc, [row, 0], left_ready.index(b), left.index(b))
        tma.async_copy_global_to_shared(rope_desc, [row, 512], left_ready.index(b), rope.index(b))
        mbarrier.wait(right_free.index(b), free)
        mbarrier.expect(right_ready.index(b), 64 * 256 * 2)
        tma.async_copy_global_to_shared(half_desc, [row, 256], right_ready.index(b), right.index(b))


@gluon.jit(do_not_specialize=["num_rows", "heads", "queries", "table_width", "splits"])
def decode_hopper(
    q_half_desc, q_rope_desc, half_desc, rope_desc, table, seq_lens, out, parts, sums, scale,
    num_rows, heads, queries, table_width, splits, WHOLE: gl.constexpr, FIXED: gl.constexpr, MAX: gl.constexpr,
):  # fmt: skip
    """FIXED: tiles of a split, in multiples where MAX splits would not be enough; 0: all splits share the context."""
    split, request = gl.program_id(1), gl.program_id(2)
    length = gl.load(seq_lens + request)
    tiles = (length + 63) // 64
    each = (tiles + splits - 1) // splits
    if FIXED > 0:
        each = FIXED * gl.maximum((tiles + FIXED * MAX - 1) // (FIXED * MAX), 1)
    first_page = gl.minimum(split * each, tiles)
    num_tiles = gl.minimum(first_page + each, tiles) - first_page
    first_row = gl.program_id(0) * 64
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], shared)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], shared)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], shared)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], shared)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], shared)
    p = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    fade_s = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    passed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    left_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(passed, count=1)
    mbarrier.init(taken, count=1)
    for b in gl.static_range(2):
        mbarrier.init(left_ready.index(b), count=1)
        mbarrier.init(right_ready.index(b), count=1)
        mbarrier.init(left_free.index(b), count=1)
        mbarrier.init(right_free.index(b), count=1)
    fence_async_shared()
    scores_bars = (q_ready, left_ready, right_ready, left_free, passed, taken)
    right_bars = (right_ready, right_free, passed, taken)
    loads_bars = (q_ready, left_ready, right_ready, left_free, right_free)
    place = (first_row, num_rows, request, request * splits + split, num_tiles)
    stop = gl.minimum((first_page + num_tiles) * 64, length)
    sees_first = length - queries + 1
    gl.warp_specialize(
        [
            (
                _scores,
                (
                    q_left, q_right, q_rope, left, right, rope, p, fade_s, scores_bars, out, parts, sums, place,
                    num_tiles, first_page * 64, stop, sees_first, heads, scale, WHOLE,
                ),
            ),
            (_right, (right, p, fade_s, right_bars, out, parts, place, num_tiles, WHOLE)),
            (
                _loads,
                (
                    q_half_desc, q_rope_desc, half_desc, rope_desc, q_left, q_right, q_rope, left, right, rope,
                    loads_bars,
                    table + request * table_width, request * num_rows + first_row, num_tiles, first_page,
                ),
            ),
        ],
        [4, 1],
        [208, 24],
    )  # fmt: skip


def launch(
    q_latent: torch.Tensor, kv_blocks: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    scale_log2: float, out: torch.Tensor, parts: torch.Tensor, sums: torch.Tensor, splits: int, fixed: int,
    max_splits: int,
) -> None:  # fmt: skip
    """Shapes as in `mla_decode`, checked there; bf16, rank 512, rope 64. `fixed`: tiles of a split, or 0."""
    batch, queries, heads, width = q_latent.shape
    num_rows = queries * heads
    q, kv = q_latent.view(-1, width), kv_blocks.view(-1, width)
    decode_hopper[(-(-num_rows // BLOCK_ROWS), splits, batch)](
        TensorDescriptor.from_tensor(q, [BLOCK_ROWS, RANK // 2], SHARED),
        TensorDescriptor.from_tensor(q, [BLOCK_ROWS, ROPE], SHARED),
        TensorDescriptor.from_tensor(kv, [64, RANK // 2], SHARED),
        TensorDescriptor.from_tensor(kv, [64, ROPE], SHARED),
        block_table, seq_lens, out, parts, sums, scale_log2, num_rows, heads, queries, block_table.stride(0),
        splits, WHOLE=splits == 1, FIXED=fixed, MAX=max_splits, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
