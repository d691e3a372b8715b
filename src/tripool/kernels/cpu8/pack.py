"""Quantises weights to 8 bits and packs them in the order in which the kernels read them (see `native/product.h`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tripool.kernels.cpu8 import library
from tripool.kernels.weight_store import FRESH, WeightStore

GROUP = 64
PANEL = 32
_LANES = 16
_ROWS_AT_ONCE = 128 * PANEL
"""Rows packed at a time: packing an output head at once would need six times its final memory."""
_SMALLEST = 1e-30
"""Replaces the largest value of an all-zero group."""


def quantise(weight: torch.Tensor, row_scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """float [out, in] -> int8 [out, groups, 64] and float32 scales [out, groups], symmetric, to nearest.

    A row with a given scale (not 0) consists of integers times that scale; exactly these integers are returned.
    """
    out, width = weight.shape
    groups = -(-width // GROUP)
    padded = torch.zeros(out, groups * GROUP)
    padded[:, :width] = weight
    grouped = padded.view(out, groups, GROUP)
    scales = grouped.abs().amax(-1).clamp_min_(_SMALLEST) / 127
    if row_scales is not None:
        scales = torch.where(row_scales[:, None] > 0, row_scales[:, None], scales)
    return (grouped / scales[..., None]).round_().to(torch.int8), scales


def dequantise(weight: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise: the values that the kernels multiply with."""
    steps, scales = quantise(weight)
    return (steps * scales[..., None]).flatten(1)[:, : weight.shape[1]]


class Packed:
    """One packed weight matrix. `struct` points into tensors that this object keeps alive."""

    def __init__(self, out: int, width: int, panels: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._panels, self._bias = panels, bias
        self.struct = library.Weight(panels.data_ptr(), None if bias is None else bias.data_ptr(), out, width)
        self.num_bytes = panels.nbytes + (0 if bias is None else bias.nbytes)


def packed(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    store: WeightStore = FRESH,
    scales: torch.Tensor | None = None,
    *,
    ordered: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> Packed:
    """`ordered`: puts the rows of the weight, of the bias and of the scales in another order."""
    panels = store.keep(
        "panels", lambda: _panels(ordered(weight), None if scales is None else ordered(scales[:, None])[:, 0])
    )
    padded_bias = None if bias is None else store.keep("bias", lambda: _padded(ordered(bias[:, None])[:, 0]))
    return Packed(len(weight), weight.shape[1], panels, padded_bias)


def _panels(weight: torch.Tensor, row_scales: torch.Tensor | None = None) -> torch.Tensor:
    out, groups = len(weight), -(-weight.shape[1] // GROUP)
    panels = torch.empty(-(-out // PANEL), groups, (GROUP + 4) * PANEL, dtype=torch.uint8)
    for start in range(0, out, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        piece = _piece(weight[rows], None if row_scales is None else row_scales[rows])
        panels[start // PANEL : start // PANEL + len(piece)] = piece
    return panels


def _piece(weight: torch.Tensor, row_scales: torch.Tensor | None) -> torch.Tensor:
    out = len(weight)
    panels = -(-out // PANEL)
    steps, scales = quantise(weight, row_scales)
    groups = scales.shape[1]
    bytes_ = torch.full((panels * PANEL, groups, GROUP), 128, dtype=torch.uint8)
    bytes_[:out] = (steps.to(torch.int16) + 128).to(torch.uint8)
    # [panel, half, lane, group, four, byte] -> [panel, group, four, half, lane, byte]
    body = bytes_.view(panels, 2, _LANES, groups, GROUP // 4, 4).permute(0, 3, 4, 1, 2, 5)
    padded_scales = torch.zeros(panels * PANEL, groups)
    padded_scales[:out] = scales
    tail = padded_scales.view(panels, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat((body.reshape(panels, groups, GROUP * PANEL), tail), dim=2)


def _padded(bias: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-len(bias) // PANEL) * PANEL)
    padded[: len(bias)] = bias
    return padded


def _interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    width = len(gate_up) // 2
    wide = -(-width // _LANES) * _LANES
    gates, ups = torch.zeros(2, wide, gate_up.shape[1]).unbind(0)
    gates[:width], ups[:width] = gate_up[:width], gate_up[width:]
    return torch.stack((gates.view(-1, _LANES, gates.shape[1]), ups.view(-1, _LANES, ups.shape[1])), dim=1).flatten(
        0, 2
    )


packed_gate_up = partial(packed, ordered=_interleaved)
"""Sixteen gate rows followed by their sixteen up rows, and so on, so that SwiGLU needs one panel only."""


class PackedNorm:
    def __init__(self, gain: torch.Tensor, eps: float) -> None:
        self._gain = gain.contiguous()
        self.struct = library.Norm(self._gain.data_ptr(), eps, len(gain))
