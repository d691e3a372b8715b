"""RAGPulse's requests: prompts put together from components whose ids are known and whose lengths are inferred. Pure.

A component has the same length in every prompt, and a prompt's length is the sum of its components'. What follows from
these sums, and from tables of lengths where they are given, is known. What does not is estimated, so that the sums
almost come out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tripool.bench.trace import BadTrace, TraceRequest, id_list, number, parse_object, token_count
from tripool.core import BLOCK_TOKENS

KINDS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""In the order of a prompt."""
_TABLES = {"sys_prompt_id": 0, "passage_id": 1, "history_id": 2, "web_search_id": 3, "user_input_id": 4}
"""Key of an id in a table of lengths, and its kind."""
_MOST_ROWS = 300
"""Prompts that share all their components, up to which equations are solved; beyond that it takes long."""

_SWEEPS = 10
"""Over all prompts, when lengths are estimated."""

Component = tuple[int, int]
"""(place of its kind in `KINDS`, id)"""


@dataclass(frozen=True, slots=True)
class Prompt:
    arrival_s: float
    num_tokens: int
    output_tokens: int
    components: tuple[Component, ...]


def parse_prompt(line: str, where: str) -> Prompt:
    fields = parse_object(line, where)
    ids = fields.get("hash_ids")
    if not isinstance(ids, dict) or not ids.keys() <= set(KINDS):
        raise BadTrace(f"{where}: hash_ids is no object of {', '.join(KINDS)}", hint="as RAGPulse publishes them")
    components = ((kind, each) for kind, name in enumerate(KINDS) for each in id_list(ids, name, where, missing=[]))
    arrival_s = number(_with_number(fields, "timestamp"), "timestamp", where, "seconds, as a number or its text")
    prompt, answer = (token_count(fields, name, where) for name in ("input_length", "output_length"))
    return Prompt(arrival_s, prompt, answer, tuple(components))


