"""Reads the structure of an answer from OpenAI's, vLLM's and SGLang's fields. One structure per request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tripool.core import Structure, StructureKind
from tripool.errors import InvalidRequest
from tripool.gateway.schema_check import ENFORCED, Unenforced
from tripool.grammar.relax import Relax, relaxed

_PLAIN: Mapping[str, StructureKind] = {
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
_STRUCTURED: Mapping[str, StructureKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
}
"""Keys of `structured_outputs`."""


def read_structure(fields: Mapping[str, Any]) -> Structure | None:
    """Without the parts of a `response_format` that no grammar can promise: see `read_format`."""
    return read_format(fields)[0]


def read_format(fields: Mapping[str, Any], relax: Relax = relaxed) -> tuple[Structure | None, Unenforced]:
    """The structure, and the parts of its schema that it does not ensure: only those of a `response_format` that is
    not `strict` may be left out."""
    unenforced = ENFORCED
    found = [Structure(kind, fields[name], name) for name, kind in _PLAIN.items() if name in fields]
    if "structured_outputs" in fields:
        found += _structured_outputs(fields["structured_outputs"])
    if "response_format" in fields:
        formats, unenforced = _response_format(fields["response_format"], relax)
        found += formats
    if len(found) > 1:
        names = ", ".join(f"'{structure.param}'" for structure in found)
        raise InvalidRequest(f"an answer can have one structure, not {names}", param=found[-1].param)
    return (found[0], unenforced) if found else (None, ENFORCED)


def _structured_outputs(value: Mapping[str, Any]) -> list[Structure]:
    param, given = "structured_outputs", {name: item for name, item in value.items() if item is not None}
    _refuse_unknown(given, _STRUCTURED, param)
    if given.get("json_object") is False:
        del given["json_object"]
    return [Structure(_STRUCTURED[name], item, param) for name, item in given.items()]


def _response_format(value: Mapping[str, Any], relax: Relax) -> tuple[list[Structure], Unenforced]:
    param, kind = "response_format", value.get("type")
    value = {name: item for name, item in value.items() if item is not None}
    fields = {"json_schema": ("type", "json_schema"), "json_object": ("type", "schema")}
    _refuse_unknown(value, fields.get(str(kind), ("type",)), param)
    if kind == "text":
        return [], ENFORCED
    if kind == "json_object" and isinstance(value.get("schema"), dict):
        return _schema(value["schema"], param, relax)
    if kind == "json_object":
        return [Structure("json_object", True, param)], ENFORCED
    if kind != "json_schema":
        hint = "known: text, json_object, json_schema"
        raise InvalidRequest(f"response_format has the type {str(kind)[:100]!r}", hint=hint, param=param)
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        hint = 'like {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        raise InvalidRequest("response_format has no schema", hint=hint, param=param)
    _refuse_unknown(named, ("name", "description", "schema", "strict"), param)
    if named.get("strict") is True:
        return [Structure("json_schema", named["schema"], param)], ENFORCED
    return _schema(named["schema"], param, relax)


def _schema(schema: Mapping[str, Any], param: str, relax: Relax) -> tuple[list[Structure], Unenforced]:
    shorter, dropped = relax(schema)
    places = tuple(f"{param}/{place}" for place in dropped)
    unenforced = Unenforced(places, answer=schema, param=param) if places else ENFORCED
    return [Structure("json_schema", shorter, param)], unenforced


def _refuse_unknown(value: Mapping[str, Any], known: Mapping[str, Any] | tuple[str, ...], param: str) -> None:
    for name in value:
        if name not in known:
            hint = f"known: {', '.join(known)}"
            raise InvalidRequest(f"{param} has '{name[:100]}', which is not supported", hint=hint, param=param)
