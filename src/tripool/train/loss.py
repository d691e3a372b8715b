"""What is made small: cross entropy of the next token, and a share of that of the token after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tripool.train.batch import Batch, Wanted
from tripool.train.network import Network


@dataclass(frozen=True, slots=True)
class Losses:
    """Sums over a pass, still on the device."""

    next: torch.Tensor
    after_next: torch.Tensor
    loads: list[torch.Tensor]


def token_losses(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In float32, whatever the product was computed in."""
    return F.cross_entropy(F.linear(hidden, head).float(), targets, reduction="none")


Each = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`token_losses`, or a compiled form of it."""


def losses(network: Network, batch: Batch, each: Each = token_losses) -> Losses:
    def weighted(hidden: torch.Tensor, target: Wanted) -> torch.Tensor:
        found = each(hidden.flatten(0, 1), network.head, target.tokens.flatten())
        return (found * target.weights.flatten()).sum()

    states = network(batch.tokens, batch.sight, batch.real)
    next_loss = weighted(states.hidden, batch.next)
    after = next_loss.new_zeros(()) if states.mtp is None else weighted(states.mtp, batch.after_next)
    return Losses(next_loss, after, states.loads)
