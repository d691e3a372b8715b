"""How a bug is planted, and how long the simulation may take to notice it.

Every bug is one a tired person could write. The same lives pass without it (`test_scheduler_properties`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from .scheduler_traffic import explore

NUM_LIVES = 60

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass
class Bugs:
    plants: dict[str, tuple[Plant, str]] = field(default_factory=dict)

    def __call__(self, caught_by: str) -> Callable[[Plant], Plant]:
        """Register a bug under its function's name; `caught_by` matches the claims that may notice it first."""

        def register(plant: Plant) -> Plant:
            self.plants[plant.__name__] = plant, caught_by
            return plant

        return register

    def expect_caught(self, name: str, monkeypatch: pytest.MonkeyPatch, caught_by: str | None = None) -> None:
        plant, usually_by = self.plants[name]
        plant(monkeypatch)
        with pytest.raises(AssertionError, match=caught_by or usually_by):
            live()


def live() -> None:
    for seed in range(NUM_LIVES):
        explore(seed)
