"""The grammar of tool calls, in the convention of Hermes' and Qwen's chat templates:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Bern"}}
    </tool_call>

Spaces after ':' and ',' are as in those templates, so that a model sees its training format. Several calls are on lines
of their own. Where no call is required, the answer may be any text, and calls may follow it; or, where the answer has
a JSON schema of its own, it is either that JSON or calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tripool.core import Structure
from tripool.errors import InvalidRequest
from tripool.grammar.schema import prepared

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
BEFORE_NAME = '{"name": "'
AFTER_NAME = '", "arguments": '

MAX_FUNCTIONS = 128
MAX_PARALLEL_CALLS = 16

NAME = r"[a-zA-Z0-9_.:/-]{1,128}"
"""Of a function: what OpenAI and the Model Context Protocol allow, and what gateways of tools put between its parts."""
_OPTIONS = "x-guidance"
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties"})


def tool_structure(
    functions: Sequence[Mapping[str, Any]], *, required: bool, parallel: bool = True, param: str = "tools"
) -> Structure:
    """Calls of `functions`, each with a `name` and, if it takes any, a schema of its `parameters`."""
    value = {"functions": list(functions), "required": required, "parallel": parallel}
    return Structure("tool_calls", value, param)


def or_answer(calls: Structure, schema: Mapping[str, Any]) -> Structure:
    """Either calls, or JSON of this schema. A required call leaves no room for it."""
    value = json.loads(calls.value)
    return calls if value["required"] else Structure("tool_calls", value | {"answer": schema}, calls.param)


def tool_grammar(structure: Structure) -> str:
    """Lark. Raises InvalidRequest for an invalid function; llguidance checks the parameters' schemas."""
    value = json.loads(structure.value)
    functions = value.get("functions")
    if value.keys() - {"functions", "required", "parallel", "answer"} or not isinstance(functions, list):
        hint = 'like {"functions": [{"name": ..., "parameters": ...}], "required": true}'
        raise InvalidRequest("tool_calls is of the wrong shape", hint=hint, param=structure.param)
    if not 0 < len(functions) <= MAX_FUNCTIONS:
        hint = f"1 to {MAX_FUNCTIONS}"
        raise InvalidRequest(f"there are {len(functions)} functions", hint=hint, param=structure.param)
    schemas = dict(_function(function, structure.param) for function in functions)
    if len(schemas) < len(functions):
        raise InvalidRequest("two functions have the same name", param=structure.param)
    more = f" next{{0,{MAX_PARALLEL_CALLS - 1}}}" if value.get("parallel", True) else ""
    bodies = " | ".join(f"f{number}" for number in range(len(schemas)))
    answer = value.get("answer")
    rules = [*_start(bool(value.get("required")), more, answer is not None), f'call: "\\n" ({bodies}) "\\n{CLOSING}"']
    if more:
        rules.append(f'next: "\\n{OPENING}" call')
    for number, (name, schema) in enumerate(schemas.items()):
        rules.append(f'f{number}: {json.dumps(BEFORE_NAME + name + AFTER_NAME)} a{number} "}}"')
        rules.append(f"a{number}: %json {json.dumps(schema)}")
    if answer is not None:
        if not isinstance(answer, dict) or _OPTIONS in answer:
            raise InvalidRequest("the schema of the answer is of the wrong shape", param=structure.param)
        rules.append(f"answer: %json {json.dumps({**prepared(answer, structure.param), _OPTIONS: _COMPACT})}")
    return "\n".join(rules)


def _start(required: bool, more: str, has_answer: bool) -> list[str]:
    if required or has_answer:
        return [f'start: {"answer | " if has_answer else ""}"{OPENING}" call{more}']
    return [
        f"start: TEXT | opening call{more}",
        f"TEXT: /(?s:.*)/ & ~/(?s:.*{OPENING}.*)/",
        # Text and the tag that ends it are one lexeme: a lexer cannot go back to where the tag began.
        f"opening[lazy]: /(?s:.*){OPENING}/",
    ]


def _function(function: object, param: str) -> tuple[str, dict[str, Any]]:
    """Name, and the schema of the arguments; without a schema it takes none."""
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not re.fullmatch(NAME, name):
        hint = "a name has 1 to 128 of a-z, A-Z, 0-9 and any of _ . : / -"
        raise InvalidRequest(f"a function has the name {str(name)[:100]!r}", hint=hint, param=param)
    schema = {} if function.get("parameters") is None else function["parameters"]
    if not isinstance(schema, dict) or schema.get("type", "object") != "object" or _OPTIONS in schema:
        hint = 'send a JSON schema of type "object"'
        raise InvalidRequest(f"the parameters of '{name}' are of the wrong shape", hint=hint, param=param)
    closed = {} if schema.get("properties") or schema.keys() & _COMPOSED else {"additionalProperties": False}
    return name, {"type": "object", **closed, **prepared(schema, param), _OPTIONS: _SPACED}
