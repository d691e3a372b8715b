"""Checks a tokenizer's regular expressions: untrusted patterns, run on every text by a backtracking engine.

Refuses what can take exponential time, or memory when compiled: repeats of what itself repeats or has alternatives,
back references, large counts, many repeats in a row. Published tokenizers have none of these. The rest may still take
polynomial time: see docs/security.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tripool.errors import CheckpointCorrupt

MAX_PATTERN_CHARS = 2**13
MAX_REPEATS = 3
"""In a row: a text of n characters may be split among them in n to that power of ways."""
MAX_COUNT = 256
_FEW = 8
_MAX_DEPTH = 20

_OPENING = re.compile(r"\((?:\?(?:[imsxWDSPy\-]*:|[=!>]|<[=!]|[imsxWDSPy\-]+(?=\))|<[A-Za-z_]\w*>|P<[A-Za-z_]\w*>))?")
_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|[^0-9kgK]|0)", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:([*+?])[?+]?|\{(\d*)(,?)(\d*)\}\??)")


@dataclass(slots=True)
class _Group:
    repeats: int = 0
    """Of the current alternative."""
    most_repeats: int = 0
    """Of the alternatives before."""
    choices: bool = False
    """Has alternatives, or an optional part."""
    copies: int = 1
    """Of its atoms, with counts expanded."""

    def end(self) -> int:
        return max(self.repeats, self.most_repeats)


def check_pattern(pattern: str) -> None:
    """Raises CheckpointCorrupt."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _refused(pattern, f"has more than {MAX_PATTERN_CHARS} characters")
    at, open_ = 0, [_Group()]
    while at < len(pattern):
        inner = _Group()
        if pattern[at] == "(":
            found = _OPENING.match(pattern, at)
            assert found is not None, "it begins with the parenthesis"
            if pattern.startswith("(?", at) and found.end() == at + 1:
                raise _refused(pattern, "has a kind of group that is not known here")
            at = found.end()
            open_.append(_Group())
            if len(open_) > _MAX_DEPTH:
                raise _refused(pattern, f"is nested more than {_MAX_DEPTH} levels deep")
            continue
        if pattern[at] == "|":
            group = open_[-1]
            group.most_repeats, group.repeats, group.choices = group.end(), 0, True
            at += 1
            continue
        if pattern[at] == ")":
            inner = open_.pop()
            if not open_:
                raise _refused(pattern, "closes a group that is not open")
            at += 1
        else:
            at = _behind_atom(pattern, at)
        at = _quantified(pattern, at, inner, open_[-1])


def _behind_atom(pattern: str, at: int) -> int:
    if pattern[at] == "\\":
        found = _ESCAPE.match(pattern, at)
        if found is None:
            raise _refused(pattern, "refers back to what it has found")
        return found.end()
    return _behind_class(pattern, at) if pattern[at] == "[" else at + 1


def _behind_class(pattern: str, at: int) -> int:
    """`[^a-z]`, with nested classes."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 2
            continue
        if pattern[at] == "[":
            depth += 1
            # A bracket that closes at once is a literal.
            at += 1 + pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at)
            continue
        at += 1
        if pattern[at - 1] == "]":
            depth -= 1
            if depth == 0:
                return at
    raise _refused(pattern, "has a class without an end")


def _quantified(pattern: str, at: int, inner: _Group, outer: _Group) -> int:
    """Adds an atom and its quantifier to the counts of its group."""
    repeats, copies, choices = inner.end(), inner.copies, inner.choices
    while (found := _QUANTIFIER.match(pattern, at)) is not None and found[0] not in ("{}", "{,}"):
        at = found.end()
        sign, least, comma, most = found.groups()
        count = 1 if sign == "?" else None if sign or (comma and not most) else int((most if comma else least)[:9])
        if max(count or 0, int(least[:9]) if least else 0) > MAX_COUNT:
            raise _refused(pattern, f"counts above {MAX_COUNT}")
        several = count is None or count > _FEW
        if several and (repeats or choices):
            raise _refused(pattern, "repeats what itself repeats or has alternatives")
        varies = count is None or (bool(comma) and several)
        repeats, choices = repeats * (count or 1) + varies, choices or sign == "?" or bool(comma)
        copies *= max(count or 1, int(least[:9]) if least else 1)
    outer.repeats, outer.choices = outer.repeats + repeats, outer.choices or choices
    outer.copies += copies
    if outer.repeats > MAX_REPEATS or outer.copies > MAX_PATTERN_CHARS:
        raise _refused(pattern, f"has more than {MAX_REPEATS} repeats in a row, or counts too much")
    return at


def _refused(pattern: str, problem: str) -> CheckpointCorrupt:
    hint = "it could take exponential time; if this is a published model, please report it"
    return CheckpointCorrupt(f"the tokenizer's pattern '{pattern[:60]}' {problem}", hint=hint, file="tokenizer.json")