def _with_number(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The same fields; a number that is written as text is a number."""
    value = fields.get(name)
    try:
        return {**fields, name: float(value)} if isinstance(value, str) else dict(fields)
    except ValueError:
        return dict(fields)


def parse_length(line: str, where: str) -> tuple[Component, int]:
    """A line of `1_sys_prompt.jsonl` and the like: which component has which length."""
    fields = parse_object(line, where)
    for name, kind in _TABLES.items():
        if type(fields.get(name)) is int:
            return (kind, fields[name]), token_count(fields, "token_length", where, least=0)
    raise BadTrace(f"{where} names no component", hint=f"one of {', '.join(_TABLES)}, and token_length")


# ---- lengths --------------------------------------------------------------------------------------------------------


class Lengths:
    """Of all components of some prompts."""

    def __init__(self, prompts: Sequence[Prompt], published: Mapping[Component, int]) -> None:
        every = {each for prompt in prompts for each in prompt.components}
        self.num_components = len(every)
        self._lengths = {each: published[each] for each in every if each in published}
        self.num_published = len(self._lengths)
        self._lengths |= _solve(prompts, self._lengths)
        self.num_inferred = len(self._lengths) - self.num_published
        self._lengths |= _estimate(prompts, self._lengths)

    @property
    def num_unknown(self) -> int:
        return self.num_components - self.num_published - self.num_inferred

    def __getitem__(self, component: Component) -> int:
        return self._lengths[component]


Row = tuple[dict[int, int], int]
"""How often a prompt has each group of components, and how many tokens they are together."""


def _solve(prompts: Sequence[Prompt], known: Mapping[Component, int]) -> dict[Component, int]:
    """Every length that follows from the sums. Components that only come together are one unknown."""
    seen: defaultdict[Component, list[tuple[int, int]]] = defaultdict(list)
    for place, prompt in enumerate(prompts):
        for component, times in Counter(prompt.components).items():
            if component not in known:
                seen[component].append((place, times))
    groups: defaultdict[tuple[tuple[int, int], ...], list[Component]] = defaultdict(list)
    for component, found_in in seen.items():
        groups[tuple(found_in)].append(component)
    rows: list[Row] = [
        ({}, prompt.num_tokens - sum(known.get(each, 0) for each in prompt.components)) for prompt in prompts
    ]
    for group, places in enumerate(groups):
        for place, times in places:
            rows[place][0][group] = times
    members = list(groups.values())
    found = _propagate(rows, _eliminate(_without_private(rows)))
    whole = {group: int(value) for group, value in found.items() if value >= 0 and value.denominator == 1}
    return {members[group][0]: value for group, value in whole.items() if len(members[group]) == 1}


def _without_private(rows: Sequence[Row]) -> list[Row]:
    """Rows that say something about other rows: an unknown of one row alone takes whatever the others leave over."""
    where: defaultdict[int, set[int]] = defaultdict(set)
    for place, (terms, _) in enumerate(rows):
        for group in terms:
            where[group].add(place)
    left = {place for place, (terms, _) in enumerate(rows) if terms}
    private = [next(iter(places)) for places in where.values() if len(places) == 1]
    while private:
        place = private.pop()
        if place in left:
            left.remove(place)
            for group in rows[place][0]:
                where[group].discard(place)
                if len(where[group]) == 1:
                    private.append(next(iter(where[group])))
    return [rows[place] for place in sorted(left)]


def _eliminate(rows: Sequence[Row]) -> dict[int, Fraction]:
    """By Gauss and Jordan, exactly: unknowns that have one value in all solutions."""
    if len(rows) > _MOST_ROWS:
        return {}
    solved: dict[int, tuple[dict[int, Fraction], Fraction]] = {}
    """By its leading unknown, which no other of them has."""
    for terms, total in rows:
        row = {group: Fraction(times) for group, times in terms.items()}
        value = Fraction(total)
        for pivot in [group for group in row if group in solved]:
            value = _subtract(row, value, *solved[pivot], row[pivot])
        if not row:
            continue
        pivot = min(row)
        scale = row[pivot]
        row, value = {group: times / scale for group, times in row.items()}, value / scale
        for other, (theirs, their_value) in solved.items():
            if pivot in theirs:
                solved[other] = theirs, _subtract(theirs, their_value, row, value, theirs[pivot])
        solved[pivot] = row, value
    return {pivot: value for pivot, (row, value) in solved.items() if len(row) == 1}


def _subtract(
    row: dict[int, Fraction], value: Fraction, other: Mapping[int, Fraction], other_value: Fraction, times: Fraction
) -> Fraction:
    for group, factor in other.items():
        left = row.get(group, Fraction(0)) - times * factor
        if left:
            row[group] = left
        else:
            row.pop(group, None)
    return value - times * other_value


def _propagate(rows: Sequence[Row], found: dict[int, Fraction]) -> dict[int, Fraction]:
    """A row with one unknown left gives it."""
    changed = True
    while changed:
        changed = False
        for terms, total in rows:
            unknown = [group for group in terms if group not in found]
            if len(unknown) == 1:
                rest = total - sum(times * found[group] for group, times in terms.items() if group in found)
                found[unknown[0]] = Fraction(rest) / terms[unknown[0]]
                changed = True
    return found


def _estimate(prompts: Sequence[Prompt], known: Mapping[Component, int]) -> dict[Component, int]:
    """Of the others: close to the mean of all, and such that the sums almost come out (Kaczmarz' method). What many
    prompts have in common so gets most of what they have in common beyond the mean."""
    rows = []
    for prompt in prompts:
        unknown = [each for each in prompt.components if each not in known]
        rest = prompt.num_tokens - sum(known.get(each, 0) for each in prompt.components)
        if unknown:
            rows.append((unknown, max(0, rest)))
    mean = sum(rest for _, rest in rows) / max(1, sum(len(unknown) for unknown, _ in rows))
    found = {each: mean for unknown, _ in rows for each in unknown}
    for _ in range(_SWEEPS):
        for unknown, rest in rows:
            off = (rest - sum([found[each] for each in unknown])) / len(unknown)
            for each in unknown:
                found[each] = max(0.0, found[each] + off)
    return {each: round(length) for each, length in found.items()}


# ---- requests -------------------------------------------------------------------------------------------------------


def to_requests(prompts: Sequence[Prompt], lengths: Lengths) -> list[TraceRequest]:
    """In order of arrival, the first at 0. Ids of full blocks: of the components up to a block's end, and that end."""
    chains: dict[tuple[int, Component | None], int] = {}
    names: dict[tuple[int, int], int] = {}
    begin_s = min((prompt.arrival_s for prompt in prompts), default=0.0)
    found = []
    for prompt in sorted(prompts, key=lambda each: each.arrival_s):
        ids = tuple(names.setdefault(each, len(names)) for each in _blocks(prompt, lengths, chains))
        found.append(
            TraceRequest(
                prompt.arrival_s - begin_s, prompt.num_tokens, prompt.output_tokens, ids, block_tokens=BLOCK_TOKENS
            )
        )
    return found


def _blocks(
    prompt: Prompt, lengths: Lengths, chains: dict[tuple[int, Component | None], int]
) -> Iterator[tuple[int, int]]:
    """(chain of components, end in tokens) of each full block. What the components leave over ends the prompt."""
    chain, reached, end = -1, 0, BLOCK_TOKENS
    for component in (*prompt.components, None):
        chain = chains.setdefault((chain, component), len(chains))
        reached += prompt.num_tokens if component is None else lengths[component]
        while end <= min(reached, prompt.num_tokens):
            yield chain, end
            end += BLOCK_TOKENS
