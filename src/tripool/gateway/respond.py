"""The shapes of answers, field by field as OpenAI's clients expect them. Knows no socket."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tripool.answer import Answer, Delta
from tripool.core import Choice, TokenLogprobs, Usage
from tripool.errors import InvalidRequest, TripoolError
from tripool.gateway.calls import CallBegins, CallReader, Content, Piece, read_calls
from tripool.gateway.parse import Job
from tripool.text import Tokenizer

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class Shapes:
    """The bodies that answer one job: `whole` at once, or `chunk` by chunk."""

    def __init__(self, job: Job, tokenizer: Tokenizer, *, model: str, created_s: int) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._head = {"id": job.id, "object": self._object_name(), "created": created_s, "model": model}
        self._readers: dict[int, CallReader] = {}
        """Of the answers that may hold tool calls, per choice."""
        self._token_chars: dict[int, int] = {}
        """Characters of the tokens streamed so far, per choice: completion logprobs say where each token begins."""

    def whole(self, answers: Sequence[Answer]) -> bytes:
        n = self._job.requests[0].params.n
        choices = [
            self._choice(position * n + choice.index, choice)
            for position, answer in enumerate(answers)
            for choice in answer.generation().choices
        ]
        return _json(self._head | {"choices": choices, "usage": usage_shape(answers)})

    def opening(self, index: int) -> bytes:
        """A chat stream first says whose turn it is, once per choice."""
        content = None if self._job.calls else ""
        return self._chunk(self._chunk_choice(index, {"role": "assistant", "content": content}, None, None))

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """None when the token brought nothing to show, as in the middle of a character."""
        if not delta.text and delta.logprobs is None and delta.finish_reason is None:
            return None
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs([delta.token_id], [delta.logprobs], self._token_chars.get(index, 0))
            shown = len(self._tokenizer.token_text(delta.token_id))
            self._token_chars[index] = self._token_chars.get(index, 0) + shown
        if not self._job.chat:
            return self._chunk(self._chunk_choice(index, delta.text, logprobs, delta.finish_reason))
        parts, finish_reason = self._chat_parts(index, delta)
        if logprobs is not None and not parts:
            parts = [{"content": ""}]
        chunks = b""
        for part in parts:
            chunks += self._chunk(self._chunk_choice(index, part, logprobs, None))
            logprobs = None
        if finish_reason is not None:
            chunks += self._chunk(self._chunk_choice(index, {}, None, finish_reason))
        return chunks or None

    def closing(self, answers: Sequence[Answer]) -> bytes:
        usage = b""
        if self._job.include_usage:
            usage = _event(self._head | {"choices": [], "usage": usage_shape(answers)})
        return usage + b"data: [DONE]\n\n"

    def _chat_parts(self, index: int, delta: Delta) -> tuple[list[dict[str, Any]], str | None]:
        """What a delta adds to a chat message, in one or several steps; and why the message ends, if it does."""
        if not self._job.calls:
            return [{"content": delta.text}] if delta.text else [], delta.finish_reason
        reader = self._readers.setdefault(index, CallReader())
        pieces = reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.finish()
        parts = [self._part(index, piece) for piece in pieces]
        return parts, _finish_reason(delta.finish_reason, reader.num_calls > 0 and reader.complete)

    def _part(self, index: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, CallBegins):
            return {"tool_calls": [{"index": piece.index, **self._call(index, piece.index, piece.name, "")}]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _call(self, index: int, number: int, name: str, arguments: str) -> dict[str, Any]:
        call_id = f"call_{self._job.id.rpartition('-')[2]}{index:02x}{number:02x}"
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _object_name(self) -> str:
        if not self._job.chat:
            return "text_completion"
        return "chat.completion.chunk" if self._job.stream else "chat.completion"

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        no_usage = {"usage": None} if self._job.include_usage else {}
        return _event(self._head | {"choices": [choice]} | no_usage)

    def _chunk_choice(self, index: int, delta: object, logprobs: object, finish_reason: str | None) -> dict[str, Any]:
        content = "delta" if self._job.chat else "text"
        return {"index": index, content: delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        said: dict[str, Any] = {"text": choice.text}
        finish_reason: str | None = choice.finish_reason
        if self._job.chat:
            said = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        if self._job.calls:
            read = read_calls(choice.text)
            calls = [self._call(index, number, call.name, call.arguments) for number, call in enumerate(read.calls)]
            said["message"] |= {"content": read.content or None} | ({"tool_calls": calls} if calls else {})
            finish_reason = _finish_reason(choice.finish_reason, bool(calls) and read.complete)
        logprobs = self._logprobs(choice.token_ids, choice.logprobs, 0)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, text_offset: int
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        pairs = list(zip(token_ids, logprobs, strict=True))
        if self._job.chat:
            return {"content": [self._chat_logprob(*pair) for pair in pairs], "refusal": None}
        return self._completion_logprobs(pairs, text_offset)

    def _chat_logprob(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._scored(top_id, logprob) for top_id, logprob in logprobs.top]
        return self._scored(token_id, logprobs.chosen) | {"top_logprobs": top}

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(raw)}

    def _completion_logprobs(self, pairs: Iterable[tuple[int, TokenLogprobs]], text_offset: int) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprobs in pairs:
            token = self._tokenizer.token_text(token_id)
            scores = {self._tokenizer.token_text(i): max(score, _LEAST_LOGPROB) for i, score in logprobs.top}
            columns["tokens"].append(token)
            columns["token_logprobs"].append(max(logprobs.chosen, _LEAST_LOGPROB))
            # The chosen token is always listed, also when it was not among the likeliest.
            columns["top_logprobs"].append({token: max(logprobs.chosen, _LEAST_LOGPROB)} | scores)
            columns["text_offset"].append(text_offset)
            text_offset += len(token)
        return columns


def _finish_reason(finish_reason: str | None, called: bool) -> str | None:
    """An answer that was cut off, by its length or by a stop string inside a call, calls nothing."""
    return "tool_calls" if finish_reason == "stop" and called else finish_reason


def usage_shape(answers: Iterable[Answer]) -> dict[str, Any]:
    usages: list[Usage] = [answer.usage for answer in answers]
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    rejected = sum(usage.draft_tokens for usage in usages) - accepted
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
        "total_tokens": sum(usage.total_tokens for usage in usages),
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
    }


def error_shape(error: TripoolError) -> dict[str, Any]:
    param = error.param if isinstance(error, InvalidRequest) else None
    return error_body(error.status, str(error), code=error.code, param=param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_event(error: TripoolError) -> bytes:
    """Inside a stream whose status has already gone out."""
    return _event(error_shape(error))


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _json(body) + b"\n\n"


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
