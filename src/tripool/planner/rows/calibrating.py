"""Derives calibrated constants from published rows, and the errors of a family whose own rows fix none of them.

Each constant has one row. The order matters: stacks first (rows with perfect balance), then drifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tripool.planner.cost.setup import Routing, named_routing
from tripool.planner.hardware import Hardware, named_hardware
from tripool.planner.models import ModelShape
from tripool.planner.rows.judging import fixed_by
from tripool.planner.rows.predicting import hardware_of, named_software, predict
from tripool.planner.rows.reading import Row

_ROUNDS = 24
_STACKS, _DRIFTS, _STEPS_US, _LAYERS_S = (0.5, 4.0), (0.01, 2.0), (0.0, 5e4), (0.0, 0.002)
_HOSTS_S, _EXPERTS_US = (0.0, 0.01), (0.0, 500.0)
_OLD_SGLANG, _WAITING = "sglang to 0.5.8 b200", "sglang to 0.5.7"


@dataclass(frozen=True, slots=True)
class Constants:
    routing: Routing
    hardware: dict[str, Hardware]
    software: dict[str, dict[str, float]]

    def errors(self, rows: Sequence[Row], model: ModelShape) -> dict[Row, float]:
        found = {}
        for row in rows:
            each = predict(row, model, hardware=self.hardware, routing=self.routing, software=self.software)
            if each.error is not None and not each.reason:
                found[row] = each.error
        return found

    def with_stack(self, name: str, value: float) -> Constants:
        return replace(self, hardware=self.hardware | {name: replace(self.hardware[name], prefill_stack=value)})

    def with_layer(self, name: str, seconds: float) -> Constants:
        return replace(self, hardware=self.hardware | {name: replace(self.hardware[name], layer_s=seconds)})

    def with_host(self, name: str, seconds: float) -> Constants:
        return replace(self, hardware=self.hardware | {name: replace(self.hardware[name], host_s=seconds)})

    def with_software(self, name: str, key: str, value: float) -> Constants:
        return replace(self, software=self.software | {name: self.software[name] | {key: value}})

    def with_drift(self, name: str, value: float) -> Constants:
        return replace(self, routing=replace(self.routing, **{name: value}))


def refit(rows: Sequence[Row], model: ModelShape, *, decode_row: Row | None = None) -> Constants:
    """From the calibration rows among `rows`; another `decode_row` may fix the decode drift (leave-one-out)."""
    of = {constant: row for row in rows if (constant := fixed_by(row))}
    hardware = {name: named_hardware(name) for name in ("ascend-910c", "h100", "h200", "b200", "mi300x", "mi355x")}
    found = Constants(named_routing(), hardware, dict(named_software()))
    found = _stack(found, "ascend-910c", of["ascend-910c prefill_stack"], model)
    found = _drift(found, "prefill_drift", of["routing prefill_drift"], model)
    found = _drift(found, "decode_drift", decode_row or of["routing decode_drift"], model)
    if f"{_WAITING} agree_us" in of:
        found = _software(found, _WAITING, "agree_us", of[f"{_WAITING} agree_us"], model, *_STEPS_US)
    for key in ("experts_split_us", "experts_bf16_us"):
        if f"{_OLD_SGLANG} {key}" in of:
            found = _software(found, _OLD_SGLANG, key, of[f"{_OLD_SGLANG} {key}"], model, *_EXPERTS_US)
    if "b200 host_us" in of:
        row, start = of["b200 host_us"], found
        found = _solved(lambda value: start.with_host("b200", value), row, model, *_HOSTS_S)
    for name in ("mi300x", "mi355x"):
        if f"{name} layer_us" in of:
            found = _layer(found, name, of[f"{name} layer_us"], model)
    found = _stack(found, "h100", of["h100 prefill_stack"], model)
    return _software(found, "deepseek h800", "prefill_stack", of["deepseek h800 prefill_stack"], model, *_STACKS)


def _stack(start: Constants, name: str, row: Row, model: ModelShape) -> Constants:
    return _solved(lambda value: start.with_stack(name, value), row, model, *_STACKS)


def _drift(start: Constants, name: str, row: Row, model: ModelShape) -> Constants:
    return _solved(lambda value: start.with_drift(name, value), row, model, *_DRIFTS)


def _layer(start: Constants, name: str, row: Row, model: ModelShape) -> Constants:
    return _solved(lambda value: start.with_layer(name, value), row, model, *_LAYERS_S)


def _software(
    start: Constants, name: str, key: str, row: Row, model: ModelShape, low: float, high: float
) -> Constants:  # fmt: skip
    return _solved(lambda value: start.with_software(name, key, value), row, model, low, high)


def _solved(tried: Callable[[float], Constants], row: Row, model: ModelShape, low: float, high: float) -> Constants:
    """Where a row's error crosses 0: larger constants make slower systems."""
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if tried(middle).errors([row], model)[row] > 0 else (low, middle)
    return tried((low + high) / 2)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Errors of a family's rows, calibration rows included, with constants that others fixed."""

    family: str
    errors: dict[Row, float]
    fixed_by: str

    @property
    def median(self) -> float:
        return median(abs(error) for error in self.errors.values())


