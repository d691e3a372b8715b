"""Reads a table of published results as it is written: what a row does not state stays unknown.

A table is a CSV in the format of `validation_points.csv`, with further columns if it has them. Conditions are also read
from the words of a row's name and source. Opens no files.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from tripool.planner.cost.setup import Balance
from tripool.planner.errors import BadRows

COLUMNS = (
    "system", "hardware", "n_devices", "phase", "precision", "ep", "batch_per_device", "context_len", "mtp",
    "tok_s_per_device", "source",
)  # fmt: skip
FURTHER_COLUMNS = ("model", "tp", "kv_precision", "attention_precision", "microbatches", "balance", "output_len")
_MOST = 1e9
"""Upper bound of any number in a row."""
_UNKNOWN = ("", "n/a", "na", "?", "-", "unknown", "not stated")
_NUMBER = re.compile(r"[~≈]?\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([km](?![a-z]))?", re.IGNORECASE)
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6}
_PER_DIE = re.compile(r"(?:per|/|each|a)[\s-]*die\b|\bdies\b", re.IGNORECASE)
_BATCH_PER_DIE = re.compile(r"batch(?: size)?(?: is| of \d+)?[ -]per[ -]die|per[ -]die batch", re.IGNORECASE)
_LENGTHS = re.compile(r"prompt\s*(\d+)\s*/\s*out\s*(\d+)", re.IGNORECASE)
_EVEN = re.compile(r"\bperfect|balanced routing|ideal(?:ly)? balanc|forced balanc|uniform routing", re.IGNORECASE)
_UNEVEN = re.compile(r"(?:\bno|without|w/o|disabl\w+) (?:eplb|load balanc|balanc)|eplb (?:off|disabled)", re.IGNORECASE)
_OVERLAP = r"(?:tbo|dbo|micro-?batch\w*|(?:two|dual)[ -]?(?:micro-?)?batch(?:es)?(?:[ -]overlap)?)"
_ONE_BATCH = re.compile(
    rf"(?:\bno|without|w/o|disabl\w+)[ -]{_OVERLAP}|{_OVERLAP} (?:off|disabled)|single[ -]batch|one microbatch|\bsbo\b",
    re.IGNORECASE,
)
_TWO_BATCHES = re.compile(rf"\b{_OVERLAP}", re.IGNORECASE)
_EIGHT = r"(?:fp8|int8|e4m3|e5m2|8[ -]?bit|w8a8)"
_EIGHT_KV = re.compile(rf"{_EIGHT}[ -]?(?:kv|cache)|kv(?:[ -]?cache)?[ :=(in-]*{_EIGHT}", re.IGNORECASE)
_EIGHT_ATTENTION = re.compile(
    rf"{_EIGHT}[ -]?(?:mla|attention|attn|flashmla|fmha)|(?:mla|attention|attn|flashmla)[ :=(in-]*{_EIGHT}",
    re.IGNORECASE,
)
_COLOCATED = re.compile(r"\bco-?locat|\baggregated\b|prompts computed between", re.IGNORECASE)
_TWO_POOLS = re.compile(r"\b(\d+)A(\d+)[FE]\b")
_TP = re.compile(r"\bTP[ =-]?(\d+)\b", re.IGNORECASE)
_PRECISIONS = {
    "nvfp4": "fp4", "mxfp4": "fp4", "fp4": "fp4", "w8a8": "int8", "int8": "int8", "mxfp8": "fp8", "fp8": "fp8",
    "bf16": "bf16", "fp16": "bf16", "bfloat16": "bf16",
}  # fmt: skip
"""The lowest first: experts are in the lowest precision that a row names."""
_MODELS = re.compile(
    r"deepseek[ -]?(?:coder[ -]?)?(?:r\d|v\d(?:\.\d)?)(?:[ -]?(?:lite|exp|speciale))?|kimi[ -]?k\d(?:\.\d)?"
    r"|longcat[ -]?\w*|qwen[ -]?\d(?:\.\d)?(?:[ -]?next)?(?:[ -]?\d+b)?(?:[ -]?a\d+b)?|gpt-?oss(?:[ -]?\d+b)?"
    r"|glm[ -]?\d(?:\.\d)?|llama[ -]?\d(?:\.\d)?(?:[ -]?\d+b)?|minimax[ -]?\w+|mixtral\S*|ernie\S*|hunyuan\S*|pangu\S*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    system: str
    hardware: str
    chips: int | None
    phase: str
    model: str | None
    """As the row names it; empty: the table has no column for it and the row names none; None: not stated."""
    precision: str | None
    """Of the experts; None if not stated or not known."""
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
    source: str


def parse_rows(text: str, origin: str) -> list[Row]:
    reader = csv.DictReader(text.removeprefix("\ufeff").splitlines())
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
    missing = [column for column in COLUMNS if column not in reader.fieldnames]
    if missing:
        hint = f"a header with {', '.join(COLUMNS)}; further columns that are read: {', '.join(FURTHER_COLUMNS)}"
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
    words = f"{cells['system']} | {cells['source']}"
    conditions = f"{words} | {cells['precision']} | {cells.get('balance', '')} |"
    drafts, accept = read_drafts(cells["mtp"])
    prompt, answer = _lengths(cells, where)
    pools = _TWO_POOLS.search(cells["system"])
    attention = bool(_EIGHT_ATTENTION.search(f"{conditions} attention={cells.get('attention_precision', '')}"))
    kv = bool(_EIGHT_KV.search(f"{conditions} kv={cells.get('kv_precision', '')}"))
    return Row(
        system=cells["system"], hardware=cells["hardware"], phase=phase, source=cells["source"],
        chips=_whole(cells, "n_devices", where), model=_model(cells), precision=read_precision(cells["precision"]),
        ep=_whole(cells, "ep", where), tp=_tp(cells, where), prompt=prompt, answer=answer, drafts=drafts,
        context=prompt + answer / 2 if prompt and answer and phase == "decode" else prompt,
        colocated=phase == "decode" and bool(_COLOCATED.search(words)), expert_ranks=int(pools[2]) if pools else 0,
        accept=accept, simulated="simulat" in cells["mtp"].lower(), batch=_number(cells, "batch_per_device", where),
        batch_per_die=bool(_PER_DIE.search(cells["batch_per_device"]) or _BATCH_PER_DIE.search(words)),
        balance="perfect" if _EVEN.search(conditions) else "none" if _UNEVEN.search(conditions) else "balanced",
        microbatches=_microbatches(cells, words, where), eight_bit_attention=attention, eight_bit_kv=kv or attention,
        published=_number(cells, "tok_s_per_device", where) or None,
        published_per_die=bool(_PER_DIE.search(cells["tok_s_per_device"])),
    )  # fmt: skip


def _model(cells: Mapping[str, str]) -> str | None:
    """By its column; otherwise as the row's name, then its source, says."""
    if cells.get("model", "").lower() not in _UNKNOWN:
        return cells["model"]
    named = _MODELS.search(cells["system"]) or _MODELS.search(cells["source"])
    if named:
        return named[0]
    return None if "model" in cells else ""


