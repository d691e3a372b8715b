"""The log of one process: everything logged, warned or raised without a handler, on stderr.

Lines are formatted where they are logged and written by a thread, so a blocked reader of stderr blocks only that
thread. Lines that do not fit into the queue meanwhile are dropped and counted; the count is the next line.

Rooms log with `logging.getLogger("tripool.ROOM")`, a fixed message, and fields in `extra`; they need nothing from here.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self

from tripool.observe.lines import LineFormatter, Style

Level = Literal["debug", "info", "warning", "error"]

_LOG = logging.getLogger("tripool.log")
_STDERR = 2
_MAX_WAITING = 10_000
_END_S = 1.0
"""Longest wait for the last lines when the process ends."""
_RETRY_S = 1.0
_AT_WILL = ("tripool.connections", "tripool.unauthenticated")
_WINDOW_S, _PER_WINDOW, _MAX_KINDS = 10.0, 5, 100


class LineWriter:
    """Writes from a thread of its own. `put` never waits; `close` does, within a bound."""

    def __init__(self, fd: int, *, max_waiting: int = _MAX_WAITING) -> None:
        self._fd, self._max_waiting = fd, max_waiting
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._ending = False
        self._thread = threading.Thread(target=self._main, name="tripool-log", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        return self._lines.qsize() >= self._max_waiting

    def put(self, line: str) -> None:
        self._lines.put(line.encode("ascii", "backslashreplace") + b"\n")

    def close(self, timeout_s: float = _END_S) -> None:
        self._lines.put(None)
        self._thread.join(timeout_s)
        self._ending = True

    def _main(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)

    def _write(self, data: bytes) -> None:
        while data and not self._ending:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process made the shared terminal or pipe non-blocking
                select.select([], [self._fd], [], _RETRY_S)
            except OSError:  # the reader is gone or the disk is full: there is nowhere to report it
                return


class LogHandler(logging.Handler):
    def __init__(self, lines: LineFormatter, writer: LineWriter) -> None:
        super().__init__()
        self.setFormatter(lines)
        self._writer = writer
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock."""
        if self._writer.full:
            self._num_dropped += 1
            return
        if self._num_dropped:
            self._writer.put(self._own_line(logging.WARNING, "lines were dropped", {"lines": self._num_dropped}))
            self._num_dropped = 0
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 (logging must never fail its caller)
            place = {"file": record.filename, "line": record.lineno}
            line = self._own_line(logging.ERROR, "a line could not be made", place)
        self._writer.put(line)

    def _own_line(self, level: int, message: str, fields: Mapping[str, object]) -> str:
        return self.format(_LOG.makeRecord(_LOG.name, level, "", 0, message, (), None, extra=fields))


class Bounded:
    """Rate limit for lines that clients can cause at will and for lines of libraries: a few of a kind in ten seconds.
    Of requests, this applies only to those refused before their sender was known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, str], list[float]] = {}
        """(start of the window, lines in it) by kind."""

    def __call__(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == "tripool" and record.name not in _AT_WILL:
            return True
        now_s, kind = self._clock(), (record.name, str(record.msg)[:100] + str(getattr(record, "error", "")))
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        seen = self._kinds.setdefault(kind, [now_s, 0])
        if now_s - seen[0] >= _WINDOW_S:
            if seen[1] > _PER_WINDOW:
                record.__dict__["more"] = int(seen[1]) - _PER_WINDOW
            seen[:] = [now_s, 0]
        seen[1] += 1
        return seen[1] <= _PER_WINDOW


class Log:
    """Installs the log of the process inside `with`; restores the previous handlers at the end."""

    def __init__(self, process: str, level: Level, style: Style, *, fd: int = _STDERR) -> None:
        self._level, self._fd = level, fd
        self._lines = LineFormatter(style, process, os.getpid())
        self._undo: list[Callable[[], Any]] = []

    def serving(self) -> None:
        """From now on leave out exception messages, which may quote a request."""
        self._lines.serving = True

    def __enter__(self) -> Self:
        root, ours = logging.getLogger(), logging.getLogger("tripool")
        writer = LineWriter(self._fd)
        handler = LogHandler(self._lines, writer)
        handler.addFilter(Bounded())
        before = ours.level, threading.excepthook, sys.unraisablehook

        def undo() -> None:
            root.removeHandler(handler)
            logging.captureWarnings(False)
            threading.excepthook, sys.unraisablehook = before[1:]
            ours.setLevel(before[0])
            writer.close()

        self._undo.append(undo)
        root.addHandler(handler)
        ours.setLevel(self._level.upper())
        logging.captureWarnings(True)
        threading.excepthook, sys.unraisablehook = _thread_ended, _unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.pop()()


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        raised = (args.exc_type, args.exc_value, args.exc_traceback)
        name = "?" if args.thread is None else args.thread.name
        _LOG.error("a thread was ended by an exception", exc_info=raised, extra={"thread_name": name})


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    if args.exc_value is not None:
        raised = (args.exc_type, args.exc_value, args.exc_traceback)
        _LOG.error("an exception could not be raised", exc_info=raised)
