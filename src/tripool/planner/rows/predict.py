"""Predicts one row: the published system's parallelism and batch in the cost model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tripool.planner.cost import DecodeModel, PrefillModel, Setup, StepCost
from tripool.planner.cost.setup import Routing
from tripool.planner.hardware import Hardware, hardware_names, named_hardware
from tripool.planner.models import ModelShape
from tripool.planner.rows.read import Row


@dataclass(frozen=True, slots=True)
class Prediction:
    row: Row
    hardware: Hardware | None
    """None: no description of this hardware."""
    predicted: float | None
    """Tokens per second and chip; None if the row has no batch, no known hardware or no such precision."""
    step: StepCost | None
    microbatches: int

    @property
    def error(self) -> float | None:
        """Signed: above 0 means faster than published."""
        return None if self.predicted is None else self.predicted / self.row.published - 1.0


@lru_cache(maxsize=1)
def _families() -> tuple[tuple[str, str], ...]:
    """(family, name), the longest first: H20 must not match rows of H200."""
    found = ((named_hardware(name).family, name) for name in hardware_names())
    return tuple(sorted(found, key=lambda pair: -len(pair[0])))


def hardware_of(row: Row) -> Hardware | None:
    """Matches `H100`, `8xH100`, `NVIDIA H100-80GB`, `Ascend910C`; neither `GH100` nor `H1000`."""
    for family, name in _families():
        begin = r"(?<![0-9])" if family[0].isdigit() else r"(?:(?<![A-Za-z0-9])|(?<=[0-9]x))"
        if re.search(rf"{begin}{re.escape(family)}(?![0-9])", row.hardware, re.IGNORECASE):
            return named_hardware(name)
    return None


def predict(
    row: Row, model: ModelShape, *, hardware: Mapping[str, Hardware] | None = None, routing: Routing | None = None
) -> Prediction:
    """Tables do not say whether microbatching is used: the better of on and off is taken, as in a tuned system.
    `hardware` replaces descriptions by name.
    """
    found = hardware_of(row)
    if found is None or not row.batch or not row.context or not found.supports(row.precision):
        return Prediction(row, found, None, None, 1)
    found = (hardware or {}).get(found.name, found)
    best: Prediction | None = None
    for microbatches in (1, 2) if model.moe is not None else (1,):
        tried = _predict(row, found, model, microbatches, routing)
        if best is None or (tried.predicted or 0.0) > (best.predicted or 0.0):
            best = tried
    assert best is not None
    return best


def _predict(row: Row, hardware: Hardware, model: ModelShape, microbatches: int, routing: Routing | None) -> Prediction:
    assert row.batch is not None and row.context is not None
    accept = model.mtp_accept if row.accept is None else row.accept
    setup = Setup(
        ep=row.ep or row.chips * hardware.ranks, precision=row.precision, microbatches=microbatches, drafts=row.drafts,
        accept=accept, balance=row.balance,
    )  # fmt: skip
    per_rank = row.batch / hardware.ranks
    if row.phase == "decode":
        decode = DecodeModel(hardware, model, setup, routing)
        step = decode.step(per_rank, row.context)
        rate = row.batch * setup.tokens_per_step / step.seconds
    else:
        prefill = PrefillModel(hardware, model, setup, routing)
        step = prefill.step(per_rank, row.context)
        rate = row.batch / step.seconds
    return Prediction(row, hardware, rate, step, microbatches)
