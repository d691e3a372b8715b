"""A CSV of published results, as `validation_points.csv` has them. Takes text, opens nothing but what is bundled."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from tripool.planner.cost.setup import Balance
from tripool.planner.errors import BadRows

COLUMNS = (
    "system", "hardware", "n_devices", "phase", "precision", "ep", "batch_per_device", "context_len", "mtp",
    "tok_s_per_device", "source",
)  # fmt: skip
_LENGTHS = re.compile(r"prompt\s*(\d+)\s*/\s*out\s*(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"[~≈]?\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([km](?![a-z]))?", re.IGNORECASE)
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6}
_MOST = 1e9
"""No device has more of anything that a row counts."""
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
    """Mean length of what is attended to: prompt plus half the answer, where the answer's length is told."""
    drafts: int
    accept: float | None
    """None: MTP is on and the rate is not told."""
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


def _row(cells: Mapping[str, str | None], where: str) -> Row:
    told = {name: (value or "").strip() for name, value in cells.items() if isinstance(name, str)}
    phase = told["phase"].lower()
    if phase not in ("prefill", "decode"):
        raise BadRows(f"{where}: phase is {told['phase']!r}", hint="prefill or decode")
    published = _number(told, "tok_s_per_device", where)
    if not published:
        raise BadRows(f"{where}: tok_s_per_device is missing", hint="it is what predictions are compared by")
    words = f"{told['system']} {told['source']}"
    context = _number(told, "context_len", where)
    lengths = _LENGTHS.search(told["system"])
    if lengths and phase == "decode":
        context = int(lengths[1]) + int(lengths[2]) / 2
    drafts, accept = _drafts(told["mtp"])
    return Row(
        system=told["system"], hardware=told["hardware"], phase=phase,
        chips=_whole(told, "n_devices", where) or 1,
        precision=_precision(told["precision"]), ep=_whole(told, "ep", where), context=context, drafts=drafts,
        batch=_number(told, "batch_per_device", where), accept=accept, published=published, source=told["source"],
        balance="perfect" if _EVEN.search(words) else "none" if _UNEVEN.search(words) else "balanced",
    )  # fmt: skip


def _drafts(told: str) -> tuple[int, float | None]:
    """`0`, empty or `no`: off. A rate such as 0.70 or `simulated 0.6`; `yes`: on, at a rate that is not told."""
    if told.lower() in ("", "0", "no", "off", "none"):
        return 0, 0.0
    rate = _RATE.search(told)
    return 1, float(rate[1]) if rate else None


def _number(told: Mapping[str, str], column: str, where: str) -> float | None:
    """The first number of a cell: tables write `~100 (stated)`. Empty, `n/a` or `?`: not known."""
    text = told[column].replace(",", "")
    if not text or text.lower() in ("n/a", "na", "?", "-"):
        return None
    found = _NUMBER.match(text)
    if found is None:
        raise BadRows(f"{where}: {column} is {told[column]!r}", hint="a number, or empty where it is not known")
    value = float(found[1]) * _TIMES[(found[2] or "").lower()]
    if value > _MOST:
        raise BadRows(f"{where}: {column} is {told[column]!r}", hint=f"at most {_MOST:g}")
    return value


def _whole(told: Mapping[str, str], column: str, where: str) -> int | None:
    """None where it is not known; 0 says as little."""
    value = _number(told, column, where)
    if value is not None and value != int(value):
        raise BadRows(f"{where}: {column} is {told[column]!r}", hint="a whole number, or empty where it is not known")
    return int(value) if value else None


def _precision(told: str) -> str:
    """The lowest that is named: weights and matrix products go by it."""
    known = {"fp4": "fp4", "w8a8": "int8", "int8": "int8", "fp8": "fp8", "bf16": "bf16", "fp16": "bf16"}
    return next((name for word, name in known.items() if word in told.lower()), told.lower() or "bf16")
