"""What a gateway has in common with the others of its server, if there are any."""

from __future__ import annotations

from dataclasses import dataclass, field

from tripool.gateway.batches import SharedBatches
from tripool.gateway.idempotency import Keeper
from tripool.gateway.peers import Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """By default there are no others."""

    peers: Peers = field(default_factory=Peers)
    keeper: Keeper | None = None
    """Keeps answers under idempotency keys; None: this process does."""
    batches: SharedBatches | None = None
