"""JSON files of a checkpoint, with errors that name the file."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from tripool.checkpoints.inside import open_inside
from tripool.errors import CheckpointCorrupt, CheckpointError

MAX_BYTES = 2**24
"""Size limit of a settings file; the largest published ones have a tenth of this."""
MAX_TOKENIZER_BYTES = 2**26


def read_text(path: Path, *, most_bytes: int = MAX_BYTES, hint: str = "fetch the file again") -> str:
    with os.fdopen(open_inside(path, hint=hint), "rb") as file:
        try:
            data = file.read(most_bytes + 1)
            if len(data) > most_bytes:
                raise CheckpointCorrupt(f"is longer than {most_bytes} bytes", hint="fetch the file again", file=path)
            return data.decode().replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 text: {error.reason}"
            raise CheckpointCorrupt(problem, hint="fetch the file again", file=path) from error
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", hint="check the disk", file=path) from error


def parse_object(text: str | bytes, path: Path, *, what: str = "the file") -> dict[str, Any]:
    """Objects only; a duplicate key is refused, because its meaning is ambiguous."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
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
