"""Response bodies in the format of Anthropic's Messages: content blocks, and named events in a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tripool.answer import Answer, Delta
from tripool.core import Usage
from tripool.errors import InvalidRequest, TripoolError
from tripool.gateway.body import decode_object
from tripool.gateway.job import Job
from tripool.gateway.refusals import error_shape
from tripool.gateway.respond import EVENT_STREAM, Facts, encode
from tripool.gateway.tool_parser import CallBegins, Content, Piece, Thought

_AFTER = b"}}\n\n"


class AnthropicFormatter:
    """A job has one answer here. A block is opened with its first text and closed before the next."""

    stream_type = EVENT_STREAM

    def __init__(self, job: Job, *, model: str) -> None:
        self._job, self._model = job, model
        self._parser = job.parser()
        self._block = -1
        """Index of the newest block."""
        self._kind: str | None = None
        """Its type; None when it is closed."""
        self._before: bytes | None = None
        """Bytes before the text in an event of plain text, once nothing else can follow."""

    def take(self, index: int, delta: Delta) -> None:
        self._parser.push(delta.text, last=delta.finish_reason is not None)

    def whole(self, answers: Sequence[Answer], facts: Facts) -> Iterator[bytes]:
        parsed = self._parser.parsed
        content: list[dict[str, Any]] = []
        if parsed.reasoning:
            content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.content:
            content.append({"type": "text", "text": parsed.content})
        content += [self._call(number, call.name, _parsed(call.arguments)) for number, call in enumerate(parsed.calls)]
        ended = self._ended(answers[0])
        yield encode(self._message(content, answers[0].usage) | ended | {"tripool": facts})

    def opening(self, index: int, answer: Answer) -> bytes:
        # No token counts before the first one is sent.
        usage = Usage(answer.usage.prompt_tokens, 0, answer.usage.cached_tokens)
        message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": message})

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        if self._before is not None and delta.finish_reason is None:
            return self._before + encode(delta.text) + _AFTER if delta.text else None
        last = delta.finish_reason is not None
        events = b"".join(map(self._say, self._parser.push(delta.text, last=last)))
        if last:
            events += self._close()
        elif self._parser.plain and self._kind == "text":
            head = f'{{"type":"content_block_delta","index":{self._block},"delta":{{"type":"text_delta","text":'
            self._before = b"event: content_block_delta\ndata: " + head.encode()
        return events or None

    def closing(self, answers: Sequence[Answer], facts: Facts) -> bytes:
        delta = {"delta": self._ended(answers[0]), "usage": _usage(answers[0].usage), "tripool": facts}
        return _event("message_delta", delta) + _event("message_stop", {})

    def error(self, error: TripoolError) -> bytes:
        return _event("error", error_shape(error, "anthropic"))

    def _say(self, piece: Piece) -> bytes:
        if isinstance(piece, Content):
            opened = self._open("text", {"type": "text", "text": ""})
            return opened + self._delta({"type": "text_delta", "text": piece.text})
        if isinstance(piece, Thought):
            opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return opened + self._delta({"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, CallBegins):
            return self._close() + self._open("tool_use", self._call(piece.index, piece.name, {}))
        return self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def _open(self, kind: str, block: Mapping[str, Any]) -> bytes:
        if self._kind == kind:
            return b""
        closed = self._close()
        self._kind = kind
        self._block += 1
        return closed + _event("content_block_start", {"index": self._block, "content_block": block})

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _event("content_block_stop", {"index": self._block})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta})

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        head = {"id": self._job.id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": content, "usage": _usage(usage)}

    def _call(self, number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{self._job.key}{number:02x}", "name": name, "input": arguments}

    def _ended(self, answer: Answer) -> dict[str, Any]:
        """The stop reason in Anthropic's terms."""
        stop_string, finish = answer.stop_string(0), answer.finish_reasons[0]
        if finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._parser.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _parsed(arguments: str) -> dict[str, Any]:
    """Incomplete or too deeply nested arguments become an empty object."""
    try:
        return decode_object(arguments, "the model's arguments")
    except InvalidRequest:
        return {}


def _usage(usage: Usage) -> dict[str, int]:
    """Input tokens are counted by where they came from."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _event(name: str, body: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: ".encode() + encode({"type": name} | body) + b"\n\n"
