"""Errors against accuracy targets. Calibration rows and validation rows are disjoint; targets apply to
validation rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tripool.planner.cost.setup import Routing
from tripool.planner.models import ModelShape
from tripool.planner.rows.predict import Prediction, predict
from tripool.planner.rows.read import Row

CALIBRATION = {
    ("CloudMatrix-Infer perfect EPLB", "prefill", 16384.0): "ascend-910c prefill_stack",
    ("CloudMatrix-Infer default EPLB", "prefill", 16384.0): "routing prefill_drift",
    ("CloudMatrix-Infer", "decode", 96.0): "routing decode_drift",
    ("SGLang default", "prefill", 16384.0): "h100 prefill_stack",
    ("DeepSeek profile-data", "prefill", 16384.0): "h800 prefill_stack",
}
"""System, phase and batch of a row; the constant that it fixes."""


@dataclass(frozen=True, slots=True)
class Bar:
    families: tuple[str, ...]
    worst: float
    median: float | None = None


BARS = (Bar(("910C",), worst=0.12, median=0.05), Bar(("H100", "H800"), worst=0.15))


@dataclass(frozen=True, slots=True)
class Compared:
    prediction: Prediction
    role: str
    """calibration, validation, or shown: not compared, because no batch, no known hardware or no such precision."""


@dataclass(frozen=True, slots=True)
class Verdict:
    family: str
    num_calibration: int
    num_validation: int
    median: float | None
    """Errors of validation rows, unsigned; None without such rows."""
    worst: float | None
    median_bar: float | None
    worst_bar: float | None

    @property
    def ok(self) -> bool:
        held = ((self.median, self.median_bar), (self.worst, self.worst_bar))
        return all(value is None or bar is None or value <= bar for value, bar in held)


def compare_rows(rows: Iterable[Row], model: ModelShape, *, routing: Routing | None = None) -> list[Compared]:
    compared = []
    for row in rows:
        prediction = predict(row, model, routing=routing)
        role = "shown" if prediction.error is None else "calibration" if row.key in CALIBRATION else "validation"
        compared.append(Compared(prediction, role))
    return compared


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
        median(errors) if errors else None, max(errors) if errors else None,
        bar.median if bar else None, bar.worst if bar else None,
    )  # fmt: skip
