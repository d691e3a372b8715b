"""Published numbers with their source, and which constant they fixed. Opens nothing but what is bundled."""

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
    """One published curve or set of values, by whatever they are published by: batch, EP degree, share."""

    source: str
    fits: str | None
    """Hardware and constant that was chosen by these numbers; None: no constant was."""
    fits_at: tuple[float, ...]
    """Which of them it was chosen by."""
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
class Told:
    """What a published row says beside its throughput."""

    tpot_ms: float | None
    tok_s_per_tflops: float | None


def told_rows(name: str = "published") -> Iterator[tuple[Row, Told]]:
    text = files("tripool.planner.rows").joinpath(f"{name}.csv").read_text("utf-8")
    for row, cells in zip(bundled_rows(name), csv.DictReader(text.splitlines()), strict=True):
        yield row, Told(_number(cells["tpot_ms"]), _number(cells["tok_s_per_tflops"]))


def _number(text: str) -> float | None:
    """Tables write `~100 (stated)`: then it is no measurement, and not taken."""
    try:
        return float(text)
    except ValueError:
        return None