def _lengths(cells: Mapping[str, str], where: str) -> tuple[float | None, float | None]:
    """Tokens of a prompt and of its answer, as far as they are stated."""
    lengths = _LENGTHS.search(cells["system"])
    if lengths and cells["phase"].lower() == "decode":
        return float(lengths[1]), float(lengths[2])
    answer = _number(cells, "output_len", where) if "output_len" in cells else None
    return _number(cells, "context_len", where), answer


def _tp(cells: Mapping[str, str], where: str) -> int | None:
    if cells.get("tp"):
        return _whole(cells, "tp", where)
    named = _TP.search(cells["system"])
    return int(named[1]) if named and int(named[1]) else None


def _microbatches(cells: Mapping[str, str], words: str, where: str) -> int | None:
    if cells.get("microbatches"):
        stated = _whole(cells, "microbatches", where)
        return min(2, stated) if stated else None
    if _ONE_BATCH.search(words):
        return 1
    return 2 if _TWO_BATCHES.search(words) else None


def read_precision(cell: str) -> str | None:
    """The lowest precision that is named, which is that of the experts."""
    return next((name for word, name in _PRECISIONS.items() if word in cell.lower()), None)


_OFF = re.compile(
    r"(?:0|no|off|none|false|disabled|without)\b(?!\.\d)(?!.*accept).*|mtp[ :=-]*(?:off|disabled|none|0)\b.*",
    re.IGNORECASE,
)
_NOT_STATED = re.compile(
    r"(?:not|none|un)[ -]?(?:stated|given|disclosed|known|clear|specified|reported|published).*", re.IGNORECASE
)
_SPAN = r"(\d+(?:\.\d+)?)(?:\s*(?:-|–|to|\.\.+)\s*(\d+(?:\.\d+)?))?"
_LENGTH = re.compile(
    rf"accept\w*(?:[ _-]*len\w*)?\D{{0,6}}{_SPAN}|{_SPAN}\s*(?:tokens? )?(?:accept\w*[ _-]*len|per step|a step)",
    re.IGNORECASE,
)
_SHARE = re.compile(r"(?<![\d.])(0?\.\d+|1\.0+(?!\d))|(\d+(?:\.\d+)?)\s*%")
_DRAFT_TOKENS = re.compile(r"draft[ _-]?tokens?(?:[ _-]num)?\s*[=:]\s*(\d+)", re.IGNORECASE)
_COUNT = re.compile(
    r"(\d+)[ -]*(?:mtp|draft|speculative|steps?\b|tokens?\b)|(?:mtp|drafts?|steps?|nextn)[ =:-]*(\d+)(?![\d.%])",
    re.IGNORECASE,
)


