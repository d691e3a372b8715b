"""Receives an uploaded file: multipart/form-data, written to disk as it arrives, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from tripool.batch.types import MAX_FILE_BYTES, StorageFull, StoreFailed
from tripool.errors import InvalidRequest
from tripool.gateway.body import BodyCutOff, BodyTooLarge, BodyTooSlow

_MAX_FIELDS = 8
_MAX_FIELD_BYTES = 4096
_MAX_HEAD_BYTES = 4096
_LEAST_BYTES_PER_S = 2**16
"""Slower clients are cut off: each of them holds a connection and a file."""
_SPARE_S = 30.0


async def receive_file(http: HttpRequest, path: Path, *, max_bytes: int) -> tuple[dict[str, str], str]:
    """Writes the field `file` to `path`; returns the other fields and the file's name."""
    kind, options = parse_options_header(http.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        hint = "send multipart/form-data with the fields 'file' and 'purpose'"
        raise InvalidRequest("the body is no upload", hint=hint, param="file")
    with _stored(path) as file:
        form = _Form(file, boundary, min(max_bytes, MAX_FILE_BYTES), is_quota=max_bytes < MAX_FILE_BYTES)
        try:
            async with asyncio.timeout(_SPARE_S + MAX_FILE_BYTES / _LEAST_BYTES_PER_S):
                async for part in http.stream():
                    await asyncio.to_thread(form.write, part)
        except TimeoutError as error:
            raise BodyTooSlow("the file did not arrive in time", hint="send it faster") from error
        except ClientDisconnect as error:
            raise BodyCutOff("the file is incomplete") from error
        except FormParserError as error:
            raise InvalidRequest(f"the upload cannot be read: {str(error)[:100]}", param="file") from error
    return form.end()


@contextmanager
def _stored(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("xb") as file:
            yield file
    except OSError as error:
        raise StoreFailed(f"the file cannot be stored: {error.strerror}", hint="see the server's log") from error


class _Form:
    """Parses the parts of a form; the file's bytes go to disk, the rest is bounded and kept."""

    def __init__(self, file: BinaryIO, boundary: bytes, max_bytes: int, *, is_quota: bool) -> None:
        self._file, self._max_bytes, self._is_quota = file, max_bytes, is_quota
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._num_bytes = 0
        self._name = self._value = b""
        self._head: dict[bytes, bytes] = {}
        self._target: bytearray | None = None
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )

    def write(self, part: bytes) -> None:
        self._parser.write(part)

    def end(self) -> tuple[dict[str, str], str]:
        if not self._ended or self._filename is None:
            raise InvalidRequest("the upload has no whole file", hint="send a field 'file'", param="file")
        fields = {name: bytes(value).decode(errors="replace") for name, value in self._fields.items()}
        return fields, self._filename

    def _end(self) -> None:
        self._ended = True

    def _begin(self) -> None:
        self._head, self._name, self._value, self._target = {}, b"", b"", None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_head()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_head()

    def _check_head(self) -> None:
        if len(self._name) + len(self._value) + sum(map(len, self._head.values())) > _MAX_HEAD_BYTES:
            raise InvalidRequest("a part of the upload has too long a head", param="file")

    def _header_end(self) -> None:
        self._head[self._name.lower()] = self._value
        self._name = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._head.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file" and self._filename is None:
            self._filename = options.get(b"filename", b"upload").decode(errors="replace")[:255]
        elif name == "file" or len(self._fields) >= _MAX_FIELDS:
            raise InvalidRequest("the upload has too many parts", hint="one file in each request", param="file")
        else:
            self._target = self._fields[name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._target is not None:
            self._target += data[start:end]
            if len(self._target) > _MAX_FIELD_BYTES:
                raise InvalidRequest("a field of the upload is too long", param="file")
            return
        self._num_bytes += end - start
        if self._num_bytes > self._max_bytes:
            if self._is_quota:
                raise StorageFull("there is no room for this file", hint="delete files that are no longer needed")
            raise BodyTooLarge(f"the file is larger than {self._max_bytes} bytes", hint="use several files")
        self._file.write(data[start:end])
