"""Tool calls: what the grammar lets through is a call of a known function with valid arguments."""

from __future__ import annotations

import json
from random import Random

import pytest
from jsonschema import Draft202012Validator

from tripool.grammar.tools import CLOSING, MAX_PARALLEL_CALLS, OPENING, tool_structure

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"enum": ["°C", "°F"]},
        },
        "required": ["city"],
    },
}
NOW = {"name": "now"}
PARAMETERS = {"get_weather": WEATHER["parameters"], "now": {"type": "object", "maxProperties": 0}}


def calls_in(answer: str) -> list[tuple[str, dict]]:
    found = []
    for part in answer.split(OPENING)[1:]:
        call = json.loads(part.removesuffix("\n").removesuffix(CLOSING))
        assert list(call) == ["name", "arguments"]
        found.append((call["name"], call["arguments"]))
    return found


def check(answer: str) -> int:
    for name, arguments in calls_in(answer):
        Draft202012Validator(PARAMETERS[name]).validate(arguments)
        assert arguments.keys() <= PARAMETERS[name].get("properties", {}).keys()
    return answer.count(OPENING)


@pytest.mark.parametrize("seed", range(10))
def test_required_calls(guide_of, walk, seed):
    answer = walk(guide_of(tool_structure([WEATHER, NOW], required=True)), Random(seed))
    assert answer.startswith(OPENING) and answer.endswith(CLOSING)
    assert 1 <= check(answer) <= MAX_PARALLEL_CALLS


@pytest.mark.parametrize("seed", range(5))
def test_one_call_at_a_time(guide_of, walk, seed):
    answer = walk(guide_of(tool_structure([WEATHER, NOW], required=True, parallel=False)), Random(seed))
    assert check(answer) == 1


def accepted(guide, tokenizer, text) -> str:
    """As much of the text as the grammar lets through, and '.' if it may end there."""
    taken = []
    for token in tokenizer.encode(text, special=False):
        if not guide.mask()[token]:
            break
        guide.accept(token)
        taken.append(token)
    return tokenizer.decode(taken) + "." * bool(guide.mask()[list(tokenizer.end_ids)].all())


def test_auto_is_text_or_calls_or_both(guide_of, tokenizer):
    structure = tool_structure([NOW], required=False)
    call = f'{OPENING}\n{{"name": "now", "arguments": {{}}}}\n{CLOSING}'
    for whole in ("Plain text, <tool or not.", call, f"Let me see.\n{call}", f"{call}\n{call}", "<tool_cal l>"):
        assert accepted(guide_of(structure), tokenizer, whole) == whole + "."
    assert accepted(guide_of(structure), tokenizer, f"text {OPENING} and more") == f"text {OPENING}"
    assert accepted(guide_of(structure), tokenizer, f"{call} and more") == call + "."
    begun = f'{OPENING}\n{{"name": "'
    assert accepted(guide_of(structure), tokenizer, f"{begun}never") == begun


def test_parameters_that_refer_to_definitions(guide_of, walk):
    """A schema that composes is left open where it says nothing: closing it would forbid what its parts declare."""
    schema = {"$defs": {"p": {"properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}}, "$ref": "#/$defs/p"}
    closed = schema | {"$defs": {"p": schema["$defs"]["p"] | {"additionalProperties": False}}}
    answer = walk(guide_of(tool_structure([{"name": "f", "parameters": closed}], required=True)), Random(2))
    assert all(arguments["n"] in (1, 2) for _, arguments in calls_in(answer))
