"""Reads a table of published results as it is written: what a row does not state stays unknown, what it states in a way
that cannot be read is said, and neither refuses the other rows.

A table is a CSV in the format of `validation_points.csv`, in any order of columns, with further columns if it has them.
Conditions are also read from the words of a row's name, source and notes. Opens no files.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tripool.planner.cost.setup import Balance
from tripool.planner.errors import BadRows
from tripool.planner.rows.cells import is_unknown, read_count, read_precision, read_quantity
from tripool.planner.rows.drafts import read_drafts
from tripool.planner.rows.names import find_model

COLUMNS = (
    "system", "hardware", "n_devices", "phase", "precision", "ep", "batch_per_device", "context_len", "mtp",
    "tok_s_per_device", "source",
)  # fmt: skip
NEEDED = ("hardware", "phase", "tok_s_per_device")
"""Without these a table says nothing that could be compared."""
FURTHER_COLUMNS = ("model", "tp", "kv_precision", "attention_precision", "microbatches", "balance", "output_len")
_NOTES = (
    "note", "notes", "comment", "comments", "condition", "conditions", "remark", "remarks", "details", "setup",
    "config", "parallelism",
)  # fmt: skip
_SOFTWARE = ("engine", "framework", "software", "backend", "version")
_LENGTH = r"(\d+(?:\.\d+)?)\s*(k?)(?:\s*tok\w*)?"
_LENGTHS = (
    re.compile(
        rf"(?:prompts?|input|isl|in)[ =:_-]*{_LENGTH}[ ,;/|+]*(?:out(?:put)?|osl|answers?)[ =:_-]*{_LENGTH}", re.I
    ),
    re.compile(rf"\b{_LENGTH} ?(?:in|input)\b[ ,;/|+]*{_LENGTH} ?(?:out|output)\b", re.IGNORECASE),
    re.compile(r"(?<![\w.])(\d+)(k)[ /]*(\d+)(k)(?![\w.])", re.IGNORECASE),
)
"""Lengths of a prompt and its answer, as `prompt 1024/out 1024`, `2000 in / 100 out` and `1k/8k`."""
_LINE_ENDS = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")
_EVEN = re.compile(
    r"\bperfect|balanced routing|ideal(?:ly)? balanc|forced? balanc|uniform (?:random )?routing", re.IGNORECASE
)
_UNEVEN = re.compile(r"(?:\bno|without|w/o|disabl\w+) (?:eplb|load balanc|balanc)|eplb[ :=]*(?:off|disabled)", re.I)
_OVERLAP = r"(?:tbo|dbo|micro-?batch\w*|(?:two|dual)[ -]?(?:micro-?)?batch(?:es)?(?:[ -]overlap)?)"
_ONE_BATCH = re.compile(
    rf"(?:\bno|without|w/o|disabl\w+)[ -]{_OVERLAP}|{_OVERLAP}[ :=]*(?:off|disabled)|single[ -]batch|one microbatch|"
    r"\bsbo\b",
    re.IGNORECASE,
)
_TWO_BATCHES = re.compile(rf"\b{_OVERLAP}", re.IGNORECASE)
_EIGHT = r"(?:fp8|int8|e4m3|e5m2|8[ -]?bit|w8a8)"
_EIGHT_KV = re.compile(rf"{_EIGHT}[ -]?(?:kv|cache)|kv(?:[ -]?cache)?[ :=(in-]*{_EIGHT}", re.IGNORECASE)
_EIGHT_ATTENTION = re.compile(
    rf"{_EIGHT}[ -]?(?:mla|attention|attn|flashmla|fmha)|(?:mla|attention|attn|flashmla)[ :=(in-]*{_EIGHT}",
    re.IGNORECASE,
)
_COLOCATED = re.compile(
    r"\bco-?locat|\baggregated\b|prompts computed between|\bnon?[- ]disagg|without disagg|disagg\w*[ :=]*(?:off|false)",
    re.IGNORECASE,
)
_TWO_POOLS = re.compile(r"\b(\d+)A(\d+)[FE]\b")
_TP = re.compile(r"\bTP[ =-]?(\d+)(?![\d.])", re.IGNORECASE)
_EP = re.compile(r"\b(?:EP|TEP|DEP)[ =-]?(\d+)(?![\d.])", re.IGNORECASE)
_TEP = re.compile(r"\bTEP[ =-]?(\d+)(?![\d.])", re.IGNORECASE)
_DP = re.compile(r"\b(?:DP|ADP)[ =-]?(\d+)(?![\d.])", re.IGNORECASE)
_ATTENTION_DP = re.compile(
    r"\bDEP[ =-]?\d|\bADP\b|\b(?:dp|data[- ]parallel)[ _-]?att|att\w*[ _-](?:dp|data[- ]parallel)\b|\bDPA\b",
    re.IGNORECASE,
)
_STAGES = re.compile(r"\bPP[ =-]?([2-9]|\d\d+)\b|pipeline[- ]parallel", re.IGNORECASE)
_CONTEXT_PARALLEL = re.compile(r"\bD?CP[ =-]?([2-9]|\d\d+)\b|(?:context|sequence|helix)[- ]parallel", re.IGNORECASE)
_CACHED = re.compile(
    r"(?:prefix|prompt|kv)[ -]?cach\w* (?:hits?|reuse)|cache[ -]hits?|\breuse\b|hit[ -]rate", re.IGNORECASE
)
_NOT_CACHED = re.compile(
    r"(?:excl\w*\.?|without|no|w/o|minus|less)(?: the)? (?:prefix |kv |prompt )?(?:cache|hits?|reuse)|"
    r"(?:hits?|reuse|cache)[ :=]*(?:0 ?%|off|none|disabled|excluded)",
    re.IGNORECASE,
)
_FEWEST_TOKENS = 256
"""A prefill batch of fewer tokens on a device is a number of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    system: str
    software: str
    """Words that may name the software and its version."""
    hardware: str
    chips: int | None
    phase: str
    model: str | None
    """As the row names it; empty: the table has no column for it and the row names none; None: not stated."""
    precision: str | None
    """Of the experts; None if not stated or not known."""
    rest: str | None
    """Of all else, where a row of 4-bit experts says; None: as published checkpoints have it."""
    ep: int | None
    tp: int | None
    batch: float | None
    """Requests in decode, prompt tokens in prefill; per chip, or per die if `batch_per_die`."""
    batch_per_die: bool
    context: float | None
    """Mean context length: prompt plus half the answer, if the answer's length is published."""
    prompt: float | None
    answer: float | None
    colocated: bool
    """The same ranks compute prompts between the steps, and the rate of decoding counts that."""
    expert_ranks: int
    """Of `ep`, as in 48A16F: ranks with experts alone; 0: every rank has attention and experts."""
    drafts: int | None
    """None if the row does not say whether MTP is used."""
    accept: float | None
    """Share of drafts accepted; None: MTP is on at an unpublished rate."""
    simulated: bool
    """Drafts are counted, and not made."""
    balance: Balance
    microbatches: int | None
    """None: not stated."""
    eight_bit_kv: bool
    eight_bit_attention: bool
    published: float | None
    """Tokens per second and chip, or die if `published_per_die`; None: no rate."""
    published_per_die: bool
    unpublished: str
    """What its rate says instead of a number per device."""
    source: str
    unread: str = ""
    """What the row states and no prediction can count: a cell that is no number, a condition that is not modelled."""


