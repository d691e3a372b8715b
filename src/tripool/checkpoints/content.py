"""Content hashes of files and folders, and JSON files that are whole or not there, for artefacts and the registry."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def content_hash(path: Path, pattern: str = "*") -> str:
    """Of a file, or of the files below a folder: their names and bytes, never their times."""
    said = hashlib.blake2b(digest_size=16, person=b"tripool-content")
    files = sorted(one for one in path.rglob(pattern) if one.is_file()) if path.is_dir() else [path]
    for file in files:
        name = file.relative_to(path).as_posix().encode() if path.is_dir() else b""
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).digest()
        said.update(len(name).to_bytes(4, "little") + name + digest)
    return said.hexdigest()


def json_hash(value: Any) -> str:
    said = json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    return hashlib.blake2b(said, digest_size=16, person=b"tripool-json").hexdigest()


def write_durably(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file that a crash leaves as it was or whole."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """What was renamed into a folder is found there after a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
