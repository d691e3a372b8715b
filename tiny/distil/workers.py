"""Processes that make prompts and judge answers beside the device. They hold a tokenizer and no tensor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tiny.distil.flow import Job, Outcome, begin, finish
from tiny.distil.prompts import make_script
from tripool.text import TextFiles, Tokenizer


class Inline(Executor):
    """Works at once, in the caller's own process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


_worker_tokenizer: Tokenizer | None = None
"""Of this process. Workers get it once, because a vocabulary is too much to send with every batch."""


def _get_ready(files: TextFiles) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer(files)


def begin_batch(seed: int, first: int, count: int) -> Outcome:
    assert _worker_tokenizer is not None
    return begin([make_script(seed, number) for number in range(first, first + count)], _worker_tokenizer)


def finish_batch(answered: list[tuple[Job, list[int], bool]]) -> Outcome:
    assert _worker_tokenizer is not None
    return finish(answered, _worker_tokenizer)


def open_workers(files: TextFiles, count: int) -> Executor:
    if count == 0:
        _get_ready(files)
        return Inline()
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_get_ready, initargs=(files,))
