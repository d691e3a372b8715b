"""Grammars that would take a server down are refused by a process that goes down in its place."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from string import ascii_lowercase

import pytest

from tripool.core import Structure
from tripool.errors import InvalidRequest
from tripool.grammar import Trial, trial_process
from tripool.grammar import trial as trial_module
from tripool.grammar.trial import TrialFailed

CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'
"""Overflows the stack of the thread that compiles it."""
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(40)]}
"""Takes hours."""
FIXPOINT = "\n".join(f"r{i} ::= r{i + 1}" for i in range(3500)) + '\nr3500 ::= "a"\nroot ::= r0'
"""Keeps the translator busy, before llguidance sees anything."""


@pytest.fixture(scope="module")
def trial() -> Trial:
    return Trial()


@pytest.mark.parametrize(
    "structure",
    [
        Structure("json_schema", {"type": "object", "properties": {"a": {"type": "string"}}}),
        Structure("regex", "[a-z]{3}"),
        Structure("ebnf", 'root ::= "a" | "b" root'),
        Structure("choice", ["a"]),
        Structure("json_object"),
        Structure("tool_calls", {"functions": [{"name": "f"}], "required": False}),
    ],
    ids=lambda structure: structure.kind,
)
def test_good_ones_pass(trial, structure):
    trial.check(structure)


@pytest.mark.parametrize(
    "structure",
    [
        Structure("ebnf", CHAIN, "guided_grammar"),
        Structure("json_schema", ENDLESS, "guided_grammar"),
        Structure("ebnf", FIXPOINT, "guided_grammar"),
    ],
    ids=["chain", "endless", "fixpoint"],
)
def test_dangerous_ones_are_refused(trial, structure):
    with pytest.raises(InvalidRequest, match="too long or too much memory") as caught:
        trial.check(structure)
    assert caught.value.param == "guided_grammar"


TEXT = "".join(Random(5).choices(ascii_lowercase, k=60_000))


@pytest.mark.parametrize(
    "structure",
    [
        Structure("choice", [TEXT], "guided_choice"),
        Structure("choice", ["a", "b" * 5000], "guided_choice"),
        Structure("regex", TEXT, "guided_choice"),
        Structure("ebnf", f'start: "{TEXT}"', "guided_choice"),
        Structure("ebnf", f'root ::= "{TEXT}"', "guided_choice"),
        Structure("json_schema", {"const": TEXT}, "guided_choice"),
        Structure("json_schema", {"properties": {"a": {"enum": [1, {"b": TEXT}]}}}, "guided_choice"),
        Structure("json_schema", {"type": "object", "properties": {TEXT: {}}}, "guided_choice"),
        Structure(
            "tool_calls",
            {"functions": [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": TEXT}}}}]},
            "guided_choice",
        ),
    ],
    ids=lambda structure: str(structure.value)[:40],
)
def test_long_literals_are_refused_with_a_hint(trial, structure):
    """Each mask would read all of it, again and again: 15 ms for every token of every answer."""
    with pytest.raises(InvalidRequest, match="has a text of") as caught:
        trial.check(structure)
    assert caught.value.param == "guided_choice" and "4096 bytes" in caught.value.hint


@pytest.mark.parametrize(
    "structure",
    [
        Structure("regex", f"({TEXT[:1000]}){{300}}"),
        Structure("ebnf", f'start: A\nA: {"B " * 150}\nB: "{TEXT[:2000]}"'),
    ],
    ids=["repeated", "joined"],
)
def test_long_literals_in_several_parts_are_refused_as_well(trial, structure):
    with pytest.raises(InvalidRequest, match="cannot be used"):
        trial.check(structure)


@pytest.mark.parametrize("what", trial_module.MOST)
def test_what_would_hold_up_others_is_refused_with_a_hint(what):
    """Whatever takes longer than it may: here, than no time at all."""
    strict = Trial(most={**trial_module.MOST, what: 0.0})
    with pytest.raises(InvalidRequest, match=f"it takes too long to {what.removesuffix('_s')}") as caught:
        strict.check(Structure("regex", "[a-z]{3}", "guided_regex"))
    assert "smaller numbers" in caught.value.hint and caught.value.param == "guided_regex"


def test_large_choices_are_tried_and_small_ones_are_not(monkeypatch):
    runs = []
    run = subprocess.run
    monkeypatch.setattr(trial_module.subprocess, "run", lambda *args, **more: runs.append(1) or run(*args, **more))
    trial = Trial()
    small = Structure("choice", ["yes", "no", "b" * 4000])
    assert trial.is_known(small)
    trial.check(small)
    assert not runs
    large = Structure("choice", [f"number {i}: {'b' * 4000}" for i in range(15)])
    assert not trial.is_known(large)
    trial.check(large)
    assert len(runs) == 1


PROPERTIES = {f"p{i}": {"type": ("string", "integer", "boolean")[i % 3], "description": TEXT[:40]} for i in range(6)}


@pytest.mark.parametrize(
    "structure",
    [
        Structure("choice", [f"product number {i * 7919}" for i in range(1000)]),
        Structure("json_schema", {"enum": [f"{i:05d}" for i in range(7000)]}),
        Structure("json_schema", {"type": "integer", "multipleOf": 5000}),
        Structure(
            "json_schema",
            {"type": "array", "items": {"properties": {f"p{i}": {"type": "integer"} for i in range(200)}}},
        ),
        Structure("json_schema", {"type": "object", "properties": {"a": {"type": "string"}}, "description": TEXT}),
        Structure(
            "tool_calls",
            {
                "functions": [
                    {"name": f"f{i}", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["p0"]}}
                    for i in range(100)
                ],
                "required": False,
            },
        ),
        Structure("ebnf", 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/\n'),
        Structure("regex", "|".join(f"word{i}" for i in range(2000))),
    ],
    ids=["choices", "enum", "multiple", "wide", "described", "tools", "ambiguous", "words"],
)
def test_what_people_send_passes(trial, structure):
    trial.check(structure)


def test_one_that_gives_up_behind_what_every_answer_begins_with_is_refused(trial):
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(505)}}
    with pytest.raises(InvalidRequest, match="max is 2000"):
        trial.check(Structure("json_schema", many))


def test_bad_ones_are_refused_with_the_reason(trial):
    with pytest.raises(InvalidRequest, match="unclosed character class"):
        trial.check(Structure("regex", "["))
    with pytest.raises(InvalidRequest, match="Rule 'x' not found"):
        trial.check(Structure("ebnf", "root ::= x"))
    with pytest.raises(InvalidRequest, match="'not'"):
        trial.check(Structure("json_schema", {"not": {}}))


def test_a_verdict_is_remembered_also_when_many_ask(monkeypatch):
    runs = []
    run = subprocess.run

    def counted(*args, **options):
        runs.append(1)
        return run(*args, **options)

    monkeypatch.setattr(trial_module.subprocess, "run", counted)
    trial = Trial()
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            trial.check(Structure("regex", "("))
    assert len(runs) == 1
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(trial.check, [Structure("regex", f"{letter}+") for letter in "abcd"]))
    assert len(runs) == 5


def test_verdicts_are_a_tenants_own(monkeypatch):
    """How long an answer takes must not tell whether another tenant sent the same grammar; its own salts share."""
    runs = []
    run = subprocess.run
    monkeypatch.setattr(trial_module.subprocess, "run", lambda *args, **more: runs.append(1) or run(*args, **more))
    trial = Trial()
    structure = Structure("regex", "[a-z]+")
    for namespace in ("one", "two"):
        assert not trial.is_known(structure, namespace)
        trial.check(structure, namespace)
        trial.check(structure, namespace)
        assert trial.is_known(structure, f"{namespace}\x1fsalt")
    assert len(runs) == 2
    for number in range(trial_module.MAX_KEPT + 1):
        trial._verdicts.put("one", Structure("regex", f"a{number}"), "")
    assert not trial.is_known(structure, "one")
    assert trial.is_known(structure, "two"), "no tenant evicts another's verdict"


def test_it_runs_at_a_lower_priority_than_the_server(monkeypatch, tmp_path):
    program, reported = tmp_path / "process.py", tmp_path / "nice"
    source = Path(trial_process.__file__).read_text()
    tell = f"    main()\n    open({str(reported)!r}, 'w').write(str(os.nice(0)))\n"
    program.write_text(source.removesuffix("    main()\n") + tell)
    monkeypatch.setattr(trial_process, "__file__", str(program))
    Trial().check(Structure("regex", "b+"))
    assert int(reported.read_text()) >= min(19, os.nice(0) + 5)


def test_a_trial_that_fails_in_the_middle_is_no_good_verdict(monkeypatch, tmp_path):
    """An exception in its thread leaves an exit status of 0 and an empty answer."""
    program, structure, trial = tmp_path / "process.py", Structure("regex", "c+"), Trial()
    source = Path(trial_process.__file__).read_text()
    program.write_text(source.replace('task["limits"]', 'task["no such limits"]'))
    with monkeypatch.context() as patched:
        patched.setattr(trial_process, "__file__", str(program))
        with pytest.raises(TrialFailed, match="KeyError"):
            trial.check(structure)
    assert not trial.is_known(structure)
    trial.check(structure)
