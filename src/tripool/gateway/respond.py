"""Response bodies in OpenAI's format. Independent of sockets and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tripool.answer import Answer, Choice, Delta
from tripool.core import TokenLogprobs, Usage
from tripool.errors import TripoolError
from tripool.gateway.job import Job
from tripool.gateway.logprobs import (
    ChatScores,
    CompletionScores,
    IdNames,
    Names,
    PromptScores,
    Scores,
    chat_logprobs,
    completion_logprobs,
)
from tripool.gateway.output_parser import OutputParser
from tripool.gateway.refusals import error_shape
from tripool.gateway.tool_parser import CallBegins, Content, ParsedOutput, Piece, Thought
from tripool.text import Tokenizer

Facts = Mapping[str, Any]
"""Fields besides the dialect's own: request id and timing."""

encode = msgspec.json.Encoder().encode
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class Formatter(Protocol):
    """Formats the response of one job in one dialect: either every delta to `take` and then `whole`; or `opening` for
    each choice before its first `chunk`, and `closing` (or `error`) at the end."""

    stream_type: bytes
    """Content type of a stream."""

    def take(self, index: int, delta: Delta) -> None: ...

    def whole(self, answers: Sequence[Answer], facts: Facts) -> Iterator[bytes]:
        """One body in pieces, each quick to make."""
        ...

    def opening(self, index: int, answer: Answer) -> bytes: ...

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """None when the token adds nothing to show, as in the middle of a character."""
        ...

    def closing(self, answers: Sequence[Answer], facts: Facts) -> bytes: ...

    def error(self, error: TripoolError) -> bytes:
        """In a stream whose status was already sent."""
        ...


