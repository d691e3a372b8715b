"""Published numbers with their sources, and the constants fitted to them. Opens only bundled files."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from tripool.planner.rows import Row, bundled_rows


@dataclass(frozen=True, slots=True)
class Series:
    """One published curve or set of values, by its parameter: batch, EP degree, share."""

    source: str
    fits: str | None
    """Hardware and constant fitted to these numbers; None: none was."""
    fits_at: tuple[float, ...]
    """The parameters it was fitted at."""
    values: Mapping[float, float]

    def __getitem__(self, at: float) -> float:
        return self.values[at]

    def get(self, at: float) -> float | None:
        return self.values.get(at)

    def fitted(self, at: float) -> bool:
        return self.fits is not None and at in self.fits_at


@lru_cache(maxsize=1)
def published_series() -> Mapping[str, Series]:
    text = files("tripool.planner.reproduce").joinpath("published.toml").read_text("utf-8")
    found = {}
    for name, table in tomllib.loads(text).items():
        values = {float(at): float(value) for at, value in zip(table["at"], table["values"], strict=True)}
        fits_at = tuple(float(at) for at in table.get("fits_at", values))
        assert set(fits_at) <= values.keys(), f"{name} is fixed at points that it does not have"
        found[name] = Series(table["source"], table.get("fits"), fits_at, values)
    return found


@dataclass(frozen=True, slots=True)
class RowDetails:
    """Values of a published row besides its throughput."""

    tpot_ms: float | None
    tok_s_per_tflops: float | None


def detailed_rows(name: str = "published") -> Iterator[tuple[Row, RowDetails]]:
    text = files("tripool.planner.rows").joinpath(f"{name}.csv").read_text("utf-8")
    for row, cells in zip(bundled_rows(name), csv.DictReader(text.splitlines()), strict=True):
        yield row, RowDetails(_number(cells["tpot_ms"]), _number(cells["tok_s_per_tflops"]))


def _number(text: str) -> float | None:
    """None for cells such as `~100 (stated)`, which are not measurements."""
    try:
        return float(text)
    except ValueError:
        return None
