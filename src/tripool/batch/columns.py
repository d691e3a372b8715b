"""Typed columns from a JSON schema: which type a property's values have, and whether a value fits it. Pure.

| schema | column |
|---|---|
| string, integer, number, boolean | the same; an integer has 64 bits, a number is a double |
| array of one type | a list |
| object with properties | a struct |
| the above or null | the same: every column may be empty |
| anything else | json: a value as it is in JSON lines, its text in Parquet |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["string", "integer", "number", "boolean", "list", "struct", "json"]
_PLAIN: tuple[Literal["string", "integer", "number", "boolean"], ...] = ("string", "integer", "number", "boolean")
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: Kind
    parts: tuple[Column, ...] = ()
    """The item of a list, the fields of a struct."""
    required: bool = False
    nullable: bool = True


class DoesNotFit(ValueError):
    """A value is not of its column's type; the text says where."""


def column_of(name: str, node: Any, parent: Mapping[str, Any], depth: int = 0) -> Column:
    """`parent`: the schema of the object that has the property."""
    required = name in (parent.get("required") or ())
    if not isinstance(node, Mapping):
        return Column(name, "json", required=required)
    kinds = node.get("type")
    names = list(kinds) if isinstance(kinds, list) else [kinds]
    nullable = "null" in names
    own = [kind for kind in names if kind != "null"]
    if "type" not in node:
        own, nullable = _of_values(node)
    made = Column(name, "json", (), required, True)
    if len(own) != 1 or depth > _MAX_DEPTH or {"$ref", "anyOf", "oneOf", "allOf"} & node.keys():
        return made
    (kind,) = own
    if kind in _PLAIN:
        return Column(name, kind, (), required, nullable)
    if kind == "array" and isinstance(node.get("items"), Mapping) and "prefixItems" not in node:
        return Column(name, "list", (column_of("item", node["items"], {}, depth + 1),), required, nullable)
    properties = node.get("properties")
    open_ended = node.get("additionalProperties") not in (None, False) or "patternProperties" in node
    if kind == "object" and isinstance(properties, Mapping) and properties and not open_ended:
        fields = tuple(column_of(key, value, node, depth + 1) for key, value in properties.items())
        return Column(name, "struct", fields, required, nullable)
    return made


def _of_values(node: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """The type of an `enum` or a `const` of texts."""
    values = node.get("enum", [node["const"]] if "const" in node else [])
    texts = [value for value in values if isinstance(value, str)]
    nullable = None in values
    return (["string"], nullable) if texts and len(texts) + nullable == len(values) else ([], True)


def read_value(column: Column, value: Any, where: str = "") -> Any:
    """The value as its column has it, or DoesNotFit."""
    where = where or f"'{column.name}'"
    if column.kind == "json":
        return value
    if value is None:
        if column.nullable:
            return None
        raise DoesNotFit(f"{where} is null")
    match column.kind:
        case "string" if isinstance(value, str):
            return value
        case "boolean" if isinstance(value, bool):
            return value
        case "integer" if _is_number(value) and value == (whole := int(value)) and -(2**63) <= whole < 2**63:
            return whole
        case "number" if _is_number(value):
            return float(value)
        case "list" if isinstance(value, list):
            return [read_value(column.parts[0], item, f"an item of {where}") for item in value]
        case "struct" if isinstance(value, dict):
            return read_object(column.parts, value)
    raise DoesNotFit(f"{where} is not of type {column.kind}")


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every double
        return False


def read_object(columns: tuple[Column, ...], value: dict[str, Any]) -> dict[str, Any]:
    """All columns, those that are not required and not there as None."""
    found: dict[str, Any] = {}
    for column in columns:
        if column.name not in value:
            if column.required:
                raise DoesNotFit(f"'{column.name}' is missing")
            found[column.name] = None
        else:
            found[column.name] = read_value(column, value[column.name])
    strange = value.keys() - found.keys()
    if strange:
        raise DoesNotFit(f"'{min(strange)}' is not in the schema")
    return found
