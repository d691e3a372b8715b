"""Draw one token for each row in two passes over its logits, without sorting: penalty, min-p, Gumbel's argmax.

The plain version is `plain.draw`; its noise is another, so texts agree at temperature 0 alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _penalised(logits, seen, at, inside, penalty):
    score = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    used = tl.load(seen + at, mask=inside, other=0)
    lowered = tl.where(score > 0, score / penalty, score * penalty)
    return tl.where(used != 0, lowered, score)


@triton.jit
def draw_kernel(
    logits, seen, temperatures, seed, tokens, vocab, penalty, log_min_p, BLOCK: tl.constexpr
):  # fmt: skip
    """A program for each row. Only blocks that hold a candidate pay for random numbers: mostly one or two of many."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for first in range(0, vocab, BLOCK):
        inside = first + lane < vocab
        top = tl.maximum(top, _penalised(logits, seen, row * vocab + first + lane, inside, penalty))
    floor = tl.max(top) + temperature * log_min_p
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    chosen = tl.zeros((BLOCK,), dtype=tl.int32)
    key = tl.load(seed)
    for first in range(0, vocab, BLOCK):
        inside = first + lane < vocab
        score = _penalised(logits, seen, row * vocab + first + lane, inside, penalty)
        if tl.max(score) >= floor:
            uniform = tl.rand(key, (row * vocab + first + lane).to(tl.uint32))
            uniform = tl.minimum(tl.maximum(uniform, 1e-7), 1.0 - 1e-6)
            noisy = score - temperature * tl.log(-tl.log(uniform))
            noisy = tl.where(score >= floor, noisy, float("-inf"))
            chosen = tl.where(noisy > best, (first + lane).to(tl.int32), chosen)
            best = tl.maximum(best, noisy)
    winner = tl.max(best)
    tl.store(tokens + row, tl.min(tl.where(best == winner, chosen, vocab)).to(tl.int64))


def draw(
    logits: torch.Tensor, seen: torch.Tensor, temperatures: torch.Tensor, seed: torch.Tensor,
    *, penalty: float, log_min_p: float,
) -> torch.Tensor:  # fmt: skip
    """logits [rows, vocab], seen bool [rows, vocab], temperatures float32 [rows], seed int64 [1] -> int64 [rows].

    Temperature 0 takes the likeliest, ties to the lower number.
    """
    rows, vocab = logits.shape
    assert logits.is_contiguous() and seen.is_contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    draw_kernel[(rows,)](
        logits, seen.view(torch.uint8), temperatures, seed, tokens, vocab, penalty, log_min_p, BLOCK=2048, num_warps=8
    )  # fmt: skip
    return tokens
