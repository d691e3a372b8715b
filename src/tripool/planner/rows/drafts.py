"""Reads what a row says about multi-token prediction: how many drafts, and how many of them are accepted."""

from __future__ import annotations

import re
from math import ceil

_NOTHING = re.compile(r"(?:n/?\.?a\.?|\?+|[-–—]+|unknown|nan|null|tb[acd])?", re.IGNORECASE)
_NOT_STATED = re.compile(
    r"(?:mtp |drafts? )?(?:not|none|un)[ -]?(?:stated|given|disclosed|known|clear|specified|reported|published).*",
    re.IGNORECASE,
)
_OFF = re.compile(
    r"(?:0|no|n|off|none|false|disabled|without|w/o|unused|baseline)\b(?!\.\d)(?!.*accept).*"
    r"|(?:w/o|✗|❌).*"
    r"|(?:mtp|drafts?|draft tokens?|spec\w*(?: dec\w*)?|eagle\d?|nextn)"
    r"[ :=-]*(?:is |are |was )?(?:off|disabled|none|no|not (?:used|enabled|on)|unused|false|0)\b.*"
    r"|not (?:used|enabled|on)\b.*",
    re.IGNORECASE,
)
_SPAN = r"(\d+(?:\.\d+)?)(?:\s*(?:-|–|to|\.\.+)\s*(\d+(?:\.\d+)?))?"
_LENGTH = re.compile(
    rf"(?:accept\w*(?:[ _-]*len\w*)?|\bAL\b)\D{{0,6}}{_SPAN}(?![\d.]*\s*%)"
    rf"|{_SPAN}\s*(?:tokens? )?(?:accept\w*[ _-]*len|per step|a step)",
    re.IGNORECASE,
)
_SHARE = re.compile(r"(?<![\d.])(0?\.\d+|1\.0+(?!\d))|(\d+(?:\.\d+)?)\s*%")
_DRAFT_TOKENS = re.compile(r"draft[ _-]?tokens?(?:[ _-]num)?\s*[=:]\s*(\d+)", re.IGNORECASE)
_COUNT = re.compile(
    r"(\d+)[ -]*(?:mtp|draft|speculative|steps?\b|tokens?\b)|(?:mtp|drafts?|steps?|nextn|k)[ =:-]*(\d+)(?![\d.%])",
    re.IGNORECASE,
)
_MOST = 16


def read_drafts(cell: str) -> tuple[int | None, float | None]:
    """(drafts, share of them accepted). Empty: not stated, (None, None). `yes`: one, at an unpublished rate. An
    accepted length counts the step's own token: 2.4 with three drafts is a share of 1.4 / 3.
    """
    text = cell.strip()
    if _NOTHING.fullmatch(text) or _NOT_STATED.fullmatch(text):
        return None, None
    if _OFF.fullmatch(text):
        return 0, 0.0
    if re.fullmatch(r"\d+", text) and 1 <= int(text) <= _MOST:
        return int(text), None
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
    return mean if 1.0 <= mean <= _MOST else None


def _draft_count(text: str) -> int | None:
    """SGLang's draft tokens include the step's own."""
    own = _DRAFT_TOKENS.search(text)
    if own:
        return max(1, int(own[1]) - 1)
    found = _COUNT.search(_LENGTH.sub(" ", text))
    count = int(found[1] or found[2]) if found else 0
    return count if 1 <= count <= _MOST else None
