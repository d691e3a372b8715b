"""Sampling noise that is a pure function of (seed, choice, position, token).

The same request draws the same noise alone, in any batch, after a preemption, on another worker, and for a draft and
its verification. Counter-based: a splitmix64-style mixer over 64-bit integers, the same bits on every device.
"""

from __future__ import annotations

import torch

_MASK = 2**64 - 1
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEP = 0x9E3779B97F4A7C15


def noise_key(seed: int, choice: int, position: int) -> int:
    """64 bits that change completely when any of the three changes."""
    key = 0
    for part in (seed, choice, position):
        key = _mix_int((key + _STEP + part) & _MASK)
    return key


def token_hashes(vocab: int) -> torch.Tensor:
    """int64 [vocab]: each token's own point in the 64-bit space; computed once per model."""
    return _mix(torch.arange(1, vocab + 1, dtype=torch.int64) * _signed(_STEP))


def gumbel(key: int, hashes: torch.Tensor) -> torch.Tensor:
    """float32 noise per token; the argmax of logits + noise is a sample of softmax(logits)."""
    # 23 bits: with one more the half would round, and the largest draw would be 1, whose noise is infinite.
    bits = _mix(hashes + _signed(key)) >> 41 & 0x7FFFFF
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix_int(x: int) -> int:
    x = (x ^ x >> 30) * _MUL_1 & _MASK
    x = (x ^ x >> 27) * _MUL_2 & _MASK
    return x ^ x >> 31


def _mix(x: torch.Tensor) -> torch.Tensor:
    """As `_mix_int`. Torch shifts int64 arithmetically, so the bits shifted in are masked away."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(_MUL_1)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(_MUL_2)
    return x ^ (x >> 31 & (1 << 33) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
