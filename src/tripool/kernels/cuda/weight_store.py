"""Final tensors on a device: what the loader reads and the table packs moves there as it is kept."""

from __future__ import annotations

from collections.abc import Callable

import torch


class OnDevice:
    """A shelf (see `kernels.store`) that keeps nothing but sends everything to one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def keep(self, label: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make().to(self.device)
