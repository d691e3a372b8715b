"""Response bodies in Ollama's format: one JSON object, or one per line in a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from tripool.answer import Answer, Delta
from tripool.errors import InvalidRequest, TripoolError
from tripool.gateway.body import decode_object
from tripool.gateway.job import Job
from tripool.gateway.refusals import error_shape
from tripool.gateway.respond import Facts, encode
from tripool.gateway.tool_parser import CallBegins, Content, ParsedOutput, Piece, Thought

_NS_PER_MS = 10**6


class OllamaFormatter:
    """A job has one answer here. Calls are sent whole, as this API has them."""

    stream_type = b"application/x-ndjson"

    def __init__(self, job: Job, *, model: str, created_s: int) -> None:
        self._chat = job.api == "ollama_chat"
        self._head = {"model": model, "created_at": datetime.fromtimestamp(created_s, UTC).isoformat()}
        self._parser = job.parser()
        self._num_called = 0
        """Calls that were sent."""

    def take(self, index: int, delta: Delta) -> None:
        self._parser.push(delta.text, last=delta.finish_reason is not None)

    def whole(self, answers: Sequence[Answer], facts: Facts) -> Iterator[bytes]:
        parsed = self._parser.parsed
        calls = self._calls(parsed, len(parsed.calls) if parsed.complete else max(0, len(parsed.calls) - 1))
        yield encode({**self._said(parsed.content, parsed.reasoning, calls), **self._ended(answers[0], facts)})

    def opening(self, index: int, answer: Answer) -> bytes:
        return b""

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        last = delta.finish_reason is not None
        lines = b"".join(map(self._line, self._parser.push(delta.text, last=last)))
        if last and self._parser.parsed.complete:
            lines += self._finished_calls(len(self._parser.parsed.calls))
        return lines or None

    def closing(self, answers: Sequence[Answer], facts: Facts) -> bytes:
        return encode({**self._said("", "", []), **self._ended(answers[0], facts)}) + b"\n"

    def error(self, error: TripoolError) -> bytes:
        return encode(error_shape(error, "ollama")) + b"\n"

    def _line(self, piece: Piece) -> bytes:
        if isinstance(piece, Content):
            return encode({**self._said(piece.text, "", []), "done": False}) + b"\n"
        if isinstance(piece, Thought):
            return encode({**self._said("", piece.text, []), "done": False}) + b"\n"
        return self._finished_calls(piece.index) if isinstance(piece, CallBegins) else b""

    def _finished_calls(self, num_finished: int) -> bytes:
        calls = self._calls(self._parser.parsed, num_finished)[self._num_called :]
        self._num_called = num_finished
        return encode({**self._said("", "", calls), "done": False}) + b"\n" if calls else b""

    def _calls(self, parsed: ParsedOutput, num_finished: int) -> list[dict[str, Any]]:
        return [
            {"function": {"index": number, "name": call.name, "arguments": _object(call.arguments)}}
            for number, call in enumerate(parsed.calls[:num_finished])
        ]

    def _said(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thought = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {**self._head, "response": text, **thought}
        called = {"tool_calls": calls} if calls else {}
        return {**self._head, "message": {"role": "assistant", "content": text, **thought, **called}}

    def _ended(self, answer: Answer, facts: Facts) -> dict[str, Any]:
        timing, usage = facts["timing"], answer.usage
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reasons[0] == "length" else "stop",
            "total_duration": int(timing["total"] * _NS_PER_MS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(timing["prefill"] * _NS_PER_MS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(timing["decode"] * _NS_PER_MS),
            **({"tripool": facts} if "unenforced" in facts else {}),
        }


def loaded(model: str, created_s: int, *, chat: bool) -> bytes:
    """The answer to a body that only loads a model."""
    said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    created_at = datetime.fromtimestamp(created_s, UTC).isoformat()
    return encode({"model": model, "created_at": created_at, **said, "done": True, "done_reason": "load"})


def _object(arguments: str) -> dict[str, Any]:
    try:
        return decode_object(arguments, "the model's arguments")
    except InvalidRequest:
        return {}
