"""Weights in 8 bits, laid out in the order in which the kernels read them (see `native/product.h`)."""

from __future__ import annotations

import torch

from tripool.kernels.cpu8 import library

GROUP = 64
PANEL = 32
_LANES = 16
_SMALLEST = 1e-30
"""Stands in for the largest value of an all-zero group."""


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [out, in] -> int8 [out, groups, 64] and float32 scales [out, groups], symmetric, to nearest."""
    out, width = weight.shape
    groups = -(-width // GROUP)
    padded = torch.zeros(out, groups * GROUP)
    padded[:, :width] = weight
    grouped = padded.view(out, groups, GROUP)
    scales = grouped.abs().amax(-1).clamp_min_(_SMALLEST) / 127
    return (grouped / scales[..., None]).round_().to(torch.int8), scales


def dequantise(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight: the values that the kernels multiply with."""
    steps, scales = quantise(weight)
    return (steps * scales[..., None]).flatten(1)[:, : weight.shape[1]]


class Packed:
    """One weight matrix. `struct` is what C sees; the tensors live as long as this object."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        out, width = weight.shape
        panels = -(-out // PANEL)
        steps, scales = quantise(weight)
        groups = scales.shape[1]
        bytes_ = torch.full((panels * PANEL, groups, GROUP), 128, dtype=torch.uint8)
        bytes_[:out] = (steps.to(torch.int16) + 128).to(torch.uint8)
        # [panel, half, lane, group, four, byte] -> [panel, group, four, half, lane, byte]
        body = bytes_.view(panels, 2, _LANES, groups, GROUP // 4, 4).permute(0, 3, 4, 1, 2, 5)
        padded_scales = torch.zeros(panels * PANEL, groups)
        padded_scales[:out] = scales
        tail = padded_scales.view(panels, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8)
        self._panels = torch.cat((body.reshape(panels, groups, GROUP * PANEL), tail), dim=2).contiguous()
        self._bias: torch.Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros(panels * PANEL)
            self._bias[:out] = bias
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self.struct = library.Weight(self._panels.data_ptr(), bias_at, out, width)
        self.num_bytes = self._panels.nbytes + (0 if self._bias is None else self._bias.nbytes)


def packed_gate_up(gate_up: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """Sixteen gates, then the sixteen values they let through, and so on: a panel then needs no other to be gated."""
    width = len(gate_up) // 2
    wide = -(-width // _LANES) * _LANES
    gates, ups = torch.zeros(2, wide, gate_up.shape[1]).unbind(0)
    gates[:width], ups[:width] = gate_up[:width], gate_up[width:]
    joined = torch.stack((gates.view(-1, _LANES, gates.shape[1]), ups.view(-1, _LANES, ups.shape[1])), dim=1)
    joined_bias = None
    if bias is not None:
        padded = torch.zeros(2, wide)
        padded[:, :width] = bias.view(2, width)
        joined_bias = padded.view(2, -1, _LANES).transpose(0, 1).flatten()
    packed = Packed(joined.flatten(0, 2), joined_bias)
    packed.struct.out = 2 * width
    return packed


class PackedNorm:
    def __init__(self, gain: torch.Tensor, eps: float) -> None:
        self._gain = gain.contiguous()
        self.struct = library.Norm(self._gain.data_ptr(), eps, len(gain))
