"""Calibration itself: constants from rows, by bisection. Shipped constants are what this finds, and a test holds that.

Each constant has one row. The order matters: stacks first (rows with perfect balance), then drifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tripool.planner.cost.setup import Routing, named_routing
from tripool.planner.hardware import Hardware, named_hardware
from tripool.planner.models import ModelShape
from tripool.planner.rows.accuracy import CALIBRATION
from tripool.planner.rows.predict import predict
from tripool.planner.rows.read import Row

_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Constants:
    routing: Routing
    hardware: dict[str, Hardware]

    def errors(self, rows: Sequence[Row], model: ModelShape) -> dict[Row, float]:
        predictions = (predict(row, model, hardware=self.hardware, routing=self.routing) for row in rows)
        return {each.row: each.error for each in predictions if each.error is not None}


def refit(rows: Sequence[Row], model: ModelShape, *, decode_row: Row | None = None) -> Constants:
    """From the calibration rows among `rows`; another `decode_row` may fix the decode drift (leave-one-out)."""
    of = {CALIBRATION[row.key]: row for row in rows if row.key in CALIBRATION}
    names = ("ascend-910c", "h100", "h800")
    found = Constants(named_routing(), {name: named_hardware(name) for name in names})

    def stack(name: str) -> None:
        nonlocal found
        start = found

        def tried(value: float) -> Constants:
            return replace(start, hardware=start.hardware | {name: replace(start.hardware[name], prefill_stack=value)})

        found = tried(_solve(lambda value: _rate(of[f"{name} prefill_stack"], tried(value), model), 0.5, 4.0))

    def drift(name: str, row: Row) -> None:
        nonlocal found
        start = found

        def tried(value: float) -> Constants:
            return replace(start, routing=replace(start.routing, **{name: value}))

        found = tried(_solve(lambda value: _rate(row, tried(value), model), 0.01, 2.0))

    stack("ascend-910c")
    drift("prefill_drift", of["routing prefill_drift"])
    drift("decode_drift", decode_row or of["routing decode_drift"])
    stack("h100")
    stack("h800")
    return found


def _rate(row: Row, constants: Constants, model: ModelShape) -> float:
    error = predict(row, model, hardware=constants.hardware, routing=constants.routing).error
    assert error is not None
    return error


def _solve(error: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling error crosses 0: larger constants make slower systems."""
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > 0 else (low, middle)
    return (low + high) / 2
