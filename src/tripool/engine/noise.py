"""Sampling noise that is a pure function of (seed, choice, position, token).

The same request draws the same noise alone, in any batch, after a preemption, on another worker, and for a draft and
its verification. Counter-based: a splitmix64-style mixer over 64-bit integers, and a logarithm written out in single
operations, so that the bits are the same on every device. `kernels/native/draw.h` is the fast version.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_MASK = 2**64 - 1
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEP = 0x9E3779B97F4A7C15
_LOG_TERMS = (
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


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
    return -_log(-_log(uniform))


def _log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of normal float32 numbers, each operation rounded by itself (Cephes' coefficients)."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 126
    m = (bits & 0x7FFFFF | 0x3F000000).view(torch.float32)
    small = m < 0.707106781186547524
    exponent = exponent - small.to(torch.int32)
    m = torch.where(small, m + m, m) - 1.0
    p = torch.full_like(m, 7.0376836292e-2)
    for term in _LOG_TERMS:
        p = p * m + term
    e, square = exponent.to(torch.float32), m * m
    y = p * m * square
    y = y + e * -2.12194440e-4
    y = y - square * 0.5
    return (m + y) + e * 0.693359375


def draw(row: torch.Tensor, temperature: float, key: int, hashes: torch.Tensor) -> int:
    """The token that the noise of this key chooses from a row of logits."""
    return int((row / temperature + gumbel(key, hashes[: len(row)])).argmax())


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


@lru_cache(maxsize=2**14)
def stream_base(seed: int, choice: int) -> int:
    """What `noise_key` knows before the position, as a signed 64-bit number: the rest can happen on a device."""
    key = 0
    for part in (seed, choice):
        key = _mix_int((key + _STEP + part) & _MASK)
    return _signed(key)


def keys_at(bases: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64, elementwise: `noise_key` of each stream at a position of its own."""
    return _mix(bases + _signed(_STEP) + positions)
