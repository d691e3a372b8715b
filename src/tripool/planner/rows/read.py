"""Reads a CSV of published results in the format of `validation_points.csv`. Opens only bundled files."""

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
