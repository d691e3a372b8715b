"""JSON files of a checkpoint, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tripool.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing


def read_text(path: Path, *, hint: str = "fetch the file again") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointMissing("no such file", hint=hint, file=path) from error
    except UnicodeDecodeError as error:
        raise CheckpointCorrupt(f"not UTF-8 text: {error.reason}", hint="fetch the file again", file=path) from error
    except OSError as error:
        hint = "check that it is a file and that you may read it"
        raise CheckpointError(f"cannot be opened: {error.strerror}", hint=hint, file=path) from error


def parse_object(text: str | bytes, path: Path, *, what: str = "the file") -> dict[str, Any]:
    """Objects only; a key given twice is refused, since no reader can know which one is meant."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            hint = "the file was written wrongly; fetch it again"
            raise CheckpointCorrupt(f"{what} names '{twice}' twice", hint=hint, file=path, tensor=twice)
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, too
        raise CheckpointCorrupt(f"{what} is not JSON: {error}", hint="fetch the file again", file=path) from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise CheckpointCorrupt(f"{what} holds a {kind}, not an object", hint="fetch the file again", file=path)
    return value


def read_object(path: Path, *, hint: str = "fetch the file again") -> dict[str, Any]:
    return parse_object(read_text(path, hint=hint), path)


def read_object_if_there(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}
