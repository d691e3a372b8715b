"""Translates a `Structure` to llguidance's grammar text. Loads no vocabulary and compiles nothing."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, grammar_from

from tripool.core import Structure
from tripool.errors import InvalidRequest
from tripool.grammar.schema import prepared
from tripool.grammar.tools import tool_grammar

_OPTIONS = "x-guidance"
"""Where llguidance finds its own options inside a schema."""

_ESCAPE = re.compile(r"\\.", re.DOTALL)
_CLASSES = {r"\w": r"[\p{L}\p{N}_]", r"\W": r"[^\p{L}\p{N}_]"}
"""Patterns follow Python, where \\w has no combining marks."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
"""About a fifth of llguidance's defaults: a mask stays within milliseconds, and an answer's memory within 40 MB."""


def grammar_text(structure: Structure) -> str:
    """Errors in the grammar itself appear when it is compiled."""
    try:
        if structure.kind == "json_schema":
            return _json(structure.value, structure.param)
        if structure.kind == "json_object":
            return _json('{"type": "object"}', structure.param)
        if structure.kind == "regex":
            return LLMatcher.grammar_from_regex(_ESCAPE.sub(_as_python, structure.value))
        if structure.kind == "ebnf":
            return grammar_from("ebnf", structure.value)
        if structure.kind == "choice":
            # One terminal, not a rule with alternatives: a lexer handles a thousand of them easily.
            choices = " | ".join(json.dumps(text) for text in structure.value)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        assert structure.kind == "tool_calls"
        return LLMatcher.grammar_from_lark(tool_grammar(structure))
    except ValueError as error:
        raise InvalidRequest(f"the {structure.kind} cannot be used: {error}", param=structure.param) from error


_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*?)\]")
_WORDS = (
    ("oneOf constraints are not supported", "a oneOf whose branches may overlap cannot be promised"),
    ("Regex is empty", "no text satisfies both a pattern and the keywords beside it"),
)


def in_words(error: str, structure: Structure) -> str:
    """What llguidance says of a schema, without the grammar around it, which its client has never seen."""
    if structure.kind not in ("json_schema", "tool_calls"):
        return error
    message = re.split(r"\n +\d+ \| ", error, maxsplit=1)[0]
    message = re.sub(r"^at \d+\(\d+\): ", "", message).replace("failed to compile JSON schema: ", "").strip()
    keywords = _UNKNOWN.search(message)
    if keywords is not None:
        return "no grammar can promise " + keywords[1].replace('"', "'")
    if "regex parse error" in message or "in regex /" in message:
        return f"no grammar can promise one of its patterns: {message.rpartition('error: ')[2].partition('; ')[0]}"
    return next((words for mark, words in _WORDS if mark in message), message)


def _as_python(escape: re.Match[str]) -> str:
    """Replaces classes that differ between Python and Rust. A class may be nested in another."""
    return _CLASSES.get(escape[0], escape[0])


def _json(schema: str, param: str) -> str:
    """Compact, so that a model cannot fill its answer with spaces; unknown keywords are refused, never ignored."""
    parsed = json.loads(schema)
    if _OPTIONS in parsed:
        raise InvalidRequest(f"the schema has '{_OPTIONS}', which is not supported", param=param)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(prepared(parsed, param)),
        overrides={
            "whitespace_flexible": False,
            "item_separator": ",",
            "key_separator": ":",
            "lenient": False,
            "coerce_one_of": False,
        },
    )
