"""Logging of the serving commands: their options, and the log of errors that end them."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from tripool.errors import TripoolError
from tripool.observe.lines import Style
from tripool.observe.log import Level, Log

LogLevel = Annotated[Level, typer.Option(help="Least serious lines of the log, which is on stderr.")]
LogFormat = Annotated[Style, typer.Option(help="One line of text, or one JSON object, for each.")]

_LOG = logging.getLogger("tripool.serve")


@dataclass(frozen=True, slots=True)
class LogOptions:
    level: Level = "info"
    style: Style = "text"

    def argv(self) -> tuple[str, ...]:
        """For a process with the same logging."""
        return "--log-level", self.level, "--log-format", self.style


@contextmanager
def logged(process: str, options: LogOptions) -> Iterator[Log]:
    """`process` names it in every line. Whatever ends the block is logged, and printed nowhere else.

    Except that with plain lines, an error that a user can fix is one plain line, printed by `main`.
    """
    with Log(process, options.level, options.style) as log:
        try:
            yield log
        except TripoolError as error:
            if options.style == "text":
                raise
            _LOG.error("ended by an error", extra={"error": error.code, "reason": str(error)})
            raise SystemExit(2) from error
        except Exception as error:  # (logged here: the interpreter would print the message, which may quote a request)
            _LOG.error("ended by an exception", exc_info=True)
            raise SystemExit(1) from error


@contextmanager
def on_signals(handle: Callable[[int], None], *signals: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, lambda number, frame: handle(number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(number: int) -> None:
    """On SIGTERM: by an exception, so that everything is closed; the signal itself would end the process at once."""
    raise SystemExit(0)
