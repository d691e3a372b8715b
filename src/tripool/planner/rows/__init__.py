"""Published rows beside predictions: reads a table of results, predicts each row, evaluates the errors.

A table is a CSV in the format of `validation_points.csv`; only bundled files are opened here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from statistics import median
from typing import Literal

from tripool.planner.cost import DecodeModel, PrefillModel, Setup, StepCost
from tripool.planner.cost.setup import Balance, Routing
from tripool.planner.errors import BadRows
from tripool.planner.hardware import Hardware, hardware_names, named_hardware
from tripool.planner.models import ModelShape

COLUMNS = (
    "system", "hardware", "n_devices", "phase", "precision", "ep", "batch_per_device", "context_len", "mtp",
    "tok_s_per_device", "source",
)  # fmt: skip
_LENGTHS = re.compile(r"prompt\s*(\d+)\s*/\s*out\s*(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"[~≈]?\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([km](?![a-z]))?", re.IGNORECASE)
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6}
_MOST = 1e9
"""Upper bound of any number in a row."""
_RATE = re.compile(r"(?<![\d.])(0?\.\d+)")
_EVEN = re.compile(r"perfect|balanced routing", re.IGNORECASE)
_UNEVEN = re.compile(r"(?:\bno|without|w/o) (?:eplb|load balanc|balanc)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    system: str
    hardware: str
    chips: int
    phase: str
    precision: str
    ep: int | None
    batch: float | None
    """Per chip: requests in decode, prompt tokens in prefill. None: a daily average, shown and not compared."""
    context: float | None
    """Mean context length: prompt plus half the answer, if the answer's length is published."""
    drafts: int
    accept: float | None
    """None: MTP is on at an unpublished rate."""
    balance: Balance
    published: float
    source: str

    @property
    def key(self) -> tuple[str, str, float | None]:
        return self.system, self.phase, self.batch


def bundled_rows(name: str = "published") -> list[Row]:
    return parse_rows(files("tripool.planner.rows").joinpath(f"{name}.csv").read_text("utf-8"), f"{name}.csv")


def parse_rows(text: str, origin: str) -> list[Row]:
    reader = csv.DictReader(text.removeprefix("\ufeff").splitlines())
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
    missing = [column for column in COLUMNS if column not in reader.fieldnames]
    if missing:
        hint = f"a header with {', '.join(COLUMNS)}"
        raise BadRows(f"{origin} has no column {', '.join(missing)}", hint=hint)
    rows = [_row(cells, f"{origin} line {number}") for number, cells in enumerate(reader, 2)]
    if not rows:
        raise BadRows(f"{origin} holds no rows", hint="one published result per line")
    return rows


def _row(line: Mapping[str, str | None], where: str) -> Row:
    cells = {name: (value or "").strip() for name, value in line.items() if isinstance(name, str)}
    phase = cells["phase"].lower()
    if phase not in ("prefill", "decode"):
        raise BadRows(f"{where}: phase is {cells['phase']!r}", hint="prefill or decode")
    published = _number(cells, "tok_s_per_device", where)
    if not published:
        raise BadRows(f"{where}: tok_s_per_device is missing", hint="it is what predictions are compared by")
    words = f"{cells['system']} {cells['source']}"
    context = _number(cells, "context_len", where)
    lengths = _LENGTHS.search(cells["system"])
    if lengths and phase == "decode":
        context = int(lengths[1]) + int(lengths[2]) / 2
    drafts, accept = _drafts(cells["mtp"])
    return Row(
        system=cells["system"], hardware=cells["hardware"], phase=phase,
        chips=_whole(cells, "n_devices", where) or 1,
        precision=_precision(cells["precision"]), ep=_whole(cells, "ep", where), context=context, drafts=drafts,
        batch=_number(cells, "batch_per_device", where), accept=accept, published=published, source=cells["source"],
        balance="perfect" if _EVEN.search(words) else "none" if _UNEVEN.search(words) else "balanced",
    )  # fmt: skip


def _drafts(cell: str) -> tuple[int, float | None]:
    """`0`, empty or `no`: off. A rate such as 0.70 or `simulated 0.6`; `yes`: on, at an unpublished rate."""
    if cell.lower() in ("", "0", "no", "off", "none"):
        return 0, 0.0
    rate = _RATE.search(cell)
    return 1, float(rate[1]) if rate else None


def _number(cells: Mapping[str, str], column: str, where: str) -> float | None:
    """The first number of a cell: tables write `~100 (stated)`. Empty, `n/a` or `?`: not known."""
    text = cells[column].replace(",", "")
    if not text or text.lower() in ("n/a", "na", "?", "-"):
        return None
    found = _NUMBER.match(text)
    if found is None:
        raise BadRows(f"{where}: {column} is {cells[column]!r}", hint="a number, or empty where it is not known")
    value = float(found[1]) * _TIMES[(found[2] or "").lower()]
    if value > _MOST:
        raise BadRows(f"{where}: {column} is {cells[column]!r}", hint=f"at most {_MOST:g}")
    return value


def _whole(cells: Mapping[str, str], column: str, where: str) -> int | None:
    """None if unknown or 0."""
    value = _number(cells, column, where)
    if value is not None and value != int(value):
        raise BadRows(f"{where}: {column} is {cells[column]!r}", hint="a whole number, or empty where it is not known")
    return int(value) if value else None


def _precision(cell: str) -> str:
    """The lowest precision named, which is that of weights and matrix products."""
    known = {"fp4": "fp4", "w8a8": "int8", "int8": "int8", "fp8": "fp8", "bf16": "bf16", "fp16": "bf16"}
    return next((name for word, name in known.items() if word in cell.lower()), cell.lower() or "bf16")


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
    role: Literal["calibration", "validation", "shown"]
    """shown: not compared, because no batch, no known hardware or no such precision."""


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

    @property
    def ok(self) -> bool:
        held = ((self.median, self.median_bar), (self.worst, self.worst_bar))
        return all(value is None or bar is None or value <= bar for value, bar in held)


def compare_rows(rows: Iterable[Row], model: ModelShape, *, routing: Routing | None = None) -> list[Compared]:
    predictions = (predict(row, model, routing=routing) for row in rows)
    return [
        Compared(
            each, "shown" if each.error is None else "calibration" if each.row.key in CALIBRATION else "validation"
        )
        for each in predictions
    ]


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
