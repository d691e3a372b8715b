"""Weight store that moves packed tensors to a device."""

from __future__ import annotations

from collections.abc import Callable

import torch


class OnDevice:
    """Stores nothing and sends every tensor to one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make().to(self.device)
