"""Reads the input file of a batch: checks every line, and says what is wrong with those that cannot be run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tripool.batch.types import MAX_LINE_BYTES, MAX_LINES, Line

_MAX_ERRORS = 50
_MAX_ID_CHARS = 512


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def read_lines(path: Path, batch_id: str, endpoint: str) -> tuple[list[Line], list[dict[str, Any]]]:
    """The lines of a batch, or what is wrong with its file: then nothing of it is run."""
    lines: list[Line] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, offset, raw in _raw_lines(path):
        wrong = None
        if number > MAX_LINES:
            errors.append(_error("too_many_requests", f"a batch may have {MAX_LINES} requests", number))
            break
        try:
            request = decode_line(raw)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            wrong = _error("invalid_json_line", f"not a request: {str(error)[:200]}", number)
        else:
            wrong = _wrong(request, endpoint, seen, number)
            seen.add(request.custom_id)
            lines.append(Line(batch_id, number, offset, len(raw), request.custom_id))
        if wrong is not None:
            errors.append(wrong)
            if len(errors) >= _MAX_ERRORS:
                break
    if not lines and not errors:
        errors.append(_error("empty_file", "the file has no requests", None))
    return lines, errors


def decode_line(raw: bytes) -> _Request:
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    return msgspec.json.decode(raw, type=_Request)


def read_bodies(path: Path, lines: Sequence[Line], max_bytes: int) -> list[bytes | Exception]:
    """The bodies of the first of the lines, up to the one with which they exceed `max_bytes`; or what is wrong."""
    bodies: list[bytes | Exception] = []
    num_bytes = 0
    try:
        with path.open("rb") as file:
            for line in lines:
                file.seek(line.offset)
                bodies.append(_body(file.read(line.size)))
                num_bytes += line.size
                if num_bytes > max_bytes:
                    break
    except OSError as error:
        bodies += [error] * (len(lines) - len(bodies))
    return bodies


def _body(raw: bytes) -> bytes | Exception:
    try:
        return bytes(decode_line(raw).body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # the file was changed
        return error


def _raw_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, bytes) of the lines that are not blank. A line that is too long is cut, and so refused."""
    offset = number = 0
    with path.open("rb") as file:
        while raw := file.readline(MAX_LINE_BYTES + 2):
            begin, offset = offset, offset + len(raw)
            if raw.strip():
                number += 1
                yield number, begin, raw.rstrip(b"\r\n")
            if len(raw) == MAX_LINE_BYTES + 2 and not raw.endswith(b"\n"):
                return


def _wrong(request: _Request, endpoint: str, seen: set[str], number: int) -> dict[str, Any] | None:
    if not 0 < len(request.custom_id) <= _MAX_ID_CHARS:
        return _error("invalid_custom_id", f"must have 1 to {_MAX_ID_CHARS} characters", number, "custom_id")
    if request.custom_id in seen:
        return _error("duplicate_custom_id", f"'{request.custom_id[:100]}' is used twice", number, "custom_id")
    if request.method != "POST":
        return _error("invalid_method", "must be POST", number, "method")
    if request.url != endpoint:
        return _error("mismatched_url", f"must be the batch's endpoint, {endpoint}", number, "url")
    if not bytes(request.body).lstrip().startswith(b"{"):
        return _error("invalid_body", "must be an object", number, "body")
    return None


def _error(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": param}
