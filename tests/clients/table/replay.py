"""Requests of clients on disk: one JSON file per client, one request of each shape, without the clients' own prose.

Prompts, descriptions and instructions that a client brings along are its authors' text and say nothing about the
server: they are replaced by words of ours. Field names, types, schemas and short values stay as they were sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "recorded"
_MAX_TEXT, _MAX_BODY = 48, 2**20
_PROSE = {"description", "title", "instructions", "system", "text", "content", "input", "output", "prompt", "reasoning"}
_KEEPS = {
    "$schema",
    "$ref",
    "arguments",
    "pattern",
    "format",
    "const",
    "enum",
    "id",
    "call_id",
    "tool_call_id",
    "tool_use_id",
}
_ADDRESS = re.compile(r"(/[\w.-]+){2,}|127\.0\.0\.1:\d+|[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{16,}")


def keep(name: str, requests: Sequence[dict[str, Any]]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for request in requests:
        if len(json.dumps(request["body"])) > _MAX_BODY:
            continue  # a prompt too long on purpose
        plain = request | {"body": without_prose(request["body"])}
        shape = json.dumps([request["method"], request["path"], request["status"], shape_of(plain["body"])])
        found.setdefault(shape, plain)
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(request, ensure_ascii=True, sort_keys=True) for request in found.values())
    (FOLDER / f"{name}.json").write_text(f"[\n{lines}\n]\n", "utf-8")


def recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(FOLDER.glob("*.json")):
        for request in json.loads(path.read_text("utf-8")):
            yield path.stem, request


def without_prose(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: without_prose(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [without_prose(one, key) for one in value]
    if not isinstance(value, str) or key in _KEEPS:
        return value
    plain = _ADDRESS.sub("some-place", value)
    prose = key in _PROSE and " " in plain and len(plain) > _MAX_TEXT
    return f"some text of {len(value)} characters" if prose or len(plain) > 4 * _MAX_TEXT else plain


def shape_of(value: Any) -> Any:
    """Which fields there are and of which types; lists by the shapes in them, in any order."""
    if isinstance(value, dict):
        return {name: shape_of(one) for name, one in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(shape_of(one)) for one in value})
    return type(value).__name__
