"""From a folder of documents to packed rows: split, mixed, tokenised. The same folder, the same rows."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tripool.checkpoints import open_checkpoint
from tripool.text import TextFiles
from tripool.train.config import TrainConfig, TrainError
from tripool.train.documents import Split, mixed, read_documents, split
from tripool.train.encode import Writer, encode_in_processes
from tripool.train.rows import Rows, pack

HELD_OUT_FILE = "held_out.jsonl"


@dataclass(frozen=True, slots=True)
class Prepared:
    rows: Rows
    held_out: Rows
    text: TextFiles
    digest: str
    """Of all rows: another folder, filter or tokenizer is another one."""


def prepare(config: TrainConfig, data: Path, out: Path, tell: Callable[[str], None]) -> Prepared:
    with open_checkpoint(config.data.text) as checkpoint:
        text = checkpoint.text
    parts = split(read_documents(data))
    _write_held_out(parts, out)
    documents = mixed(parts.train, config.mix)
    if not documents:
        raise TrainError("nothing is left to train on", hint="give more documents, or a mix that is not 0", file=data)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(one["kind"] for one in documents).most_common())
    tell(f"{len(documents)} documents ({kinds}), {len(parts.held_out)} held out")
    processes = os.cpu_count() or 1
    pad = Writer(text).pad
    rows, held_out = (
        pack(encode_in_processes(text, some, processes), config.data.row_tokens, pad)
        for some in (documents, parts.held_out)
    )
    if not len(rows):
        raise TrainError("no document can be written as tokens", hint="look at what they say", file=data)
    filled = rows.num_tokens / rows.tokens.numel()
    tell(f"{rows.num_tokens:,} tokens in {len(rows):,} rows, {filled:.1%} filled; {held_out.num_tokens:,} held out")
    return Prepared(rows, held_out, text, _digest(rows, held_out))


def _write_held_out(parts: Split, out: Path) -> None:
    """So that other models can be measured on the very same text."""
    lines = [json.dumps(dict(one), ensure_ascii=False) + "\n" for one in parts.held_out]
    (out / HELD_OUT_FILE).write_text("".join(lines), encoding="utf-8")


def _digest(*parts: Rows) -> str:
    hashed = blake2b(digest_size=16)
    for rows in parts:
        for values in (rows.tokens, rows.documents, rows.kinds):
            hashed.update(values.contiguous().numpy().data)
    return hashed.hexdigest()
