"""Usage log: tokens used by hour, tenant, key and model, gathered in memory and written to the key store in batches.

A batch is written within a second of its first request. A killed server loses at most that second; an orderly shutdown
loses nothing. While the store is missing or cannot be written, the batch waits; the store is never created here. When
too many hours have accumulated they are merged: a batch has at most a few rows per key and model.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from tripool.core import Usage
from tripool.tenants.key_store import KeyStore, KeyStoreError
from tripool.tenants.key_table import Caller

HOUR_S = 3600
_BATCH_S = 0.5
_MAX_LINES = 10_000
"""Of a batch that cannot be written: beyond it, usage is added to the earliest hour of its key and model."""
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
"""Columns of the table, besides those of a line. Cached prompt tokens did not have to be computed."""
_WRITE = "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in _SUMS
)
_Line = tuple[int, str, str, str]
"""Hour, tenant, key and model."""
_ONCE = "CREATE TABLE IF NOT EXISTS counted (id TEXT PRIMARY KEY, at_s INTEGER NOT NULL) STRICT, WITHOUT ROWID"
_ONCE_S = 86_400
"""How long it is known that something was counted."""


_Once = tuple[str, _Line, Counter[str], Callable[[], object]]
"""Its id, its line, its sums, and what to call when it is written."""


class Counted(Protocol):
    """Usage that may be said to several logs of one key store, and counts once: see `router/kept_types.py`."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def caller(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def usages(self) -> Sequence[Usage]: ...

    @property
    def begins(self) -> bool: ...


By = Literal["hour", "day", "model", "tenant", "key"]
_GROUPS: dict[By, str] = {
    "hour": "hour_s",
    "day": "hour_s / 86400 * 86400",
    "model": "model",
    "tenant": "tenant",
    "key": "key",
}


class UsageLog:
    """`add` may be called from any thread and never waits for the disk: a background thread writes."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._waiting: dict[_Line, Counter[str]] = {}
        """Sums of each line, by column."""
        self._last_used_s: dict[str, float] = {}
        self._once: list[_Once] = []
        self._writing = threading.Lock()
        """One batch at a time: `flush` returns when everything added before it is on disk."""
        self._some = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._main, name="tripool-meter", daemon=True)
        self._thread.start()

    def add(self, caller: Caller, model: str, usages: Sequence[Usage]) -> None:
        """One HTTP request, with the usage of each of its prompts."""
        now_s = self._clock()
        line = (_hour_of(now_s), caller.tenant.name, caller.key, model)
        with self._lock:
            if line not in self._waiting and len(self._waiting) >= _MAX_LINES:
                self._sum_hours()
            used = self._waiting.setdefault(line, Counter())
            used.update(_sums(usages, 1))
            self._last_used_s[caller.key] = now_s
        self._some.set()

    def count(self, count: Counted, done: Callable[[], object]) -> None:
        """`done` is called, from another thread, when it is on disk."""
        now_s = self._clock()
        line = (_hour_of(now_s), count.tenant, count.caller, count.model)
        with self._lock:
            self._once.append((count.id, line, _sums(count.usages, int(count.begins)), done))
            self._last_used_s[count.caller] = now_s
        self._some.set()

    def flush(self) -> None:
        """Write what was added so far; on failure raises KeyStoreError and keeps it."""
        with self._writing:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
                last_used_s, self._last_used_s = self._last_used_s, {}
                once, self._once = self._once, []
            if not (waiting or once):
                return
            try:
                self._write(waiting, once, last_used_s)
            except KeyStoreError:
                self._keep(waiting, once, last_used_s)
                raise
        for _, _, _, done in once:
            done()

    def close(self) -> None:
        """Write the rest; on failure raises KeyStoreError, and the rest is lost."""
        self._ending.set()
        self._some.set()
        self._thread.join()
        self.flush()

    def _write(self, waiting: dict[_Line, Counter[str]], once: Sequence[_Once], last_used_s: dict[str, float]) -> None:
        rows = [(*line, *(used[name] for name in _SUMS)) for line, used in waiting.items()]
        with KeyStore(self._path) as key_store, key_store.writing() as db:
            if once:
                now_s = int(self._clock())
                db.execute(_ONCE)
                db.execute("DELETE FROM counted WHERE at_s < ?", (now_s - _ONCE_S,))
                for count_id, line, used, _ in once:
                    if db.execute("INSERT OR IGNORE INTO counted VALUES (?, ?)", (count_id, now_s)).rowcount:
                        rows.append((*line, *(used[name] for name in _SUMS)))
            db.executemany(_WRITE, rows)
            marks = [(at_s, key) for key, at_s in last_used_s.items()]
            db.executemany("UPDATE keys SET last_used_s = ? WHERE prefix = ?", marks)

    def _keep(self, waiting: dict[_Line, Counter[str]], once: Sequence[_Once], last_used_s: dict[str, float]) -> None:
        with self._lock:
            self._once = [*once, *self._once]
            for line, used in waiting.items():
                self._waiting.setdefault(line, Counter()).update(used)
            self._last_used_s = last_used_s | self._last_used_s
        self._some.set()

    def _sum_hours(self) -> None:
        """Sums stay exact; only the hour becomes coarser."""
        summed: dict[tuple[str, str, str], tuple[int, Counter[str]]] = {}
        for (hour_s, *rest), used in sorted(self._waiting.items(), key=lambda item: item[0]):
            tenant, key, model = rest
            summed.setdefault((tenant, key, model), (hour_s, Counter()))[1].update(used)
        self._waiting = {(hour_s, *line): used for line, (hour_s, used) in summed.items()}

    def _main(self) -> None:
        while not self._ending.is_set():
            self._some.wait()
            self._ending.wait(_BATCH_S)
            self._some.clear()
            try:
                self.flush()
            except KeyStoreError:
                continue  # kept, and retried with the next batch


def _hour_of(now_s: float) -> int:
    return int(now_s) // HOUR_S * HOUR_S


def _sums(usages: Sequence[Usage], requests: int) -> Counter[str]:
    tokens = {name: sum(getattr(usage, name) for usage in usages) for name in _SUMS[1:]}
    return Counter({"requests": requests, **tokens})


def read_usage(
    key_store: KeyStore, *, tenant: str | None = None, since_s: float | None = None, by: By = "day"
) -> list[dict[str, Any]]:
    """Sums, one row per tenant and group; hours and days are UTC, given by their first second."""
    group = _GROUPS[by]
    columns = "tenant" if by == "tenant" else f"tenant, {group}"
    where, values = ["1"], list[Any]()
    if tenant is not None:
        where.append("tenant = ?")
        values.append(tenant)
    if since_s is not None:
        where.append("hour_s >= ?")
        values.append(int(since_s) // HOUR_S * HOUR_S)
    sums = ", ".join(f"sum({name})" for name in _SUMS)
    query = f"SELECT {columns}, {sums} FROM usage WHERE {' AND '.join(where)} GROUP BY {columns} ORDER BY {columns}"
    names = ["tenant", *([by] if by != "tenant" else []), *_SUMS]
    with key_store.reading() as db:
        return [dict(zip(names, row, strict=True)) for row in db.execute(query, values)]