def leave_family_out(rows: Sequence[Row], model: ModelShape) -> list[LeftOut]:
    """One for each family with a comparable row."""
    shipped = refit(rows, model)
    families: dict[str, list[Row]] = {}
    for row in shipped.errors(rows, model):
        hardware = hardware_of(row)
        assert hardware is not None
        families.setdefault(hardware.family, []).append(row)
    others = {
        "910C": _without_910c, "H100": _without_h100, "H800": _without_h800, "H200": _without_h200,
        "B200": _without_b200, "MI300X": _without_mi300x, "MI355X": _without_mi355x,
    }  # fmt: skip
    found = []
    for family, own in families.items():
        constants, words = others[family](rows, model, shipped) if family in others else (shipped, "no row of its own")
        found.append(LeftOut(family, constants.errors(own, model), words))
    return found


def _without_910c(rows: Sequence[Row], model: ModelShape, shipped: Constants) -> tuple[Constants, str]:
    """H100's rows fix both drifts and the stack."""
    named = {row.system: row for row in rows if (chip := hardware_of(row)) and chip.family == "H100"}
    found = _stack(shipped, "h100", named["SGLang perfect EPLB (simulated)"], model)
    found = _drift(found, "prefill_drift", named["SGLang default"], model)
    found = _drift(found, "decode_drift", named["SGLang PD+EP decode"], model)
    return found.with_stack("ascend-910c", found.hardware["h100"].prefill_stack), "drifts and stack by H100"


def _without_h100(rows: Sequence[Row], model: ModelShape, shipped: Constants) -> tuple[Constants, str]:
    return shipped.with_stack("h100", shipped.software["deepseek h800"]["prefill_stack"]), "stack by H800"


def _without_h800(rows: Sequence[Row], model: ModelShape, shipped: Constants) -> tuple[Constants, str]:
    stack = shipped.hardware["h100"].prefill_stack
    return shipped.with_software("deepseek h800", "prefill_stack", stack), "stack by H100"


def _without_h200(rows: Sequence[Row], model: ModelShape, shipped: Constants) -> tuple[Constants, str]:
    row = next(row for row in rows if row.system == "SGLang PD+EP decode")
    return _software(shipped, _WAITING, "agree_us", row, model, *_STEPS_US), "agreement by H100"


def _without_mi300x(rows: Sequence[Row], model: ModelShape, shipped: Constants) -> tuple[Constants, str]:
    return shipped.with_layer("mi300x", shipped.hardware["h200"].layer_s), "layer by H200"


def _without_mi355x(rows: Sequence[Row], model: ModelShape, shipped: Constants) -> tuple[Constants, str]:
    return shipped.with_layer("mi355x", shipped.hardware["mi300x"].layer_s), "layer by MI300X"


def _without_b200(rows: Sequence[Row], model: ModelShape, shipped: Constants) -> tuple[Constants, str]:
    chip = shipped.hardware["b200"]
    found = shipped.with_software(_OLD_SGLANG, "experts_split_us", chip.experts_s * 1e6)
    found = found.with_software(_OLD_SGLANG, "experts_bf16_us", chip.experts_bf16_s * 1e6)
    return found.with_host("b200", 0.0), "newest kernels, no host time"
