"""Answers as `GenerateReply` messages: one per token, and a last one with usage and timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tripool.answer import Answer, Delta
from tripool.errors import TripoolError
from tripool.gateway.grpc.messages import GenerateReply
from tripool.gateway.job import Job
from tripool.gateway.refusals import error_shape
from tripool.gateway.respond import Facts, encode, shown_finish
from tripool.gateway.tool_parser import CallBegins, Content, Piece, Thought

REPLY, ERROR = b"\0", b"\1"
"""First byte of what the application sends for a call: before a serialised message, or before an error in JSON that
ends a stream which has begun."""


class GrpcFormatter:
    stream_type = b"application/grpc"

    def __init__(self, job: Job) -> None:
        self._job = job
        choices = range(job.requests[0].params.n)
        self._parsers = [job.parser() for _ in choices]

    def take(self, index: int, delta: Delta) -> None:
        raise AssertionError("every answer is a stream")

    def whole(self, answers: Sequence[Answer], facts: Facts) -> Iterator[bytes]:
        raise AssertionError("every answer is a stream")

    def opening(self, index: int, answer: Answer) -> bytes:
        return b""

    def chunk(self, index: int, delta: Delta) -> bytes:
        parser, finish = self._parsers[index], delta.finish_reason
        reply = GenerateReply(index=index, token_ids=(delta.token_id,))
        for piece in parser.push(delta.text, last=finish is not None):
            self._add(reply, piece)
        if finish is not None:
            reply.finish_reason = shown_finish(finish, parser)
        return _framed(reply)

    def closing(self, answers: Sequence[Answer], facts: Facts) -> bytes:
        usage = answers[0].usage
        reply = GenerateReply(
            usage={
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "reasoning_tokens": sum(parser.reasoning_tokens for parser in self._parsers),
            },
            timing={f"{name}_ms": ms for name, ms in facts["timing"].items()},
            request_id=self._job.request_id,
            unenforced=self._job.unenforced.places,
            checked_json=encode(facts["checked"]).decode() if self._job.unenforced else "",
        )
        return _framed(reply)

    def error(self, error: TripoolError) -> bytes:
        return ERROR + encode(error_shape(error, "grpc"))

    def _add(self, reply: Any, piece: Piece) -> None:
        if isinstance(piece, Content):
            reply.text += piece.text
        elif isinstance(piece, Thought):
            reply.reasoning += piece.text
        elif isinstance(piece, CallBegins):
            call_id = f"call_{self._job.key}{reply.index:02x}{piece.index:02x}"
            reply.tool_calls.add(index=piece.index, id=call_id, name=piece.name)
        else:
            reply.tool_calls.add(index=piece.index, arguments=piece.text)


def _framed(reply: Any) -> bytes:
    message: bytes = reply.SerializeToString()
    return REPLY + message
