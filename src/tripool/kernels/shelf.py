"""Where a network's final tensors come from: made now, or taken from where they were kept before.

Everything that a kernel reads at each step goes through `keep`, under a label and in an order that depends on the
network's shape alone. So a shelf that wrote them down once can hand them out again, and nothing is read or packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Shelf(Protocol):
    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor that `make` makes, or made once. Never changed afterwards: others may read the same memory."""
        ...


class Fresh:
    """Keeps nothing."""

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


FRESH = Fresh()
