"""Outlier suppression by scalings that change nothing: a factor out of an input's columns and into their weights.

All factors are powers of two, so the network computes the same bits as before, in any float format: what is lost is
lost in rounding alone. How far to go is tried out on calibration rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tripool.quant.parts import Fold, LayerParts
from tripool.quant.rounding import Seen, largest_scales, to_integers
from tripool.quant.watched import round_tokens

STRENGTHS = (0.3, 0.5, 0.65, 0.8, 0.9, 1.0)
"""How much of an outlier goes from the activations (0) into the weights (1); none at all is tried as well."""
_LEAST_ROWS = 16
_MOST_OUTPUTS = 8192
"""A choice is tried on no more of the readers' outputs than this: of many experts, some speak for all."""
_TRIED_ROWS = 96
_FURTHEST = 12

ReadWeight = Callable[[str], torch.Tensor]
"""Weight of a linear, by its name in the layer, float32."""


@dataclass(slots=True)
class Factors:
    """Powers of two for a layer's tensors, by relative name; what is not named stays."""

    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gains are divided by it."""
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    """Rows of a weight, and its bias, are divided by it."""
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """Columns are multiplied by it."""

    def apply(self, name: str, out: torch.Tensor) -> None:
        """To a tensor of the layer, by its name: `input_layernorm.weight`, `self_attn.v_proj.bias`."""
        module, _, kind = name.rpartition(".")
        if kind in ("weight", "bias"):
            if module in self.norms:
                out.div_(self.norms[module])
            if module in self.rows:
                out.div_(self.rows[module].view(-1, *([1] * (out.ndim - 1))))
        if kind == "weight" and module in self.columns:
            out.mul_(self.columns[module])

    def tensors(self) -> dict[str, torch.Tensor]:
        """To be kept, and read again with `of_tensors`."""
        kinds = {"norms": self.norms, "rows": self.rows, "columns": self.columns}
        return {f"{kind}/{name}": values for kind, named in kinds.items() for name, values in named.items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Factors:
        found = cls()
        for name, values in tensors.items():
            kind, _, module = name.partition("/")
            getattr(found, kind)[module] = values
        return found


def choose_factors(parts: LayerParts, seen: Mapping[str, Seen], read: ReadWeight) -> Factors:
    factors = Factors()
    for fold in parts.folds:
        stats = seen.get(parts.input(fold.inputs[0]).observed)
        if stats is None or stats.count < _LEAST_ROWS:
            continue
        readers = [name for label in fold.inputs for name in parts.input(label).linears]
        factor = _choose(fold, stats, readers, read)
        if factor is not None:
            _note(factors, fold, factor, readers, read)
    return factors


def _choose(fold: Fold, stats: Seen, readers: Sequence[str], read: ReadWeight) -> torch.Tensor | None:
    """Of the strengths, and none, the one that leaves the least error in what the readers make of the sample.

    What an activation's column is worth is its largest value or its usual one; either may serve better.
    """
    weights, outputs = [], 0
    for name in readers:
        weights.append(read(name))
        outputs += len(weights[-1])
        if outputs >= _MOST_OUTPUTS:
            break
    together = torch.cat(weights)
    weight_largest = together.abs().amax(0)
    rows = stats.rows[:: -(-len(stats.rows) // _TRIED_ROWS)]
    best, least = None, _error(rows, together)
    for size in (stats.largest, stats.usual()):
        for strength in STRENGTHS:
            factor = _power_of_two(_tied(fold, size, weight_largest, strength))
            error = _error(rows / factor, together * factor)
            if error < least:
                best, least = factor, error
    return best


def _error(rows: torch.Tensor, weight: torch.Tensor) -> float:
    """Squared, of the outputs: what rounding the rows does to them, and what rounding the weights does."""
    scale = largest_scales(weight)
    by_rows = (round_tokens(rows) - rows) @ weight.T
    by_weights = rows @ to_integers(weight, scale).mul_(scale).sub_(weight).T
    return float(by_rows.square().sum() + by_weights.square().sum())


def _tied(fold: Fold, largest: torch.Tensor, weight_largest: torch.Tensor, strength: float) -> torch.Tensor:
    """Columns that come from one row share what they are divided by."""
    if fold.source_rows:
        rows = torch.tensor(fold.source_rows)
        largest, weight_largest = (
            torch.zeros(int(rows.max()) + 1).scatter_reduce_(0, rows, one, "amax")[rows]
            for one in (largest, weight_largest)
        )
    usable = (largest > 0) & (weight_largest > 0)
    wanted = largest.clamp_min(1e-20) ** strength / weight_largest.clamp_min(1e-20) ** (1 - strength)
    centre = wanted[usable].log().mean().exp() if usable.any() else torch.tensor(1.0)
    return torch.where(usable, wanted / centre, 1.0)


def _power_of_two(wanted: torch.Tensor) -> torch.Tensor:
    return wanted.log2().round().clamp(-_FURTHEST, _FURTHEST).exp2()


def _note(factors: Factors, fold: Fold, factor: torch.Tensor, readers: Sequence[str], read: ReadWeight) -> None:
    for name in (*readers, *fold.readers_in_floats):
        factors.columns[name] = factor
    if fold.norms:
        for name, part in zip(fold.norms, factor.chunk(len(fold.norms)), strict=True):
            factors.norms[name] = part.clone()
        return
    rows = torch.ones(len(read(fold.rows_of)))
    rows[torch.tensor(fold.source_rows)] = factor
    factors.rows[fold.rows_of] = rows
