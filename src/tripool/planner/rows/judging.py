"""Evaluates predictions of published rows: calibration or validation, a bar per family of hardware, error bands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import ceil
from statistics import median
from typing import Literal

from tripool.planner.cost.setup import Routing
from tripool.planner.hardware import Hardware, hardware_names, named_hardware
from tripool.planner.models import ModelShape, named_model
from tripool.planner.rows.predicting import Prediction, hardware_of, predict
from tripool.planner.rows.reading import Row, parse_rows

CALIBRATION = {
    ("CloudMatrix-Infer perfect EPLB", "prefill"): "ascend-910c prefill_stack",
    ("CloudMatrix-Infer default EPLB", "prefill"): "routing prefill_drift",
    ("CloudMatrix-Infer", "decode"): "routing decode_drift",
    ("SGLang default", "prefill"): "h100 prefill_stack",
    ("DeepSeek profile-data", "prefill"): "deepseek h800 prefill_stack",
    ("SGLang long context, overlap scheduling", "decode"): "sglang to 0.5.7 agree_us",
    ("SGLang on B200, one request, TP8", "decode"): "sglang to 0.5.8 b200 experts_split_us",
    ("SGLang on B200, one request in BF16, TP8", "decode"): "sglang to 0.5.8 b200 experts_bf16_us",
    ("SGLang on B200, 100 requests, prompts between the steps, TP8", "decode"): "b200 host_us",
    ("SGLang on MI355X, 4 requests in FP4, TP4", "decode"): "mi355x layer_us",
    ("SGLang on MI300X, one request, TP8", "decode"): "mi300x layer_us",
}
"""System and phase of a bundled row; the constant that it fixes."""
_SAME = 0.01
"""Rates closer than this, of rows alike in all else, are one measurement."""
_FEW = 5
"""With fewer rows, a family's band is at least that of all families together."""
_MOST = 0.9
"""A band holds so many of the rows."""
TABLES = ("published", "further")
UNSEEN = "unseen"
"""Rows that were predicted before any of them was looked into; none fixes a constant."""
SEEN = "seen"
"""Rows that were found and predicted after those, three times; what was physical in their errors was mended since."""
HELD_OUT = "heldout"
"""Rows found after those and predicted once, on 2026-11-18: what to expect of the next ones."""
PLAIN_MODEL = "deepseek-r1"
"""Of the bundled tables' rows that name none."""


@dataclass(frozen=True, slots=True)
class Bar:
    families: tuple[str, ...]
    worst: float
    median: float | None = None


BARS = (
    Bar(("910C",), worst=0.10),
    Bar(("H100", "H800", "H200"), worst=0.15, median=0.08),
    Bar(("H20", "GB200", "B200"), worst=0.25),
)
MEDIAN_UNSEEN, WITHIN_UNSEEN, SHARE_UNSEEN = 0.12, 0.25, 0.9
"""Bars of unseen rows: their median, and the share of them within an error."""
MEDIAN_LEFT_OUT = 0.15
"""Bar of the median error when a family's own rows fix no constant."""