def parse_rows(text: str, origin: str) -> list[Row]:
    """Every row of a table, in its order."""
    plain = text.removeprefix("\ufeff")
    head = next((line for line in plain.splitlines() if line.strip()), "")
    delimiter = max(",;\t", key=head.count)
    reader = csv.DictReader(_LINE_ENDS.split(plain.lstrip("\r\n ")), delimiter=delimiter)
    reader.fieldnames = [_column(name) for name in reader.fieldnames or ()]
    missing = [column for column in NEEDED if column not in reader.fieldnames]
    if missing:
        hint = f"a header with {', '.join(COLUMNS)}; further columns that are read: {', '.join(FURTHER_COLUMNS)}"
        raise BadRows(f"{origin} has no column {', '.join(missing)}", hint=hint)
    rows = [_row(cells) for cells in _lines(reader, reader.fieldnames)]
    if not rows:
        raise BadRows(f"{origin} holds no rows", hint="one published result per line")
    return rows


def _column(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _lines(reader: csv.DictReader[str], header: Sequence[str]) -> Iterator[dict[str, str]]:
    """Without blank lines, comments and headers that are repeated; a column that the table lacks is empty."""
    try:
        for line in reader:
            found = {name: (value or "").strip() for name, value in line.items() if isinstance(name, str)}
            first = found[header[0]]
            if not any(found.values()) or first.startswith("#") or [*map(_column, found.values())] == [*header]:
                continue
            yield dict.fromkeys(COLUMNS, "") | found
    except csv.Error as error:
        raise BadRows(f"line {reader.line_num} is not CSV: {error}", hint="is it a table saved as CSV?") from None


class _Unread:
    """Collects what a row states and cannot be read."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self.cells, self.reasons = cells, list[str]()

    def add(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def wrong(self, column: str, what: str) -> None:
        if what:
            self.add(f"{column} is {self.cells[column]!r}: {what}")

    def number(self, column: str) -> float | None:
        quantity = read_quantity(self.cells.get(column, ""))
        self.wrong(column, quantity.wrong)
        return quantity.value or None

    def count(self, column: str) -> int | None:
        value, what = read_count(self.cells.get(column, ""))
        self.wrong(column, what)
        return value

    def per_chip(self, column: str, chips: int | None) -> tuple[float | None, bool, bool]:
        """(value, whether it is of a die, whether it is of prompts)."""
        quantity = read_quantity(self.cells[column])
        self.wrong(column, quantity.wrong)
        value = quantity.value
        if quantity.of == "all" and value:
            if not chips:
                self.wrong(column, "of all devices, whose number is not stated")
                return None, False, False
            value /= chips
        return value or None, quantity.of == "die", quantity.prompts


def _row(cells: Mapping[str, str]) -> Row:
    unread = _Unread(cells)
    phase = _phase(cells, unread)
    notes = " | ".join(cells[name] for name in _NOTES if cells.get(name))
    words = f"{cells['system']} | {cells['source']} | {notes}"
    conditions = f"{words} | {cells['precision']} | {cells.get('balance', '')} |"
    drafts, accept = read_drafts(cells["mtp"])
    prompt, answer = _lengths(cells, phase, unread)
    pools = _TWO_POOLS.search(cells["system"])
    attention = bool(_EIGHT_ATTENTION.search(f"{conditions} attention={cells.get('attention_precision', '')}"))
    kv = bool(_EIGHT_KV.search(f"{conditions} kv={cells.get('kv_precision', '')}"))
    chips = unread.count("n_devices")
    ep, tp = _parallel(cells, notes, chips, unread)
    batch, batch_per_die = _batch(phase, prompt, chips, unread)
    rates = _Unread(cells)
    rate, rate_per_die, _ = rates.per_chip("tok_s_per_device", chips)
    _not_modelled(phase, cells, words, unread)
    return Row(
        system=cells["system"], phase=phase, source=cells["source"],
        hardware=cells["system"] if is_unknown(cells["hardware"]) else cells["hardware"],
        software=" ".join([cells["system"], *(cells[name] for name in _SOFTWARE if cells.get(name)), notes]).strip(),
        chips=chips, model=_model(cells), precision=_precision(cells), rest=_rest(cells), ep=ep, tp=tp, prompt=prompt,
        answer=answer,
        drafts=drafts, context=prompt + answer / 2 if prompt and answer and phase == "decode" else prompt,
        colocated=phase == "decode" and bool(_COLOCATED.search(words)), expert_ranks=int(pools[2]) if pools else 0,
        accept=accept, simulated="simulat" in cells["mtp"].lower(), batch=batch,
        batch_per_die=batch_per_die or bool(_BATCH_PER_DIE.search(words)),
        balance="perfect" if _EVEN.search(conditions) else "none" if _UNEVEN.search(conditions) else "balanced",
        microbatches=_microbatches(cells, words, unread), eight_bit_attention=attention, eight_bit_kv=kv or attention,
        published=rate, published_per_die=rate_per_die, unpublished="; ".join(rates.reasons),
        unread="; ".join(unread.reasons),
    )  # fmt: skip


_PHASES = {"prefill": r"prefill\w*|prompt\w*|context|ctx", "decode": r"decod\w*|generat\w*|gen"}
_BATCH_PER_DIE = re.compile(r"batch(?: size)?(?: is| of \d+)?[ -]per[ -]die|per[ -]die batch", re.IGNORECASE)


def _phase(cells: Mapping[str, str], unread: _Unread) -> str:
    cell = cells["phase"].lower()
    named = [phase for phase, words in _PHASES.items() if re.search(rf"\b(?:{words})\b", cell)]
    if len(named) == 1:
        return named[0]
    unread.wrong("phase", "neither prefill nor decode")
    return cell


def _model(cells: Mapping[str, str]) -> str | None:
    """By its column; otherwise as the row's name, then its source, says."""
    if not is_unknown(cells.get("model", "")):
        return cells["model"]
    named = find_model(cells["system"]) or find_model(cells["source"])
    if named:
        return named
    return None if "model" in cells else ""


def _precision(cells: Mapping[str, str]) -> str | None:
    """By its column; where that is empty, as the model's or the row's name says."""
    if not is_unknown(cells["precision"]):
        return read_precision(cells["precision"])
    return read_precision(cells.get("model", "")) or read_precision(cells["system"])


_REST = re.compile(r"(?:nvfp4|mxfp4|fp4)[\w ]*(?:\+|and|,|/|&) *(fp8|bf16)(?! *(?:kv|cache))", re.IGNORECASE)


def _rest(cells: Mapping[str, str]) -> str | None:
    """As in `NVFP4 experts + FP8`; attention in 8 bits has its projections in as many."""
    named = _REST.search(cells["precision"])
    return named[1].lower() if named else None


def _lengths(cells: Mapping[str, str], phase: str, unread: _Unread) -> tuple[float | None, float | None]:
    """Tokens of a prompt and of its answer, as far as they are stated."""
    stated = unread.number("context_len")
    if phase == "decode":
        for text in (cells["context_len"], cells["system"]):
            named = next((found for pattern in _LENGTHS if (found := pattern.search(text))), None)
            if named:
                prompt, answer = (float(named[i]) * (1024 if named[i + 1] else 1) for i in (1, 3))
                short = named.re is _LENGTHS[-1] and stated  # `1k/8k` alone may name something else
                if not short or _near(short, prompt, prompt + answer / 2):
                    return prompt or None, answer or None
    return stated, unread.number("output_len") if "output_len" in cells else None


def _near(stated: float, *lengths: float) -> bool:
    """`1k` may be 1,000 or 1,024."""
    return any(abs(stated / length - 1.0) < 0.03 for length in lengths if length)


def _parallel(
    cells: Mapping[str, str], notes: str, chips: int | None, unread: _Unread
) -> tuple[int | None, int | None]:
    """(EP degree, ranks that share one copy of attention). `DP` divides the ranks into such groups."""
    words = f"{cells['system']} | {cells['ep']} | {cells.get('tp', '')} | {notes}"
    ep = _degree(cells["ep"], _EP, "ep", unread)
    ep = _named(_EP, cells["system"]) if ep is None and not cells["ep"] and _named(_TEP, words) is None else ep
    tp = _degree(cells["tp"], _TP, "tp", unread) if cells.get("tp") else _named(_TP, words)
    if both := _named(_TEP, words):
        ep = tp = both
    ranks = (ep if ep and ep > 1 else None) or chips or tp
    copies = _named(_DP, words)
    if copies and copies > 1 and ranks and ranks % copies == 0:
        return ranks if ep is None or ep == 1 else ep, ranks // copies
    if _ATTENTION_DP.search(words) and not copies:
        return ep if ep and ep > 1 else tp or chips, 1
    if ep == 1 and (tp or chips or 1) > 1:  # experts are split with everything else
        return None, tp or chips
    return ep, tp


def _degree(cell: str, named: re.Pattern[str], column: str, unread: _Unread) -> int | None:
    if found := named.search(cell):
        return int(found[1]) or None
    if re.match(r"\s*(?:T|D|P)P[ =-]?\d", cell, re.IGNORECASE):
        return None
    value, what = read_count(cell)
    unread.wrong(column, what)
    return value


def _named(pattern: re.Pattern[str], words: str) -> int | None:
    found = pattern.search(words)
    return int(found[1]) or None if found else None


def _batch(phase: str, prompt: float | None, chips: int | None, unread: _Unread) -> tuple[float | None, bool]:
    """In prefill a number of prompts counts their tokens."""
    batch, per_die, prompts = unread.per_chip("batch_per_device", chips)
    if phase == "prefill" and batch:
        if prompts and prompt:
            return batch * prompt, per_die
        if batch < _FEWEST_TOKENS:
            unread.wrong("batch_per_device", "a prefill batch is in tokens per device")
            return None, per_die
    return batch, per_die


def _microbatches(cells: Mapping[str, str], words: str, unread: _Unread) -> int | None:
    if cells.get("microbatches"):
        stated = unread.count("microbatches")
        return min(2, stated) if stated else None
    if _ONE_BATCH.search(words):
        return 1
    return 2 if _TWO_BATCHES.search(words) else None


def _not_modelled(phase: str, cells: Mapping[str, str], words: str, unread: _Unread) -> None:
    """Conditions that change a rate and that no prediction counts."""
    if _STAGES.search(f"{words} | {cells['ep']} | {cells.get('tp', '')}") or _more_than_one(cells.get("pp", "")):
        unread.add("pipeline parallelism is not modelled")
    if _CONTEXT_PARALLEL.search(words):
        unread.add("context parallelism is not modelled")
    if phase == "prefill" and _CACHED.search(words) and not _NOT_CACHED.search(words):
        unread.add("prompts partly in a cache: their share is not modelled")


def _more_than_one(cell: str) -> bool:
    value, _ = read_count(cell)
    return bool(value and value > 1)
