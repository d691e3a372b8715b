"""Reads an OpenAI stream of server-sent events into a sample: arrival times of text, and the reported usage."""

from __future__ import annotations

from typing import Any

import msgspec

from tripool.bench.samples import Sample
from tripool.bench.wire import ExchangeFailed

_MAX_LINE_BYTES = 4 * 2**20
_SHOWN = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class EventReader:
    """`feed` takes bytes in any pieces; `finish` raises if the stream ended wrongly."""

    def __init__(self, sample: Sample, started_s: float) -> None:
        self._sample, self._started_s = sample, started_s
        self._rest = b""
        self._refusal = b""
        self._done = False

    def feed(self, status: int, data: bytes, now_s: float) -> None:
        if status != 200:
            if len(self._refusal) < _MAX_LINE_BYTES:
                self._refusal += data
            return
        *lines, self._rest = (self._rest + data if self._rest else data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise ExchangeFailed("garbled", "a line of the stream does not end")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s - self._started_s)

    def finish(self, status: int) -> None:
        """Called once the answer is complete."""
        if status != 200:
            code, message = _error_of(self._refusal)
            raise ExchangeFailed(f"http {status}{' ' + code if code else ''}", message)
        if not self._done:
            raise ExchangeFailed("cut off", "the stream ended without [DONE]")

    def _take(self, event: bytes, at_s: float) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decode(event)
        except msgspec.MsgspecError as error:
            raise ExchangeFailed("garbled", f"{error}: {event[:_SHOWN].decode(errors='replace')}") from error
        if chunk.error is not None:
            code, message = _error_of(event)
            raise ExchangeFailed(f"stream {code}".rstrip(), message)
        if any(choice.has_text for choice in chunk.choices):
            self._sample.events_s.append(at_s)
        usage = chunk.usage
        if usage is not None:
            self._sample.prompt_tokens, self._sample.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self._sample.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _error_of(body: bytes) -> tuple[str, str]:
    """Code and message of an error, in any of the shapes that servers use."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return "", body[:_SHOWN].decode(errors="replace")
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    if not isinstance(error, dict):
        return "", str(error)[:_SHOWN]
    code = error.get("code")
    return (code if isinstance(code, str) else ""), str(error.get("message") or error.get("detail") or error)[:_SHOWN]