@dataclass(frozen=True, slots=True)
class Compared:
    prediction: Prediction
    role: Literal["calibration", "validation", "shown"]
    """shown: not compared, for the prediction's `reason`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    family: str
    calibration_rows: int
    validation_rows: int
    median: float | None
    """Errors of validation rows, unsigned; None without such rows."""
    median_bar: float | None
    worst: float | None
    worst_bar: float | None
    """None: this family has no bar."""

    @property
    def ok(self) -> bool:
        held = ((self.median, self.median_bar), (self.worst, self.worst_bar))
        return all(value is None or bar is None or value <= bar for value, bar in held)


def bundled_rows(name: str = "published") -> list[Row]:
    return parse_rows(files("tripool.planner.rows").joinpath(f"{name}.csv").read_text("utf-8"), f"{name}.csv")


def fixed_by(row: Row) -> str | None:
    """The constant that a row fixes: a row is one of calibration by its values, whatever its name."""
    values = _values(row)
    return next((constant for known, constant in _calibration_values() if _same(known, values)), None)


@lru_cache(maxsize=1)
def _calibration_values() -> tuple[tuple[tuple[object, ...], str], ...]:
    rows = {(row.system, row.phase): row for name in TABLES for row in bundled_rows(name)}
    return tuple((_values(rows[key]), constant) for key, constant in CALIBRATION.items())


def _values(row: Row) -> tuple[object, ...]:
    """Hardware, phase, batch and rate per rank, context and what is done per token; no names."""
    hardware = hardware_of(row)
    ranks = hardware.ranks if hardware else 1
    batch = None if row.batch is None else row.batch / (1 if row.batch_per_die else ranks)
    rate = None if row.published is None else row.published / (1 if row.published_per_die else ranks)
    return hardware.name if hardware else "", row.phase, row.ep, batch, row.context, row.drafts or 0, rate


def _same(known: tuple[object, ...], values: tuple[object, ...]) -> bool:
    rate, other = known[-1], values[-1]
    if not isinstance(rate, float) or not isinstance(other, float) or abs(rate / other - 1.0) > _SAME:
        return False
    return known[:-1] == values[:-1]


def compare_rows(rows: Iterable[Row], model: ModelShape, *, routing: Routing | None = None) -> list[Compared]:
    return [_compared(predict(row, model, routing=routing)) for row in rows]


def _compared(prediction: Prediction) -> Compared:
    if prediction.error is None or prediction.reason:
        return Compared(prediction, "shown")
    return Compared(prediction, "calibration" if fixed_by(prediction.row) else "validation")


def verdicts(compared: Sequence[Compared]) -> list[Verdict]:
    """One per hardware family, in the order in which they come."""
    families = dict.fromkeys(each.prediction.hardware.family for each in compared if each.prediction.hardware)
    return [_verdict(family, compared) for family in families]


def _verdict(family: str, compared: Sequence[Compared]) -> Verdict:
    own = [each for each in compared if each.prediction.hardware and each.prediction.hardware.family == family]
    errors = [abs(each.prediction.error or 0.0) for each in own if each.role == "validation"]
    bar = next((bar for bar in BARS if family in bar.families), None)
    return Verdict(
        family, sum(each.role == "calibration" for each in own), len(errors),
        median(errors) if errors else None, bar.median if bar else None,
        max(errors) if errors else None, bar.worst if bar else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Band:
    """How far published rows of a family are from their predictions; beside every figure of a plan."""

    family: str
    rows: int
    within: float
    """The error that nine of ten rows stay within, in either direction; with few rows, of all families."""

    @property
    def low(self) -> float:
        """A published rate over its prediction, at worst."""
        return 1.0 / (1.0 + self.within)

    @property
    def high(self) -> float:
        return 1.0 / (1.0 - self.within)

    def words(self) -> str:
        if not self.rows:
            return "assumed, no published row"
        few = "" if self.rows >= _FEW else ", which are few: as all families together"
        return f"within {self.within:.0%} by {self.rows} published rows of {self.family}{few}"

    def around(self, rate: float) -> tuple[float, float] | None:
        """Limits of a rate; None without rows."""
        return (rate * self.low, rate * self.high) if self.rows else None

    def around_time(self, value: float) -> tuple[float, float] | None:
        """Limits of a time, or of a price per token: what is slower takes longer."""
        return (value / self.high, value / self.low) if self.rows else None

    def beside(self, rates: Mapping[str, float], times: Mapping[str, float]) -> str:
        """A plan's figures with their limits, in words."""
        limits = {name: self.around(value) for name, value in rates.items()}
        limits |= {name: self.around_time(value) for name, value in times.items()}
        known = [f"{name} {each[0]:,.4g} to {each[1]:,.4g}" for name, each in limits.items() if each]
        return f"error: {self.words()}" + (f"; {', '.join(known)}" if known else "")


@lru_cache(maxsize=1)
def _validation_errors() -> dict[str, list[float]]:
    """Of the bundled tables by family, unsigned."""
    found: dict[str, list[float]] = {}
    rows = (row for name in (*TABLES, UNSEEN, SEEN, HELD_OUT) for row in bundled_rows(name))
    for each in compare_rows(rows, named_model(PLAIN_MODEL)):
        if each.role == "validation" and each.prediction.hardware:
            found.setdefault(each.prediction.hardware.family, []).append(abs(each.prediction.error or 0.0))
    return found


def _nine_of_ten(errors: Sequence[float]) -> float:
    return sorted(errors)[ceil(_MOST * len(errors)) - 1] if errors else 0.0


def error_band(family: str) -> Band:
    every = _validation_errors()
    own = every.get(family, [])
    within = _nine_of_ten(own)
    if len(own) < _FEW:
        within = max(within, *own, _nine_of_ten([error for errors in every.values() for error in errors]))
    return Band(family, len(own), within)


def band_of(hardware: Hardware, model: ModelShape) -> Band:
    """No rows, where none was published of this hardware as it is described, or of attention as the model's on it."""
    known = hardware.name in hardware_names() and named_hardware(hardware.name) == hardware
    if not known or (model.attention.index_topk and not hardware.sparse_published):
        return Band(hardware.family, 0, 0.0)
    return error_band(hardware.family)


@dataclass(frozen=True, slots=True)
class Unseen:
    """Rows that no constant was fixed by, over all families."""

    rows: int
    median: float
    share: float
    """Within `WITHIN_UNSEEN`."""

    @property
    def ok(self) -> bool:
        return self.median <= MEDIAN_UNSEEN and self.share >= SHARE_UNSEEN


def unseen(compared: Sequence[Compared]) -> Unseen | None:
    errors = [abs(each.prediction.error or 0.0) for each in compared if each.role == "validation"]
    if not errors:
        return None
    return Unseen(len(errors), median(errors), sum(error <= WITHIN_UNSEEN for error in errors) / len(errors))
