"""Tables for tests, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tripool.batch import LocalModel, Summary, TableJob, run_table
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.llm import LLM

PROMPT, OPTIONS = "Say: {{ text }}", {"max_tokens": 6}


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """A text stands for itself, whatever it is; anything else for its JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def questions(count: int) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"Question {n}"} for n in range(count)]


def with_bad_ones(count: int, every: int = 100) -> list[Any]:
    """One row in `every` is bad: no JSON, no object, no text, or a text longer than the context, in turn."""
    rows: list[Any] = list(questions(count))
    bad = ("{", "[1]", {"id": -1}, {"id": -1, "text": "long " * 3000})
    for turn, at in enumerate(range(every // 2, count, every)):
        rows[at] = bad[turn % len(bad)]
    return rows


def run(path: Path | str, out: Path, **fields: Any) -> Summary:
    given: dict[str, Any] = {"prompt": PROMPT, "sampling": OPTIONS} | fields
    with LLM(PagedFake(fake_text(), context_tokens=2048)) as llm:
        return run_table(TableJob(inputs=(str(path),), out=str(out), **given), LocalModel(llm))


def written(out: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(out.glob("part-*")))


def answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written(out).splitlines()]


def bad_rows(out: Path) -> list[dict[str, Any]]:
    paths = sorted((out / "_bad").iterdir())
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def whole(out: Path) -> dict[str, bytes]:
    """Every file of a finished run."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
