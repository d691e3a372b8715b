"""Grammars are compiled in another thread: round robin by tenant, and nothing is left behind."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tripool.grammar.compiler import CompilePool

DEADLINE_S = 60.0


def test_tenants_are_round_robin_however_much_one_of_them_sends() -> None:
    pool: CompilePool[None] = CompilePool()
    gate, done = threading.Event(), []
    first = pool.submit("many", lambda: done.append("first") if gate.wait(DEADLINE_S) else None)
    waiting = [pool.submit("many", partial(done.append, f"many-{i}")) for i in range(5)]
    waiting += [pool.submit("few", partial(done.append, f"few-{i}")) for i in range(2)]
    gate.set()
    for future in (first, *waiting):
        future.result(DEADLINE_S)
    assert done.index("few-0") <= 2 and done.index("few-1") <= 4
    assert [name for name in done if name.startswith("many")] == [f"many-{i}" for i in range(5)]


def test_an_error_reaches_its_caller_and_no_other() -> None:
    pool: CompilePool[int] = CompilePool()
    failed = pool.submit("a", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(DEADLINE_S)
    assert pool.submit("a", lambda: 7).result(DEADLINE_S) == 7


def test_it_works_in_a_thread_of_its_own() -> None:
    pool: CompilePool[str] = CompilePool()
    names = {pool.submit("a", lambda: threading.current_thread().name).result(DEADLINE_S) for _ in range(3)}
    assert names == {"tripool-grammars"}
