"""How long a text may be that a grammar spells out letter by letter.

What a mask costs grows with the literal under way: llguidance reads all of it again for every byte of every token. With
as many as are allowed here it is a millisecond, with what fits into a request it would be thirty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tripool.core import Structure
from tripool.errors import InvalidRequest

MAX_LITERAL_BYTES = 4096
_RUN = re.compile(r"[\w ]+")
"""Of a pattern or a grammar, what is surely a literal, or a name."""
_NO_TEXT = frozenset({"description", "title", "$comment", "default", "examples", "$id", "$schema"})
"""Of a schema or a function, what says nothing about answers."""


def check_literals(structure: Structure) -> None:
    """Raises InvalidRequest for one that is too long. What is put together of several is left to the trial."""
    for text in _literals(structure):
        size = len(text.encode()) if 4 * len(text) > MAX_LITERAL_BYTES else 0
        if size > MAX_LITERAL_BYTES:
            hint = f"at most {MAX_LITERAL_BYTES} bytes each, such as a choice, a constant or a name"
            raise InvalidRequest(f"the {structure.kind} has a text of {size} bytes", hint=hint, param=structure.param)


def _literals(structure: Structure) -> Iterator[str]:
    if structure.kind in ("json_schema", "tool_calls"):
        yield from _strings(json.loads(structure.value))
    elif structure.kind == "choice":
        yield from structure.value
    elif structure.kind in ("regex", "ebnf"):
        yield from _RUN.findall(structure.value)


def _strings(schema: Any) -> Iterator[str]:
    if isinstance(schema, str):
        yield schema
    elif isinstance(schema, list):
        for item in schema:
            yield from _strings(item)
    elif isinstance(schema, dict):
        for name, item in schema.items():
            yield name
            if name not in _NO_TEXT or not isinstance(item, str):
                yield from _strings(item)
