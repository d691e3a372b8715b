"""Reads one cell of a table of results: a number with what it counts, a precision, or why it says neither."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MOST = 1e9
"""Upper bound of any number in a row."""
_UNKNOWN = re.compile(
    r"(?:n/?\.?a\.?|\?+|[-–—]+|unknown|nan|null|none|no|tb[acd]|(?:not|un)[ -]?"
    r"(?:stated|given|disclosed|known|specified|reported|published|measured)|varies|variable)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"\s*(?P<bound>[<>≤≥]=?|up to|at least|at most|more than|less than|over|under|below|above)?\s*"
    r"(?:~|≈|about|approx\w*\.?|around|roughly|circa|ca\.?|avg\.?|average|mean)?\s*"
    r"(?:(?:(?:global|total|max(?:imum)?)[ -])?"
    r"(?:batch(?:[ -]?size)?|bs|ep|tp|concurren\w*|conc|total|global|isl)[ =:]*)?"
    r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?)\s*(?P<times>[km](?![a-z]))?",
    re.IGNORECASE,
)
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6}
_THOUSANDS = re.compile(r"(?<=\d)[,\u202f\u00a0 ](?=\d{3}(?!\d))")
_ASIDE = re.compile(r"\([^)]*\d[^)]*\)")
"""Parentheses with a figure of something else: `96 (48 per die)`."""
_RANGE = re.compile(r"\s*(?:-|–|—|to|\.\.+|/)\s*\d", re.IGNORECASE)
_DIE = re.compile(r"(?:per|/|each|a)[\s-]*(?:die|(?:dp[\s-]*)?rank)\b", re.IGNORECASE)
_ALL = re.compile(r"\b(?:global|total|overall|in all|altogether|aggregate|concurren\w*|conc)\b", re.IGNORECASE)
_OTHER = re.compile(
    r"(?:per|/|a|each)\s*(?P<what>node|host|server|machine|rack|instance|worker|replica|user|request|req|stream|second|"
    r"expert|layer)\b",
    re.IGNORECASE,
)
_PROMPTS = re.compile(r"\b(?:prompts?|requests?|reqs?|seq(?:s|uences?)?)\b", re.IGNORECASE)
_BOTH_WAYS = re.compile(r"in(?:put)?\s*(?:\+|and|&)\s*out(?:put)?|incl\w*\.? (?:input|prompt)", re.IGNORECASE)
_COUNTED = re.compile(
    r"\s*(?:nodes?|hosts?|servers?|machines?|racks?|trays?|dies|die|ranks?|x\s*nodes?)\b", re.IGNORECASE
)
_PRODUCT = re.compile(r"\s*(?:nodes?\s*)?[x×*]\s*(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Quantity:
    value: float | None = None
    of: Literal["chip", "die", "all"] = "chip"
    prompts: bool = False
    """Said to be of prompts or requests."""
    wrong: str = ""
    """What the cell says instead of a number per device; empty if it says one or nothing."""


def is_unknown(cell: str) -> bool:
    return _UNKNOWN.fullmatch(cell.strip()) is not None


def read_quantity(cell: str) -> Quantity:
    """The first number of a cell: tables write `~100 (stated)`. Bounds and ranges are no measurements."""
    if is_unknown(cell):
        return Quantity()
    text = _ASIDE.sub(" ", _THOUSANDS.sub("", cell))
    found = _NUMBER.match(text)
    if found is None:
        return Quantity(wrong="not a number")
    rest = text[found.end() :]
    if found["bound"]:
        return Quantity(wrong="a bound")
    if _RANGE.match(rest):
        return Quantity(wrong="a range")
    if (other := _OTHER.search(rest)) and other["what"].lower() != "second":
        return Quantity(wrong=f"per {other['what'].lower()}, not per device")
    if _BOTH_WAYS.search(rest):
        return Quantity(wrong="of prompts and answers together")
    value = float(found["number"]) * _TIMES[(found["times"] or "").lower()]
    if value > MOST:
        return Quantity(wrong=f"more than {MOST:g}")
    of: Literal["chip", "die", "all"] = "die" if _DIE.search(rest) else "all" if _ALL.search(text) else "chip"
    return Quantity(value, of, bool(_PROMPTS.search(rest)))


def read_count(cell: str) -> tuple[int | None, str]:
    """(devices, what is wrong). Nodes, racks and dies are not devices: `12 nodes` says nothing, `2 x 8` says 16."""
    quantity = read_quantity(cell)
    if quantity.value is None:
        return None, quantity.wrong
    text = _ASIDE.sub(" ", _THOUSANDS.sub("", cell))
    found = _NUMBER.match(text)
    assert found is not None
    rest = text[found.end() :]
    value = quantity.value
    if times := _PRODUCT.match(rest):
        value *= int(times[1])
    elif _COUNTED.match(rest):
        return None, ""
    return (None, "not a whole number") if value != int(value) else (int(value) or None, "")


_WORDS = {
    "w4a8": ("w4a8",), "mxfp4": ("mxfp4",), "fp4": ("nvfp4", "fp4"),
    "int4": ("int4", "w4a16", "4-bit", "4 bit", "awq", "gptq"),
    "fp8": ("mxfp8", "fp8", "e4m3"), "int8": ("int8",), "w8a8": ("w8a8",),
    "bf16": ("bf16", "fp16", "bfloat16", "float16"),
}  # fmt: skip
"""The lowest first: experts are in the lowest precision that a cell names."""
_NAMED = r"(?:nvfp4|mxfp4|fp4|int4|mxfp8|fp8|int8|w8a8|e4m3|e5m2|bf16|fp16|bfloat16|[48][ -]?bit)(?:_\w+)?"
_BESIDE = re.compile(
    rf"{_NAMED}[ -]*(?:kv|cache|mla|attention|attn|flashmla|fmha)\b(?:[ -]?cache)?"
    rf"|\b(?:kv|cache|mla|attention|attn)(?:[ -]?cache)?(?: is| in)?[ :=(-]*{_NAMED}",
    re.IGNORECASE,
)
"""Precision of the cache or of attention, which is not that of weights."""


def read_precision(cell: str) -> str | None:
    """Of the experts' weights; `w8a8`: 8 bits of whatever kind the hardware has."""
    text = _BESIDE.sub(" ", cell).lower()
    return next((name for name, words in _WORDS.items() if any(word in text for word in words)), None)
