"""Finds tool calls in an answer's text while it arrives. The grammar of `tripool.grammar.tools` ensures their format.

The result depends on the text alone, not on how it was cut into pieces: a whole answer has the same content and calls
as a streamed one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tripool.grammar.tools import AFTER_NAME, BEFORE_NAME, CLOSING, NAME, OPENING

_HEAD = re.compile(rf"\n{re.escape(BEFORE_NAME)}({NAME}){re.escape(AFTER_NAME)}(?=\{{)")
_TAIL = "}\n" + CLOSING
_SURELY_TAG = len("<tool")
"""Characters of the tag that no other text is likely to end with."""


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning: see `tripool.gateway.reasoning_parser`."""

    text: str


CallPiece = Content | CallBegins | CallArguments
Piece = Thought | CallPiece


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedOutput:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    complete: bool = True
    """False when it was cut off inside a call."""

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Content):
            self.content += piece.text
        elif isinstance(piece, Thought):
            self.reasoning += piece.text
        elif isinstance(piece, CallBegins):
            self.calls.append(Call(piece.name))
        else:
            self.calls[piece.index].arguments += piece.text


class ToolParser:
    """States: text → head (of a call) → arguments → tail → text. Text that is not decided yet is in `_held`."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""
        self._state = self._text
        self._after_call = False
        # While in arguments:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def complete(self) -> bool:
        """Whether the text so far ends outside of any call."""
        return self._state == self._text

    def push(self, text: str) -> list[CallPiece]:
        self._held += text
        pieces: list[CallPiece] = []
        before = None
        while self._held and before != (self._state, self._held):
            before = (self._state, self._held)
            pieces += self._state()
        return pieces

    def finish(self) -> list[CallPiece]:
        """The rest, at the end of the text. Of a call cut off before its name was complete nothing is shown: clients
        would take its tag for the answer."""
        held, self._held = self._held, ""
        cut_off = len(held) >= _SURELY_TAG
        return [Content(held)] if self._state == self._text and held and not cut_off else []

    def _text(self) -> Iterator[CallPiece]:
        if self._after_call:
            self._held = self._held.lstrip("\n")  # calls are on lines of their own
            self._after_call = not self._held
        at = self._held.find(OPENING)
        if at >= 0:
            self._state = self._head
        end = at if at >= 0 else len(self._held) - overlap(self._held, OPENING)
        content, self._held = self._held[:end], self._held[end + len(OPENING) if at >= 0 else end :]
        if content:
            yield Content(content)

    def _head(self) -> Iterator[CallPiece]:
        found = _HEAD.match(self._held)
        if found:
            yield CallBegins(self.num_calls, found[1])
            self.num_calls += 1
            self._held = self._held[found.end() :]
            self._depth, self._in_string, self._escaped = 0, False, False
            self._state = self._arguments
        elif not _may_become_head(self._held):
            self._state = self._text
            yield Content(OPENING)

    def _arguments(self) -> Iterator[CallPiece]:
        for position, char in enumerate(self._held):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    arguments, self._held = self._held[: position + 1], self._held[position + 1 :]
                    self._state = self._tail
                    yield CallArguments(self.num_calls - 1, arguments)
                    return
        arguments, self._held = self._held, ""
        if arguments:
            yield CallArguments(self.num_calls - 1, arguments)

    def _tail(self) -> Iterator[CallPiece]:
        if len(self._held) >= len(_TAIL) or not _TAIL.startswith(self._held):
            self._held = self._held.removeprefix(_TAIL)
            self._state = self._text
            self._after_call = True
        yield from ()


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _may_become_head(text: str) -> bool:
    before = "\n" + BEFORE_NAME
    if len(text) <= len(before):
        return before.startswith(text)
    name, quote, after = text.removeprefix(before).partition('"')
    named = text.startswith(before) and (not name or re.fullmatch(NAME, name) is not None)
    return named and (not quote or (AFTER_NAME + "{").startswith(quote + after))
