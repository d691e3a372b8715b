"""Checks after generation what the grammar of an answer does not enforce: the whole schema of its calls and its JSON.

Small values are checked at once; others, and all with regular expressions in their schemas, in a process with limited
CPU time, as many at a time as the thread pool has threads. A check never fails an answer: what it cannot decide, it
says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tripool.answer import Answer
from tripool.errors import InvalidRequest, Overloaded
from tripool.gateway.body import decode_text
from tripool.gateway.fair_pool import FairPool
from tripool.gateway.output_parser import OutputParser
from tripool.grammar import validate_process
from tripool.grammar.validate import MAX_NAMED, TooManySteps, has_patterns, validated

_QUICK_STEPS, _STEPS = 1_000, 1_000_000
"""A step takes some microseconds: a thousand of them may delay other answers."""
_QUICK_CHARS = 4096
_CPU_S, _WALL_S, _MEMORY_BYTES = 0.5, 10.0, 2**29
_THREADS, _MAX_WAITING = 2, 64

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unenforced:
    """Parts of a request's schemas that the grammar does not ensure."""

    places: tuple[str, ...] = ()
    """Such as `tools/find/properties/tags/uniqueItems`."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """Whole schemas of the functions that have such parts, by name."""
    answer: Mapping[str, Any] | None = None
    """The whole schema of the answer itself, if that has such parts."""
    param: str = ""
    """The field that the answer's schema came in."""

    def __bool__(self) -> bool:
        return bool(self.places)

    def __or__(self, other: Unenforced) -> Unenforced:
        answer, param = (self.answer, self.param) if self.answer is not None else (other.answer, other.param)
        return Unenforced(self.places + other.places, {**self.tools, **other.tools}, answer, param)


ENFORCED = Unenforced()


@dataclass(frozen=True, slots=True)
class _Pair:
    """A value to check. `where`: what a client looks it up by; `place`: before places in its schema."""

    schema: Any
    value: Any
    where: Facts
    place: str


class SchemaCheck:
    """For one event loop."""

    def __init__(self) -> None:
        self._pool = FairPool("schema checks", num_threads=_THREADS, max_waiting=_MAX_WAITING)

    async def check(
        self, unenforced: Unenforced, answers: Sequence[Answer], tenant: str, *, calls: bool, thinks: bool | None
    ) -> Facts:
        """`kept`: whether every answer keeps its whole schema; None where that is not known, and then `why`."""
        pairs: list[_Pair] = []
        incomplete = False
        for answer in answers:
            for choice in answer.choices():
                parser = OutputParser(calls=calls, thinks=thinks)
                parser.push(choice.text, last=True)
                incomplete |= choice.finish_reason != "stop" or not parser.parsed.complete
                number = len(answers) > 1 or answer.request.params.n > 1
                where = {"choice": choice.index} if number else {}
                try:
                    pairs += _pairs(unenforced, parser, where)
                except InvalidRequest:  # cut off
                    incomplete = True
        try:
            found = _quick(pairs)
        except TooManySteps:
            try:
                found = await self._pool.run(tenant, partial(_in_process, pairs))
            except Overloaded:
                return {"kept": None, "why": "too many answers are being checked"}
        return _facts(pairs, found, incomplete)


def _pairs(unenforced: Unenforced, parser: OutputParser, where: Facts) -> Iterator[_Pair]:
    parsed = parser.parsed
    for number, call in enumerate(parsed.calls):
        if call.name in unenforced.tools:
            value = decode_text(call.arguments, "the model's arguments")
            yield _Pair(unenforced.tools[call.name], value, where | {"call": number}, f"tools/{call.name}/")
    if unenforced.answer is not None and not parsed.calls:
        yield _Pair(unenforced.answer, decode_text(parsed.content, "the answer"), where, f"{unenforced.param}/")


def _quick(pairs: Sequence[_Pair]) -> list[Facts | None]:
    found: list[Facts | None] = []
    for pair in pairs:
        if has_patterns(pair.schema) or len(str(pair.value)) > _QUICK_CHARS:
            raise TooManySteps
        findings = validated(pair.schema, pair.value, steps=_QUICK_STEPS // len(pairs))
        found.append({"violations": findings.violations, "unchecked": findings.unchecked})
    return found


def _in_process(pairs: Sequence[_Pair]) -> list[Facts | None]:
    """None where it took too long."""
    bounds = {"steps": _STEPS, "cpu_s": _CPU_S, "memory_bytes": _MEMORY_BYTES}
    task = json.dumps({"pairs": [(pair.schema, pair.value) for pair in pairs], **bounds}).encode()
    command = [sys.executable, "-I", str(Path(validate_process.__file__))]
    try:
        done = subprocess.run(command, input=task, capture_output=True, timeout=_WALL_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return [None] * len(pairs)
    if done.returncode or not done.stdout.startswith(validate_process.CHECKED):
        return [None] * len(pairs)
    found: list[Facts | None] = json.loads(done.stdout.removeprefix(validate_process.CHECKED))
    return found


def _facts(pairs: Sequence[_Pair], found: Sequence[Facts | None], incomplete: bool) -> Facts:
    violations, unchecked = [], []
    for pair, findings in zip(pairs, found, strict=True):
        for place, path in findings["violations"] if findings else ():
            violations.append({**pair.where, "path": path, "schema": pair.place + place})
        unchecked += [pair.place + place for place in (findings["unchecked"] if findings else ())]
    facts: Facts = {"kept": not violations}
    if violations:
        facts["violations"] = violations[:MAX_NAMED]
    elif incomplete:
        facts |= {"kept": None, "why": "the answer is incomplete"}
    elif None in found:
        facts |= {"kept": None, "why": "the check takes too long"}
    if unchecked:
        facts["unchecked"] = list(dict.fromkeys(unchecked))[:MAX_NAMED]
    return facts
