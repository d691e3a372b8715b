"""Comparison of float32 results that were summed in different orders, by other instructions or on other cores.

What two orders of one sum differ by grows with the size of its terms, not with the size of the result: where terms near
10 cancel, a result near 0 carries the rounding of the terms. So an element is judged by the largest value of the tensor
it stands in, never by itself and never by a constant.
"""

from __future__ import annotations

import torch

WITHIN = 1e-5
"""Share of the largest reference value: some 80 roundings of a float32. The orders that BLAS libraries choose differ by
up to 15 on the CPUs seen so far; a wrong index, mask or scale is off by thousands."""


def assert_close(ours: torch.Tensor, reference: torch.Tensor, *, within: float = WITHIN) -> None:
    assert ours.shape == reference.shape
    assert ours.isfinite().all()
    if reference.numel():
        worst = ((ours.double() - reference.double()).abs().max() / reference.abs().max()).item()
        assert worst <= within, f"differs by {worst:.2e} of the largest value"
