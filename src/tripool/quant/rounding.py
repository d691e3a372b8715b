"""Quantises one linear to integers: a scale per row, clipping, and error compensation along the columns.

Minimises the error of the output, x W^T, over rows x seen in calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RATIOS = (1.0, 0.98, 0.96, 0.94, 0.91, 0.88, 0.84, 0.8)
"""Candidate clipping ranges, as shares of the row's largest weight."""
TRIED_ROWS = 256
_BLOCK = 128
_DAMPING = 1.0
"""Damping, as a share of the mean square. Calibration sees a few thousand tokens: with little damping (0.01 is usual at
four bits) the compensation overfits. On unseen tokens, over five of SmolLM2's layers, 1 beat 0.1 and 0.01 nearly
everywhere; more was not tried.
"""
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(slots=True)
class Seen:
    """Calibration statistics of one input."""

    second: torch.Tensor
    """float32 [width, width]: sum of x^T x."""
    largest: torch.Tensor
    """float32 [width]: largest magnitude of each column."""
    rows: torch.Tensor
    """float32 [some, width]: a sample."""
    count: int

    def sample(self, count: int) -> torch.Tensor:
        """At most this many rows, evenly spaced."""
        return self.rows[:: max(-(-len(self.rows) // count), 1)]

    def errors(self, difference: torch.Tensor) -> torch.Tensor:
        """[out]: squared output error caused by a difference of weights, over all rows."""
        if self.count == len(self.rows) < len(self.second):  # few tokens: the sample holds all of them
            return output_errors(difference, self.rows)
        return (difference @ self.second).mul_(difference).sum(1)

    def usual(self) -> torch.Tensor:
        """float32 [width]: each column's root mean square."""
        return (self.second.diagonal() / max(self.count, 1)).sqrt()

    def divided(self, by: torch.Tensor) -> Seen:
        """The statistics with each column divided."""
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
    """float32 [out, 1]: maps the largest weight of a row to 127."""
    largest = weight.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, largest / 127, 1.0).clamp_(min=_LEAST)


def to_integers(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Integers as float32; symmetric, so -128 does not occur."""
    return (weight / scale).round_().clamp_(-127, 127)


def output_errors(difference: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """[out]: squared error of each output over the rows; of the weights themselves without rows."""
    seen = difference if rows is None else rows @ difference.T
    return seen.square().sum(1 if rows is None else 0)


def searched_scales(weight: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """For each row, the candidate range with the least output error."""
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
    """Rounds column after column and compensates each column's error in the columns not yet rounded.

    This is optimal brain surgery with a fixed order (OBS; GPTQ, arXiv 2210.17323): the Cholesky factor of the inverse
    of `second` gives the compensation. Large columns come first.
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
    """A row uses the compensated integers only where they are better over all calibration rows."""
    rows = None if seen is None else seen.sample(TRIED_ROWS)
    scale = searched_scales(weight, rows) if search else largest_scales(weight)
    integers = to_integers(weight, scale)
    if feedback is not None:
        assert seen is not None, "nothing was seen that an error could be fed back by"
        moved = feedback.integers(weight, scale)
        better = seen.errors(moved * scale - weight) < seen.errors(integers * scale - weight)
        integers = torch.where(better[:, None], moved, integers)
    return Rounded(integers.to(torch.int8), scale)
