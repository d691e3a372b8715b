"""Block tables of sequences as rows of one host array, which grow as the sequences do.

A step's tables are gathered from it in one call, whatever the length of the contexts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_FEWEST_ROWS = 64


@dataclass(slots=True)
class _Row:
    table: list[int]
    """Held, so that its id stays its own."""
    index: int
    num_copied: int = 0
    used: int = 0
    """The last call that asked for it."""


class BlockTables:
    """A table is known by its list, which only ever grows: a sequence that loses its blocks gets a new list."""

    def __init__(self, width: int) -> None:
        """`width`: the most blocks of a sequence."""
        self.values: npt.NDArray[np.int32] = np.zeros((_FEWEST_ROWS, width), np.int32)
        """[rows, width]; entries beyond a table's length are those of earlier tables, or 0."""
        self._rows: dict[int, _Row] = {}
        self._free = list(range(_FEWEST_ROWS))
        self._num_calls = 0

    def indices(self, tables: Iterable[list[int]]) -> list[int]:
        """The row of each table in `values`, up to date."""
        self._num_calls += 1
        calls, known = self._num_calls, self._rows
        indices = []
        for table in tables:
            row = known.get(id(table)) or self._add(table)
            row.used = calls
            if row.num_copied < len(table):
                self.values[row.index, row.num_copied : len(table)] = table[row.num_copied :]
                row.num_copied = len(table)
            indices.append(row.index)
        return indices

    def _add(self, table: list[int]) -> _Row:
        if not self._free:
            self._drop_unused()
        row = self._rows[id(table)] = _Row(table, self._free.pop())
        return row

    def _drop_unused(self) -> None:
        """Forget tables that the last call did not ask for; without any, double the rows."""
        for key in [key for key, row in self._rows.items() if row.used < self._num_calls - 1]:
            self._free.append(self._rows.pop(key).index)
        if not self._free:
            count = len(self.values)
            self.values = np.concatenate((self.values, np.zeros_like(self.values)))
            self._free = list(range(count, 2 * count))
