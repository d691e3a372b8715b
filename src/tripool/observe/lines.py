"""Formats one log record as one line of text or JSON. Pure: the time is the record's.

A line is safe for any client input: characters outside printable ASCII are escaped, so that no field can end or start a
line; anything that looks like an API key is masked; objects appear by type only. Once requests are served, exception
messages are left out, because they may quote a request: type and location tell where to look.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import traceback
from datetime import UTC, datetime
from typing import Any, Literal

Style = Literal["text", "json"]

MAX_LINE_BYTES = 4096
"""Atomic write size of a pipe: lines of several processes that share one are not mixed."""
_MAX_CHARS = (1000, 200, 40)
"""Limits for one text in a line, tried in turn until the line is short enough."""
_MAX_ITEMS = 32
_BIG = 2**63
_MAX_FRAMES, _MAX_CAUSE_FRAMES = 20, 4
_MAX_CAUSES = 4
_OWN = {"time", "level", "process", "pid", "logger", "message"}
_NO_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | _OWN | {"asctime", "taskName", "color_message"}
"""Attributes of every record, of every line, and one that uvicorn adds for terminals."""
_WORD = re.compile(r"[A-Za-z0-9_.:/@+~*,%-]+")
_PLAIN = re.compile(r"[ !#-<>-~]+")
"""A message that needs no quotes: printable, without `"` and `=`."""
_RUN = re.compile(r"[0-9A-Za-z_-]{20,}")
"""Shortest text that may contain a key or most of one."""
_KEY = re.compile(r"(?:(?<![0-9A-Za-z])tp-|tp-(?=[a-z_-]{0,19}[0-9A-Z]))[0-9A-Za-z_-]{20,}")
"""A key anywhere in a text. After other letters it must not consist of words alone: `http-request-of-alice`."""
_KEY_CHARS = 43
_CHANGES = re.compile("[a-z](?=[A-Z0-9])|[A-Z](?=[a-z0-9])|[0-9](?=[A-Za-z])")
_MIN_CHANGES = 12
"""Among 43 random characters, about 26 are followed by one of another class; in names only a few."""


class LineFormatter(logging.Formatter):
    """`process` and `pid` identify the writer."""

    def __init__(self, style: Style, process: str, pid: int) -> None:
        super().__init__()
        self._as, self._process, self._pid = style, process, pid
        self.serving = False
        """Set before the first request: from then on lines leave out exception messages."""

    def format(self, record: logging.LogRecord) -> str:
        for max_chars in _MAX_CHARS:
            line = self._line(record, self._fields(record, max_chars), max_chars)
            if len(line) < MAX_LINE_BYTES:  # all of it is ASCII
                return line
        return self._line(record, {"left_out": "too many fields"}, _MAX_CHARS[-1])

    def _line(self, record: logging.LogRecord, fields: dict[str, Any], max_chars: int) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        level, message = record.levelname.lower(), _cut(_message(record), max_chars)
        if self._as == "json":
            head = {"time": time, "level": level, "process": self._process, "pid": self._pid, "logger": record.name}
            line = json.dumps({**head, "message": message, **fields})
        else:
            text = message if _PLAIN.fullmatch(message) else json.dumps(message)
            listed = "".join([f" {name}={_text(value)}" for name, value in fields.items()])
            line = f"{time} {level.upper()} {self._process}[{self._pid}] {text}{listed}"
        return line

    def _fields(self, record: logging.LogRecord, max_chars: int) -> dict[str, Any]:
        given = record.__dict__
        fields = {
            name: _clean(value, max_chars)
            for name, value in given.items()
            if name not in _NO_FIELDS and value is not None
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields |= _raised(record.exc_info[1], max_chars, says=not self.serving)
        return fields


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.name.partition(".")[0] == "tripool":
        return text
    first = text.strip().partition("\n")[0]
    # asyncio appends arguments of callbacks and messages of exceptions.
    return first.partition("(")[0] if record.name == "asyncio" else first


def _clean(value: Any, max_chars: int) -> Any:
    if isinstance(value, str):
        return _cut(value, max_chars)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):  # includes True and False
        return value if -_BIG < value < _BIG else f"<{value.bit_length()} bits>"
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_clean(item, max_chars) for item in value[:_MAX_ITEMS]]
    return f"<{type(value).__name__}>"


def _cut(text: str, max_chars: int) -> str:
    """At most this long, without keys, and without lone surrogates, which are not valid JSON."""
    if len(text) <= max_chars:
        text = _RUN.sub(_masked, text)
    else:  # the end of the piece may be the start of a key
        piece = _RUN.sub(_masked, text[: max_chars + 2 * _KEY_CHARS])
        text = f"{piece[: min(max_chars, len(piece) - 2 * _KEY_CHARS)]}..."
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _masked(run: re.Match[str]) -> str:
    text = _KEY.sub("tp-***", run[0])
    both_cases = not text.islower() and not text.isupper()  # digests have one case
    is_random = both_cases and len(_CHANGES.findall(re.sub("[_-]", "", text))) >= _MIN_CHANGES
    return "***" if is_random and len(text) >= _KEY_CHARS else text


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) else json.dumps(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)
    return json.dumps(value)


def _raised(error: BaseException, max_chars: int, *, says: bool) -> dict[str, Any]:
    """Type and location of an exception and its causes, the root cause last."""
    kinds: list[str] = []
    places: list[str] = []
    at: BaseException | None = error
    while at is not None and len(kinds) < _MAX_CAUSES:
        frames = [*traceback.walk_tb(at.__traceback__)][-(_MAX_CAUSE_FRAMES if kinds else _MAX_FRAMES) :]
        places += [_place(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in frames]
        number = f"({errno.errorcode.get(at.errno, at.errno)})" if isinstance(at, OSError) and at.errno else ""
        kinds.append(_cut(f"{type(at).__name__}{number}{f': {at}' if says else ''}", max_chars))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return {"exception": " from ".join(kinds), "traceback": [_cut(place, max_chars) for place in places[:_MAX_ITEMS]]}


def _place(file: str, line: int, function: str) -> str:
    return f"{'/'.join(file.split('/')[-3:])}:{line} {function}"
