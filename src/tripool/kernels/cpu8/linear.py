"""Linear layers with 8-bit weights, one scale per output channel, and activations in two parts of 7 bits each.

A token's activations are divided into whole steps, at most 63 of them; what rounding leaves over is divided once more,
128 times finer. Two products of integers then carry 13 bits, and all that 8-bit weights cost is the rounding of the
weights. One part alone would cost SmolLM2 a tenth of its perplexity: some of its channels are far larger than the rest.

Sums of integers are exact, and steps are powers of two, so that scaling by them is exact too: a row's result is the
same to the bit whether it is scaled before the product (in a batch) or inside it (alone).
"""

import math

import torch

from tripool.kernels.cpu8.fbgemm import STEPS, pack, product

_SMALLEST = 1e-30
"""Stands in for the largest value of an all-zero row."""

_FINER = 128
"""Rounding leaves at most half a step, so at most 64 of these; 63.5 rounds to 64 and still fits into 7 bits."""


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [out, in] -> int8 [out, in] and float32 scales [out], symmetric, to nearest."""
    scales = weight.abs().amax(1).clamp_min(_SMALLEST) / 127
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def step_of(x: torch.Tensor) -> torch.Tensor:
    """Size of one step of each row, [rows, 1]: a power of two, at least 1/63 of the row's largest value."""
    largest = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True).clamp_min_(_SMALLEST)
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest.div_(STEPS)).exponent)


def two_parts(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """[2 * rows, width]: whole steps (not yet rounded), then what rounding them leaves, in finer steps."""
    rows = len(x)
    parts = torch.empty(2 * rows, x.shape[1])
    coarse = torch.div(x, step, out=parts[:rows])
    torch.sub(coarse, coarse.round(), out=parts[rows:]).mul_(_FINER)
    return parts


def joined(products: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The two products' sum in the units of x, from [2 * rows, out]."""
    coarse, fine = products.chunk(2)
    return coarse.add_(fine, alpha=1.0 / _FINER).mul_(step)


class Linear8:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = pack(*quantise_rows(weight))
        self._bias = bias
        self.num_bytes = weight.numel() + 4 * len(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._alone(x) if len(x) == 1 else self._batch(x)
        return y if self._bias is None else y.add_(self._bias)

    def _batch(self, x: torch.Tensor) -> torch.Tensor:
        step = step_of(x)
        return joined(product(two_parts(x, step), self._packed), step)

    def _alone(self, x: torch.Tensor) -> torch.Tensor:
        """One row has one step, which the product applies itself: fewer passes, the same bits."""
        largest = max(float(torch.linalg.vector_norm(x, float("inf"))), _SMALLEST)
        step = math.ldexp(1.0, math.frexp(largest / STEPS)[1])
        parts = torch.empty(2, x.shape[1])
        parts[0] = x[0]
        whole = torch.fake_quantize_per_tensor_affine(x, step, 0, -STEPS - 1, STEPS + 1)
        torch.sub(x, whole, out=parts[1:]).mul_(_FINER)
        y = product(parts, self._packed, step)
        return torch.add(y[:1], y[1:], alpha=1.0 / _FINER)


class Router8:
    """Weights in two parts as well: for the few narrow products whose outcome is a decision."""

    def __init__(self, weight: torch.Tensor) -> None:
        high, scales = quantise_rows(weight)
        self._coarse = Linear8(weight)
        self._fine = Linear8(weight - high * scales[:, None])
        self.num_bytes = self._coarse.num_bytes + self._fine.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._coarse(x).add_(self._fine(x))
