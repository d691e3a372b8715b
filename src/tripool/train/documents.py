"""Documents: conversations to learn from, one JSON object a line. Says which are held out and how often each is used.

A document whose hash falls on the hold-out is never trained, in any run and under any mix, so that a loss on those
means the same for every model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tripool.train.config import TrainError

ROLES = ("system", "user", "assistant")
HELD_OUT_OF = 200
"""One document in so many is held out."""

Document = Mapping[str, Any]
"""{"kind": ..., "messages": [{"role": ..., "content": ...}], "cut": whether the last message ends too early}."""


@dataclass(frozen=True, slots=True)
class Split:
    train: list[Document]
    held_out: list[Document]


def read_documents(folder: Path) -> list[Document]:
    """Of all `*.jsonl` files of a folder, in the order of their names."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        hint = "give a folder of *.jsonl documents; docs/training.md says what is in one"
        raise TrainError("no *.jsonl files here", hint=hint, file=folder)
    return [document for file in files for document in _lines(file)]


def _lines(file: Path) -> Iterator[Document]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
            except ValueError as error:
                hint = "each line must be one JSON object"
                raise TrainError(f"line {number} is not JSON: {error}", hint=hint, file=file) from error
            yield _checked(value, file, number)


def _checked(value: Any, file: Path, number: int) -> Document:
    messages = value.get("messages") if isinstance(value, dict) else None
    whole = isinstance(messages, list) and messages and isinstance(value.get("kind", ""), str)
    if not whole or not all(_is_message(message) for message in messages or ()):
        hint = f"it needs 'kind' and 'messages', each with a role of {', '.join(ROLES)} and a text as content"
        raise TrainError(f"line {number} is not a document", hint=hint, file=file)
    return {"kind": value.get("kind", ""), "messages": messages, "cut": bool(value.get("cut", False))}


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def digest(document: Document) -> int:
    """Stable: of roles and contents alone."""
    hashed = blake2b(digest_size=8)
    for message in document["messages"]:
        hashed.update(f"{message['role']}\0{message['content']}\0".encode("utf-8", "surrogatepass"))
    return int.from_bytes(hashed.digest(), "big")


def is_held_out(document: Document) -> bool:
    return digest(document) % HELD_OUT_OF == 0


def split(documents: Iterable[Document]) -> Split:
    found = Split([], [])
    for document in documents:
        (found.held_out if is_held_out(document) else found.train).append(document)
    return found


def mixed(documents: Sequence[Document], mix: Mapping[str, float]) -> list[Document]:
    """Each document as often as its kind says. Of 2.5, half of the documents come thrice: those the hash chooses."""
    found: list[Document] = []
    for document in documents:
        whole, part = divmod(mix.get(document["kind"], 1.0), 1.0)
        once_more = digest(document) // HELD_OUT_OF % 1000 < part * 1000
        found += [document] * (int(whole) + once_more)
    return found
