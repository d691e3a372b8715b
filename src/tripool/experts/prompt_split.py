"""How ranks share the phases of a step, plain and step by step: the reference for `kernels/native/prompt.h`.

`PhaseOwner` opens phases and decides whose results count; a `Claimer` claims units, for its own rank or to help.
Neither waits, reads a clock or computes: the caller says when each looks at the shared memory again, so a simulation
can stop a rank between any two stores. `experts/prompt_layout.py` describes the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tripool.experts.layout import Memory
from tripool.experts.prompt_layout import MAX_UNITS, OWNER, PromptLayout


class PromptView:
    """The parts of the memory by name."""

    def __init__(self, layout: PromptLayout, memory: Memory) -> None:
        assert len(memory) == layout.num_bytes
        self.layout, self._memory = layout, memory

    def owner(self, rank: int) -> npt.NDArray[Any]:
        """[1] of `OWNER`."""
        at = self.layout.owners + self.layout.owner_bytes * rank
        return self._memory[at : at + OWNER.itemsize].view(OWNER)

    def done(self, rank: int, owner: int) -> npt.NDArray[np.uint32]:
        """[units]: the newest phase of this owner in which the rank has computed the unit."""
        at = self._area(rank, owner)
        return self._memory[at : at + 4 * MAX_UNITS].view(np.uint32)

    def stream(self, rank: int, owner: int) -> npt.NDArray[np.float32]:
        """[2, rows, hidden]."""
        layout, at = self.layout, self._area(rank, owner) + self.layout.stream
        flat = self._memory[at : at + 8 * layout.rows * layout.hidden].view(np.float32)
        return flat.reshape(2, layout.rows, layout.hidden)

    def attended(self, rank: int, owner: int) -> npt.NDArray[np.float32]:
        """[rows, attended_width]."""
        layout, at = self.layout, self._area(rank, owner) + self.layout.attended
        return self._memory[at : at + 4 * layout.rows * layout.attended_width].view(np.float32).reshape(layout.rows, -1)

    def _area(self, rank: int, owner: int) -> int:
        return self.layout.areas + self.layout.area_bytes * (rank * self.layout.ranks + owner)


@dataclass(frozen=True, slots=True)
class Unit:
    """`index`: of the phase within its step; even ones compute rows, odd ones heads."""

    phase: int
    index: int
    number: int

    @property
    def layer(self) -> int:
        return self.index // 2

    @property
    def has_heads(self) -> bool:
        return self.index % 2 == 1


class Claimer:
    """A rank that computes units of an owner's steps."""

    def __init__(self, view: PromptView, rank: int, owner: int) -> None:
        self._owner, self._rank, self._done = view.owner(owner), rank, view.done(rank, owner)

    def claim(self) -> Unit | None:
        """A unit that no one has claimed; it is then this rank's."""
        state = int(self._owner["state"][0])
        units, phase = state >> 32, state & 0xFFFFFFFF
        claims = self._owner["claim"][0]
        for number in range(units):
            if int(claims[number]) >> 32 != phase:
                claims[number] = phase << 32 | self._rank  # one atomic compare-and-exchange in C
                return Unit(phase, phase - int(self._owner["first"][0]), number)
        return None

    def finish(self, unit: Unit) -> None:
        """Its results are in the rank's own area."""
        self._done[unit.number] = unit.phase


class PhaseOwner:
    """Of one step at a time: `begin`, then `open` and `settle` phase after phase, then `close`."""

    def __init__(self, view: PromptView, rank: int) -> None:
        self._view, self._rank, self._owner = view, rank, view.owner(rank)
        self.close()  # an earlier process may have left a phase open

    @property
    def _phase(self) -> int:
        return int(self._owner["state"][0]) & 0xFFFFFFFF

    def begin(self) -> None:
        self._owner["first"][0] = self._phase + 1

    def open(self, units: int) -> None:
        self._owner["state"][0] = units << 32 | self._phase + 1

    def missing(self) -> list[Unit]:
        """Units that are claimed and not done. The owner waits for them, or computes them itself."""
        units, first = int(self._owner["state"][0]) >> 32, int(self._owner["first"][0])
        return [
            Unit(self._phase, self._phase - first, number)
            for number in range(units)
            if self._view.done(self._claimed_by(number), self._rank)[number] != self._phase
        ]

    def settle(self, computed_here: set[int]) -> None:
        """Name whose results count: of a unit that the owner has computed too, its own."""
        units, index = int(self._owner["state"][0]) >> 32, self._phase - int(self._owner["first"][0])
        winners = self._owner["head_winner"][0] if index % 2 else self._owner["row_winner"][0][index // 2 % 2]
        for number in range(units):
            winners[number] = self._rank if number in computed_here else self._claimed_by(number)

    def close(self) -> None:
        self._owner["state"][0] = self._phase

    def _claimed_by(self, number: int) -> int:
        return int(self._owner["claim"][0][number]) & 0xFFFFFFFF
