"""One linear into integers: a scale for each row, clipping, and feedback of the error along the columns.

What is minimised is the error of the output, x W^T, over rows x that were seen in calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RATIOS = (1.0, 0.98, 0.96, 0.94, 0.91, 0.88, 0.84, 0.8)
"""Of the largest weight in a row: where its range may end. What lies outside is clipped."""
TRIED_ROWS = 256
_BLOCK = 128
_DAMPING = 1.0
"""Of the mean square. Calibration sees a few thousand tokens: with little damping (0.01 is usual at four bits) what is
learned from them harms other text. On tokens not seen, over five of SmolLM2's layers, 1 beat 0.1 and 0.01 nearly
everywhere; more was not tried."""
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class Seen:
    """What calibration saw of one input."""

    second: torch.Tensor
    """float32 [width, width]: sum of x^T x."""
    largest: torch.Tensor
    """float32 [width]: of each column, by magnitude."""
    rows: torch.Tensor
    """float32 [some, width]: a sample."""
    count: int

    def sample(self, count: int) -> torch.Tensor:
        """No more of the rows than this, evenly."""
        return self.rows[:: max(-(-len(self.rows) // count), 1)]

    def errors(self, difference: torch.Tensor) -> torch.Tensor:
        """[out]: squared error that a difference of weights makes in each output, over all rows."""
        if self.count == len(self.rows) < len(self.second):  # an expert that few tokens reached: they are all there
            return output_errors(difference, self.rows)
        return (difference @ self.second).mul_(difference).sum(1)

    def usual(self) -> torch.Tensor:
        """float32 [width]: each column's root mean square."""
        return (self.second.diagonal() / max(self.count, 1)).sqrt()

    def divided(self, by: torch.Tensor) -> Seen:
        """As if each column had been divided."""
        return Seen(self.second / by / by[:, None], self.largest / by, self.rows / by, self.count)


@dataclass(frozen=True, slots=True)
class Rounded:
    values: torch.Tensor
    """int8 [out, in]."""
    scale: torch.Tensor
    """float32 [out, 1]."""

    def floats(self) -> torch.Tensor:
        return self.values * self.scale


def largest_scales(weight: torch.Tensor) -> torch.Tensor:
    """float32 [out, 1]: the largest weight of a row becomes 127."""
    largest = weight.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, largest / 127, 1.0).clamp_(min=_LEAST)


def to_integers(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Still float32; symmetric, so that -128 does not occur."""
    return (weight / scale).round_().clamp_(-127, 127)


def output_errors(difference: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """[out]: squared error of each output over the rows; of the weights themselves where nothing was seen."""
    seen = difference if rows is None else rows @ difference.T
    return seen.square().sum(1 if rows is None else 0)


def searched_scales(weight: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Of the ratios, for each row, the one with the least output error."""
    whole = largest_scales(weight)
    best, best_error = whole, torch.full((len(weight),), torch.inf)
    for ratio in RATIOS:
        scale = (whole * ratio).clamp_(min=_LEAST)
        error = output_errors(to_integers(weight, scale).mul_(scale).sub_(weight), rows)
        better = error < best_error
        best = torch.where(better[:, None], scale, best)
        best_error = torch.where(better, error, best_error)
    return best


class Feedback:
    """Rounds column after column and moves each column's error to those not yet rounded, where it does least harm.

    This is optimal brain surgery with a fixed order (OBS; GPTQ, arXiv 2210.17323): the Cholesky factor of the inverse
    of `second` says how a column's error is best made good by the later ones. Large columns come first.
    """

    def __init__(self, second: torch.Tensor) -> None:
        width = len(second)
        self._order = second.diagonal().argsort(descending=True, stable=True)
        second = second[self._order][:, self._order].double()
        damping = _DAMPING * second.diagonal().mean().clamp_min(1e-12)
        second += damping * torch.eye(width, dtype=torch.float64)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(second))
        self._upper = torch.linalg.cholesky(inverse, upper=True).float()

    def integers(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        left = weight[:, self._order].clone()
        done = torch.empty_like(left)
        width = left.shape[1]
        for start in range(0, width, _BLOCK):
            stop = min(start + _BLOCK, width)
            errors = torch.empty(len(left), stop - start)
            block, upper = left[:, start:stop].clone(), self._upper[start:stop, start:stop]
            for i in range(stop - start):
                column = block[:, i : i + 1]
                integer = to_integers(column, scale)
                done[:, start + i : start + i + 1] = integer
                error = (column - integer * scale) / upper[i, i]
                block[:, i:].addmm_(error, upper[i : i + 1, i:], alpha=-1)
                errors[:, i : i + 1] = error
            left[:, stop:].addmm_(errors, self._upper[start:stop, stop:], alpha=-1)
        back = torch.empty_like(done)
        back[:, self._order] = done
        return back


def round_linear(weight: torch.Tensor, seen: Seen | None, *, search: bool, feedback: Feedback | None) -> Rounded:
    """A row takes the compensated integers only where they are better over all that was seen."""
    rows = None if seen is None else seen.sample(TRIED_ROWS)
    scale = searched_scales(weight, rows) if search else largest_scales(weight)
    integers = to_integers(weight, scale)
    if feedback is not None:
        assert seen is not None, "nothing was seen that an error could be fed back by"
        moved = feedback.integers(weight, scale)
        better = seen.errors(moved * scale - weight) < seen.errors(integers * scale - weight)
        integers = torch.where(better[:, None], moved, integers)
    return Rounded(integers.to(torch.int8), scale)