def read_drafts(cell: str) -> tuple[int | None, float | None]:
    """(drafts, share of them accepted). Empty: not stated, (None, None). `yes`: one, at an unpublished rate. An
    accepted length counts the step's own token: 2.4 with three drafts is a share of 1.4 / 3.
    """
    text = cell.strip()
    if text.lower() in _UNKNOWN or _NOT_STATED.fullmatch(text):
        return None, None
    if _OFF.fullmatch(text):
        return 0, 0.0
    length, share = _length(text), _SHARE.search(text)
    drafts = _draft_count(text)
    if length is None and re.fullmatch(r"[1-9]\d*\.\d+", text):
        length = float(text)  # a bare number above one is tokens per step
    if length is not None:
        drafts = max(drafts or 1, ceil(length - 1.0))
        return drafts, min(1.0, (length - 1.0) / drafts)
    if share is not None:
        rate = float(share[1]) if share[1] else float(share[2]) / 100.0
        return drafts or 1, rate if rate <= 1.0 else None
    return drafts or 1, None


def _length(text: str) -> float | None:
    found = _LENGTH.search(text)
    if found is None:
        return None
    ends = [float(end) for end in found.groups() if end]
    mean = sum(ends) / len(ends)
    return mean if 1.0 <= mean <= 16.0 else None


def _draft_count(text: str) -> int | None:
    """SGLang's draft tokens include the step's own."""
    own = _DRAFT_TOKENS.search(text)
    if own:
        return max(1, int(own[1]) - 1)
    found = _COUNT.search(_LENGTH.sub(" ", text))
    count = int(found[1] or found[2]) if found else 0
    return count if 1 <= count <= 16 else None


def _number(cells: Mapping[str, str], column: str, where: str) -> float | None:
    """The first number of a cell: tables write `~100 (stated)`. Empty, `n/a` or `?`: not known."""
    text = cells[column].replace(",", "")
    if text.lower() in _UNKNOWN:
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
