"""Linear layers with 8-bit weights: one scale per output channel, one scale per token.

`Linear8`: 7-bit activations. `SplitLinear`: both factors in two parts each, about 14 bits, for the few narrow products
whose outcome is a decision (the router): as exact as it needs to be, and still a sum of integers.
"""

import torch

from tripool.kernels.cpu8.fbgemm import STEPS, pack, product

_SMALLEST = 1e-30
"""Stands in for the largest value of an all-zero row."""


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [out, in] -> int8 [out, in] and float32 scales [out], symmetric, to nearest."""
    scales = weight.abs().amax(1).clamp_min(_SMALLEST) / 127
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def row_scale(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row, [rows, 1]."""
    return torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True).clamp_min_(_SMALLEST)


class Linear8:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = pack(*quantise_rows(weight))
        self._bias = bias
        self.num_bytes = weight.numel() + 4 * len(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = row_scale(x)
        y = product(x / scale, self._packed).mul_(scale)
        return y if self._bias is None else y.add_(self._bias)


class SplitLinear:
    def __init__(self, weight: torch.Tensor) -> None:
        high, scales = quantise_rows(weight)
        rest = weight - high * scales[:, None]
        low, low_scales = quantise_rows(rest)
        self._packed = pack(torch.cat((high, low)), torch.cat((scales, low_scales)))
        self._outs = len(weight)
        self.num_bytes = 2 * (weight.numel() + 4 * len(weight))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = row_scale(x)
        high = x / scale
        low = (high - (high * STEPS).round() / STEPS) * (2 * STEPS)  # what rounding leaves: at most half a step
        first, second = product(torch.cat((high, low)), self._packed).view(2, len(x), 2, self._outs)
        parts = first + second / (2 * STEPS)
        return (parts[:, 0] + parts[:, 1]).mul_(scale)
