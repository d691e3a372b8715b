"""Response bodies in the format of OpenAI's Responses API. Independent of sockets and clocks.

| piece of the model's text | events |
|---|---|
| the first token | `response.created`, `response.in_progress` |
| an item begins | `response.output_item.added`; for text also `response.content_part.added` |
| text | `response.output_text.delta`, `response.reasoning_text.delta`, `response.function_call_arguments.delta` |
| an item ends | the same with `.done`, `response.content_part.done`, `response.output_item.done` |
| the end | `response.completed`, `response.incomplete` or `response.failed` |

Sequence numbers count all events of a stream. Log-probabilities are in the deltas of a stream, and in the message of a
whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tripool.answer import Answer, Delta
from tripool.core import TokenLogprobs, Usage
from tripool.errors import TripoolError
from tripool.gateway.job import Job
from tripool.gateway.logprobs import chat_logprobs
from tripool.gateway.respond import EVENT_STREAM, Facts, encode
from tripool.gateway.responses.output import (
    CallItem,
    CustomCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    Status,
    whole_output,
)
from tripool.gateway.responses.parse import Shown
from tripool.gateway.tool_parser import CallBegins, Content, Piece, Thought
from tripool.text import Tokenizer

Keep = Callable[[bytes, Sequence[OutputItem]], object]
"""Gets a finished response as JSON, and its items, before its client has all of it."""


class ResponsesFormatter:
    """A job has one answer here. `stored`: whether the finished response will be kept by `keep`."""

    stream_type = EVENT_STREAM

    def __init__(
        self, job: Job, shown: Shown, tokenizer: Tokenizer, *, model: str, created_s: int, stored: bool, keep: Keep
    ) -> None:
        params = job.requests[0].params
        self._job, self._shown, self._tokenizer, self._keep = job, shown, tokenizer, keep
        self._head = {"id": job.id, "object": "response", "created_at": created_s, "model": model}
        more = {"store": stored, "temperature": params.temperature, "top_p": params.top_p}
        self._repeated = encode({**shown.fields, **more})
        self._parser = job.parser()
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        """The newest item, until it is finished."""
        self._sequence = 2
        """Number of the next event; the first two are those of `opening`."""
        self._before = b""
        """Bytes before the text in an event of the open item's text."""
        self._unshown: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text was not complete."""
        self._usage: Usage | None = None

    # ---- whole answers ----------------------------------------------------------------------------------------------

    def take(self, index: int, delta: Delta) -> None:
        self._score(delta)
        for piece in self._parser.push(delta.text, last=delta.finish_reason is not None):
            self._add(piece)

    def whole(self, answers: Sequence[Answer], facts: Facts) -> Iterator[bytes]:
        parts: list[bytes] = []
        for piece in self._final(answers[0], facts):
            parts.append(piece)
            yield piece
        self._keep(b"".join(parts), self._items)

    def _add(self, piece: Piece) -> OutputItem:
        """To the item that it belongs to, which may be a new one."""
        if isinstance(piece, CallBegins):
            name = self._shown.tools.of_model(piece.name)
            return self._begin(CustomCallItem if name.custom else CallItem, name)
        item: OutputItem | None
        if isinstance(piece, Content):
            item = self._open if isinstance(self._open, MessageItem) else self._begin(MessageItem)
            assert isinstance(item, MessageItem)
            if self._unshown and not self._job.stream:
                item.logprobs += map(encode, self._unshown)
                self._unshown = []
        elif isinstance(piece, Thought):
            reasoning = isinstance(self._open, ReasoningItem)
            item = self._open if reasoning else self._begin(ReasoningItem, seals=self._shown.sealed_reasoning)
        else:
            item = self._open
        assert item is not None
        item.add(piece.text)
        return item

    def _begin(self, kind: Callable[..., OutputItem], *args: Any, **options: Any) -> OutputItem:
        self._open = kind(self._job.key, len(self._items), *args, **options)
        self._items.append(self._open)
        self._unshown = self._unshown if isinstance(self._open, MessageItem) else []
        return self._open

    def _score(self, delta: Delta) -> None:
        scores: TokenLogprobs | None = delta.logprobs
        if scores is not None:
            self._unshown += chat_logprobs(self._tokenizer, [(delta.token_id, scores)])["content"]

    # ---- streams ----------------------------------------------------------------------------------------------------

    def opening(self, index: int, answer: Answer) -> bytes:
        response = b"".join(self._response("in_progress", iter((b"[]",))))
        names = ("response.created", "response.in_progress")
        return b"".join(_event(name, number, b'"response":' + response) for number, name in enumerate(names))

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        self._score(delta)
        events = b""
        for piece in self._parser.push(delta.text, last=delta.finish_reason is not None):
            open_item = self._open
            item = self._add(piece)
            if item is not open_item:
                events += (self._ended(open_item, "completed") if open_item else b"") + self._begun(item)
            if not isinstance(piece, CallBegins) and self._before:
                events += self._delta(piece.text)
        return events or None

    def closing(self, answers: Sequence[Answer], facts: Facts) -> bytes:
        last, kind = self._outcome(answers[0])
        events = self._ended(self._open, last) if self._open is not None else b""
        response = b"".join(self._final(answers[0], facts))
        self._keep(response, self._items)
        return events + self._event(f"response.{kind}", b'"response":' + response)

    def error(self, error: TripoolError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        output = whole_output(self._items, "incomplete")
        parts = self._response("failed", output, {"error": {"code": code, "message": str(error), "type": error.code}})
        return self._event("response.failed", b'"response":' + b"".join(parts))

    def _begun(self, item: OutputItem) -> bytes:
        """The item is shown empty: its first text is a delta of its own."""
        empty = item.shape("in_progress") | _EMPTY[type(item)]
        added = self._event("response.output_item.added", output_index=item.index, item=empty)
        place = encode({"item_id": item.id, "output_index": item.index, **_PLACE[type(item)]})[1:-1]
        name = _DELTA[type(item)]
        self._before = b""
        if name:
            head = f'event: {name}.delta\ndata: {{"type":"{name}.delta",'
            self._before = head.encode() + place + b',"delta":'
        if isinstance(item, (MessageItem, ReasoningItem)):
            added += self._event("response.content_part.added", place, part=item.part(""))
        return added

    def _delta(self, text: str) -> bytes:
        scores = b""
        if isinstance(self._open, MessageItem):
            scores = b',"logprobs":' + (encode(self._unshown) if self._unshown else b"[]")
            self._unshown = []
        number = self._sequence
        self._sequence += 1
        return self._before + encode(text) + scores + b',"sequence_number":%d}\n\n' % number

    def _ended(self, item: OutputItem, status: Status) -> bytes:
        place = encode({"item_id": item.id, "output_index": item.index, **_PLACE[type(item)]})[1:-1]
        events = b""
        if isinstance(item, CustomCallItem):
            name = "response.custom_tool_call_input"
            events += self._event(f"{name}.delta", place, delta=item.input)
            events += self._event(f"{name}.done", place, input=item.input)
        elif isinstance(item, CallItem):
            shape = item.shape(status)
            events += self._event(f"{_DELTA[CallItem]}.done", place, name=shape["name"], arguments=item.text)
        elif isinstance(item, (MessageItem, ReasoningItem)):
            scores: dict[str, Any] = {"logprobs": []} if isinstance(item, MessageItem) else {}
            events += self._event(f"{_DELTA[type(item)]}.done", place, text=item.text, **scores)
            events += self._event("response.content_part.done", place, part=item.part(item.text))
        return events + self._event("response.output_item.done", output_index=item.index, item=item.shape(status))

    def _event(self, name: str, body: bytes = b"", /, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        more = encode(fields)[1:-1] if fields else b""
        return _event(name, number, b",".join(filter(None, (body, more))))

    # ---- both -------------------------------------------------------------------------------------------------------

    def snapshot(self, status: str) -> bytes:
        """The response so far."""
        return b"".join(self._response(status, whole_output(self._items, "incomplete")))

    def _outcome(self, answer: Answer) -> tuple[Status, str]:
        """The status of the last item, and how the stream ends."""
        if answer.finish_reasons[0] == "stop" and self._parser.parsed.complete:
            return "completed", "completed"
        return "incomplete", "completed" if answer.finish_reasons[0] == "stop" else "incomplete"

    def _final(self, answer: Answer, facts: Facts) -> Iterator[bytes]:
        last, outcome = self._outcome(answer)
        self._usage = answer.usage
        more: dict[str, Any] = {"usage": self._usage_shape(answer.usage), "tripool": facts}
        if outcome == "completed":
            more["completed_at"] = int(self._head["created_at"] + facts["timing"]["total"] / 1e3)
        elif answer.finish_reasons[0] == "abort":
            outcome = "cancelled"
        else:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response(outcome, whole_output(self._items, last), more)

    def _response(self, status: str, output: Iterator[bytes], more: dict[str, Any] | None = None) -> Iterator[bytes]:
        head = {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **(more or {}),
        }
        yield encode(head)[:-1] + b',"output":'
        yield from output
        yield b"," + self._repeated[1:]

    def _usage_shape(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


_DELTA: dict[type[OutputItem], str] = {
    MessageItem: "response.output_text",
    ReasoningItem: "response.reasoning_text",
    CallItem: "response.function_call_arguments",
    CustomCallItem: "",  # its input is a JSON string until it is complete
}
_PLACE: dict[type[OutputItem], dict[str, int]] = {
    MessageItem: {"content_index": 0},
    ReasoningItem: {"content_index": 0},
    CallItem: {},
    CustomCallItem: {},
}
_EMPTY: dict[type[OutputItem], dict[str, Any]] = {
    MessageItem: {"content": []},
    ReasoningItem: {"content": []},
    CallItem: {},
    CustomCallItem: {},
}


def _event(name: str, number: int, body: bytes) -> bytes:
    head = f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},'
    return head.encode() + body + b"}\n\n"