class OpenAIFormatter:
    """OpenAI's dialect. A token of plain content costs one concatenation; everything else is built as a dict."""

    stream_type = EVENT_STREAM

    def __init__(
        self, job: Job, tokenizer: Tokenizer, answers: Sequence[Answer], *, model: str, created_s: int
    ) -> None:
        self._job, self._tokenizer, self._answers = job, tokenizer, answers
        self._names: Names = IdNames(tokenizer) if job.tokens_as_ids else tokenizer
        self._chat = job.api == "chat"
        self._head = {"id": job.id, "object": self._object_name(), "created": created_s, "model": model}
        self._parsers: dict[int, OutputParser] = {}
        self._scores: dict[int, Scores] = {}
        """For a whole answer with log-probabilities."""
        self._token_chars: dict[int, int] = {}
        """Characters of the tokens streamed so far, per choice: completion logprobs contain text offsets."""
        self._ends: list[dict[str, Any]] = []
        """Last chunks that wait for the end of all."""
        self._plain = not (job.return_token_ids or job.continuous_usage)
        self._before: dict[int, bytes] = {}
        """Bytes before the text in a chunk of plain content, once a choice has only that."""
        after = '},"logprobs":null' if self._chat else ',"logprobs":null'
        usage = ',"usage":null' if job.include_usage else ""
        self._after = f'{after},"finish_reason":null}}]{usage}}}\n\n'.encode()

    # ---- whole answers ------------------------------------------------------------------------------------------

    def take(self, index: int, delta: Delta) -> None:
        if self._chat:
            self._parser(index).push(delta.text, last=delta.finish_reason is not None)
        if delta.logprobs is not None and not (self._job.stream or self._job.only_echoes):
            self._scores_of(index).add(delta.token_id, delta.logprobs)

    def whole(self, answers: Sequence[Answer], facts: Facts) -> Iterator[bytes]:
        yield encode(self._head)[:-1] + b',"choices":['
        n = self._job.requests[0].params.n
        for position, answer in enumerate(answers):
            for choice in answer.choices():
                index = position * n + choice.index
                if index:
                    yield b","
                yield from self._choice(index, choice, answer)
        yield b"]"
        if self._chat:
            yield from self._prompt_logprobs(answers[0])
        tail: dict[str, Any] = {"usage": self._usage(), "tripool": facts}
        if self._job.return_token_ids and self._chat:
            tail["prompt_token_ids"] = answers[0].request.prompt_ids
        yield b"," + encode(tail)[1:]

    def _choice(self, index: int, choice: Choice, answer: Answer) -> Iterator[bytes]:
        finish_reason: str | None = choice.finish_reason
        ids: dict[str, Any] = {"token_ids": choice.token_ids} if self._job.return_token_ids else {}
        if self._chat:
            parser = self._parser(index)
            parsed: dict[str, Any] = {"message": self._message(index, parser.parsed)}
            finish_reason = shown_finish(finish_reason, parser)
        else:
            text = choice.text
            if self._job.only_echoes:
                text, finish_reason, ids = "", "length", ids and {"token_ids": []}
            parsed = {"text": self._echo(index) + text}
            ids |= {"prompt_token_ids": answer.request.prompt_ids} if ids else {}
        yield encode({"index": index, **parsed})[:-1] + b',"logprobs":'
        if answer.request.params.logprobs is None:
            yield b"null"
        else:
            scores = self._scores_of(index)
            if isinstance(scores, CompletionScores):
                yield from scores.pieces(self._echoed(answer))
            else:
                yield from scores.pieces()
        if not self._chat:
            yield from self._prompt_logprobs(answer)
        yield b"," + encode({"finish_reason": finish_reason, **ids})[1:]

    def _echoed(self, answer: Answer) -> PromptScores | None:
        params, scores = answer.request.params, answer.prompt_logprobs
        if not self._job.echoes or params.prompt_logprobs is None:
            return None
        return PromptScores(self._names, answer.request.prompt_ids, scores or (), params.logprobs or 0)

    def _prompt_logprobs(self, answer: Answer) -> Iterator[bytes]:
        top, scores = self._job.prompt_logprobs, answer.prompt_logprobs
        if top is not None:
            yield b',"prompt_logprobs":'
            yield from PromptScores(self._names, answer.request.prompt_ids, scores or (), top).by_id()

    def _scores_of(self, index: int) -> Scores:
        scores = self._scores.get(index)
        if scores is None:
            kind = ChatScores if self._chat else CompletionScores
            scores = self._scores[index] = kind(self._names)
        return scores

    def _message(self, index: int, parsed: ParsedOutput) -> dict[str, Any]:
        calls = [self._call(index, number, call.name, call.arguments) for number, call in enumerate(parsed.calls)]
        content = parsed.content or None if self._job.calls else parsed.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning:
            message |= _reasoning(parsed.reasoning)
        return message | ({"tool_calls": calls} if calls else {})

    # ---- streams ------------------------------------------------------------------------------------------------

    def opening(self, index: int, answer: Answer) -> bytes:
        """A chat begins with the role, a completion repeats its prompt if asked to."""
        ids: dict[str, Any] = {}
        if self._job.return_token_ids:
            ids = {"prompt_token_ids": answer.request.prompt_ids}
        if self._chat:
            content = None if self._job.calls else ""
            return self._chunk(self._chunk_choice(index, {"role": "assistant", "content": content}), ids)
        echo = self._echo(index)
        return self._chunk(self._chunk_choice(index, echo) | ids) if echo or ids else b""

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        finish, text, scores = delta.finish_reason, delta.text, delta.logprobs
        if finish is None and scores is None:
            before = self._before.get(index)
            if before is not None:
                return before + encode(text) + self._after if text else None
            if not text and not self._job.return_token_ids:
                self.take(index, delta)  # it may be reasoning
                return None
        if self._job.only_echoes:
            text, scores, finish = "", None, finish and "length"
        logprobs = None
        if scores is not None:
            logprobs = self._logprobs(delta.token_id, scores, self._token_chars.get(index, 0))
            shown = len(self._names.token_text(delta.token_id))
            self._token_chars[index] = self._token_chars.get(index, 0) + shown
        ids = {"token_ids": [delta.token_id]} if self._job.return_token_ids else {}
        if not self._chat:
            if self._plain:
                self._before[index] = self._plain_head(index)
            chunk = self._chunk if finish is None else self._last_chunk
            return chunk(self._chunk_choice(index, text, logprobs, finish) | ids)
        return self._chat_chunks(index, delta, logprobs, ids)

    def closing(self, answers: Sequence[Answer], facts: Facts) -> bytes:
        last = b""
        while self._ends:
            choice = self._ends.pop(0)
            last += self._chunk(choice, {} if self._ends else {"tripool": facts})
        if self._job.include_usage:
            last += _event(self._head | {"choices": [], "usage": self._usage(), "tripool": facts})
        return last + b"data: [DONE]\n\n"

    def error(self, error: TripoolError) -> bytes:
        return _event(error_shape(error))

    def _chat_chunks(self, index: int, delta: Delta, logprobs: object, ids: dict[str, Any]) -> bytes | None:
        """The chunks that a token adds to a chat message, and the finish reason if the message ends."""
        parser, finish = self._parser(index), delta.finish_reason
        parts = [self._part(index, piece) for piece in parser.push(delta.text, last=finish is not None)]
        if self._plain and parser.plain:
            self._before[index] = self._plain_head(index)
        if (logprobs is not None or ids) and not parts:
            parts = [{"content": ""}]
        chunks = b""
        for part in parts:
            chunks += self._chunk(self._chunk_choice(index, part, logprobs) | ids)
            logprobs, ids = None, {}
        if finish is not None:
            chunks += self._last_chunk(self._chunk_choice(index, {}, None, shown_finish(finish, parser)))
        return chunks or None

    def _part(self, index: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Thought):
            return _reasoning(piece.text)
        if isinstance(piece, CallBegins):
            return {"tool_calls": [{"index": piece.index, **self._call(index, piece.index, piece.name, "")}]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _last_chunk(self, choice: dict[str, Any]) -> bytes:
        """Of a choice. Where schemas are checked and no chunk with the usage follows, it waits to say so."""
        if not self._job.unenforced or self._job.include_usage:
            return self._chunk(choice)
        self._ends.append(choice)
        return b""

    def _plain_head(self, index: int) -> bytes:
        content = '"delta":{"content":' if self._chat else '"text":'
        return b"data: " + encode(self._head)[:-1] + f',"choices":[{{"index":{index},{content}'.encode()

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        usage: dict[str, Any] = {}
        if self._job.continuous_usage:
            usage = {"usage": self._usage()}
        elif self._job.include_usage:
            usage = {"usage": None}
        return _event(self._head | {"choices": [choice]} | usage | (more or {}))

    def _chunk_choice(
        self, index: int, delta: object, logprobs: object = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        content = "delta" if self._chat else "text"
        return {"index": index, content: delta, "logprobs": logprobs, "finish_reason": finish_reason}

    # ---- both ---------------------------------------------------------------------------------------------------

    def _parser(self, index: int) -> OutputParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._job.parser()
        return parser

    def _echo(self, index: int) -> str:
        return self._job.echoes[index // self._job.requests[0].params.n] if self._job.echoes else ""

    def _call(self, index: int, number: int, name: str, arguments: str) -> dict[str, Any]:
        call_id = f"call_{self._job.key}{index:02x}{number:02x}"
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _object_name(self) -> str:
        if not self._chat:
            return "text_completion"
        return "chat.completion.chunk" if self._job.stream else "chat.completion"

    def _logprobs(self, token_id: int, logprobs: TokenLogprobs, text_offset: int) -> dict[str, Any]:
        pairs = [(token_id, logprobs)]
        if self._chat:
            return chat_logprobs(self._names, pairs)
        return completion_logprobs(self._names, pairs, text_offset)

    def _usage(self) -> dict[str, Any]:
        reasoning = sum(parser.reasoning_tokens for parser in self._parsers.values())
        return usage_shape([answer.usage for answer in self._answers], reasoning)


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def shown_finish(finish_reason: str | None, parser: OutputParser) -> str | None:
    """An answer that was cut off, by its length or by a stop string inside a call, has no calls."""
    return "tool_calls" if finish_reason == "stop" and parser.called else finish_reason


def usage_shape(usages: Sequence[Usage], reasoning_tokens: int = 0) -> dict[str, Any]:
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    rejected = sum(usage.draft_tokens for usage in usages) - accepted
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
        "total_tokens": sum(usage.total_tokens for usage in usages),
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
            "reasoning_tokens": reasoning_tokens,
        },
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + encode(body) + b"\n\n"
