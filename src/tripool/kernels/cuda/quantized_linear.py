"""Products with a checkpoint's 8-bit weights: activations quantised, weights as stored, results in 16 bits.

Parts that the checkpoint stores as floats stay floats. `QuantizedOps` selects int8 or e4m3 and the kernels (see
`arithmetic.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tripool.kernels.ref import fp8
from tripool.kernels.ref.w8a8 import Rows8
from tripool.kernels.weight_store import FRESH, WeightStore

Held = tuple[torch.Tensor, torch.Tensor]
"""A weight as floats and its scales, which are above 0 (`kernels/weights.py`)."""
_WIDTH_MULTIPLE = 16
_PIECE_WEIGHTS = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedOps:
    """One 8-bit arithmetic. Weights are 8-bit with float32 scales: int8 has one per channel, e4m3 as in `ref/fp8`."""

    stored: str
    """INT8 or E4M3 (`kernels/weights.py`)."""
    dtype: torch.dtype
    outs_multiple: int
    """The number of channels must be a multiple of this."""
    pack: Callable[[torch.Tensor], torch.Tensor]
    """Weights divided by their scales -> 8 bits."""
    quantise: Callable[[torch.Tensor], Rows8]
    norm: Callable[[torch.Tensor, torch.Tensor, float], Rows8]
    swiglu: Callable[[torch.Tensor], Rows8]
    product: Callable[[Rows8, Rows8], torch.Tensor]
    """Rows, and weights [out, in] -> bfloat16 [rows, out]."""
    add_product: Callable[[torch.Tensor, Rows8, Rows8], torch.Tensor] | None = None
    """Adds the product to bfloat16 [rows, out], contiguous, in its own launch; None: there is no such kernel."""
    experts: Callable[
        [Rows8, torch.Tensor, torch.Tensor, Rows8, Rows8, torch.Tensor | None, torch.Tensor | None], torch.Tensor
    ]
    """Rows, experts and weights [rows, top_k], gate_up [experts, 2 * width, hidden], down [experts, hidden, width], and
    `onto` and `also` of `make.Experts` -> bfloat16 [rows, hidden]."""

    def held(self, weight: torch.Tensor, scales: torch.Tensor | None) -> Held | None:
        """The weight and its scales if every row is stored in this 8-bit type and the kernels support the shape.

        weight [..., out, in]; scales [..., out], or [..., out, groups of 128 columns].
        """
        if scales is None or weight.shape[-1] % _WIDTH_MULTIPLE or weight.shape[-2] % self.outs_multiple:
            return None
        if scales.dim() == weight.dim() and scales.shape[-1] != -(-weight.shape[-1] // fp8.GROUP):
            return None  # blocks of another width
        without = scales <= 0  # stored as floats, or all zeros, for which any scale is right
        if bool(without.any()) and bool(weight[_by_weight(without, weight).to(weight.device)].any()):
            return None
        return weight, scales.float().masked_fill(without, 1.0).to(weight.device)

    def stored_weight(self, held: Held, name: str, store: WeightStore) -> Rows8:
        """The stored integers, recovered exactly: the floats are their products with the scales, rounded to bfloat16 at
        worst, whose relative error of 2^-9 at 127 is below half a step."""
        weight, scales = held
        quantized = store.keep(
            f"{name}eight bits",
            lambda: self._packed(weight.flatten(0, -2), scales.flatten(0, weight.dim() - 2), weight),
        )
        return quantized, store.keep(
            f"{name}scales", lambda: scales if scales.dim() < weight.dim() else fp8.share_rows(scales)
        )

    def _packed(self, rows: torch.Tensor, scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Packs piece by piece: a layer's experts in float32 would take four times the memory that was read."""
        out = torch.empty(rows.shape, dtype=self.dtype, device=rows.device)
        step = max(1, _PIECE_WEIGHTS // rows.shape[1])
        for first in range(0, len(rows), step):
            piece = slice(first, first + step)
            by_weight = _by_weight(scales[piece], rows)
            out[piece] = self.pack(rows[piece] / (by_weight[:, None] if scales.dim() == 1 else by_weight))
        return out.view(like.shape)


def _by_weight(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What belongs to a row, as it is; what belongs to 128 columns of a row, for each of them."""
    return scales if scales.dim() < weight.dim() else fp8.by_column(scales, weight.shape[-1])


class Linear8:
    def __init__(
        self, held: Held, bias: torch.Tensor | None = None, *, quantized: QuantizedOps, store: WeightStore = FRESH
    ) -> None:
        stored_weight = quantized.stored_weight(held, "", store)
        self._set(
            stored_weight, None if bias is None else store.keep("bias", lambda: bias.to(torch.bfloat16)), quantized
        )

    def _set(
        self, weights: Rows8, bias: torch.Tensor | None, quantized: QuantizedOps, count: int | None = None
    ) -> None:
        self._weights, self._bias, self.quantized = weights, bias, quantized
        self._count = count
        """Channels to return, where the kernels compute more."""
        self.num_bytes = weights[0].nbytes + weights[1].nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor | Rows8) -> torch.Tensor:
        """`x`: rows in 8 bits, or floats that are quantised here."""
        rows = self.quantized.quantise(x) if isinstance(x, torch.Tensor) else x
        out = self.quantized.product(rows, self._weights)[:, : self._count]
        return out if self._bias is None else out + self._bias

    def add_to(self, x: torch.Tensor, rows: torch.Tensor | Rows8) -> None:
        """x += self(rows)."""
        add, plain = self.quantized.add_product, self._bias is None and self._count is None
        if add is None or not plain or x.dtype != torch.bfloat16 or not x.is_contiguous():
            x += self(rows)
        else:
            add(x, self.quantized.quantise(rows) if isinstance(rows, torch.Tensor) else rows, self._weights)

    def first(self, count: int) -> Linear8:
        part, whole = object.__new__(Linear8), -(-count // self.quantized.outs_multiple) * self.quantized.outs_multiple
        (weight, scales), bias = self._weights, self._bias
        share = fp8.rows_per_scale(len(weight), len(scales))
        part._set(
            (weight[:whole], scales[: -(-whole // share)]),
            None if bias is None else bias[:count],
            self.quantized,
            count,
        )
        return part


class Experts8:
    def __init__(self, gate_up: Held, down: Held, *, quantized: QuantizedOps, store: WeightStore = FRESH) -> None:
        self.quantized = quantized
        self._gate_up, self._down = (
            quantized.stored_weight(gate_up, "gate_up ", store),
            quantized.stored_weight(down, "down ", store),
        )
        self.num_bytes = sum(one.nbytes for part in (self._gate_up, self._down) for one in part)

    def __call__(
        self, x: torch.Tensor | Rows8, experts: torch.Tensor, weights: torch.Tensor, onto: torch.Tensor | None = None,
        also: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As `Experts`."""
        rows = self.quantized.quantise(x) if isinstance(x, torch.Tensor) else x
        return self.quantized.experts(rows, experts, weights, self._gate_up, self._down, onto, also)
