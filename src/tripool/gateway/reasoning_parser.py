"""Splits a model's reasoning (`<think>...</think>` at the beginning) from its answer, while the text arrives.

The result depends on the text alone, not on how it was cut into pieces. A text that does not begin with the tag is all
answer. Line breaks next to the tags belong to neither side.
"""

from __future__ import annotations

from collections.abc import Iterator

from tripool.gateway.tool_parser import Content, Thought, overlap

OPENING = "<think>"
CLOSING = "</think>"
_MAX_BLANKS = 16
"""Blanks allowed before the opening tag."""


class ReasoningParser:
    """States: start → thought → gap → answer. Text that is not decided yet is in `_held`.

    `opened`: the prompt ends with the opening tag, so the text begins inside.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self.thought = opened
        """Whether there was reasoning, even if empty."""
        self._held = ""
        self._state = self._inside if opened else self._start
        self._said = False

    @property
    def thinking(self) -> bool:
        """Whether the reasoning has not ended, as far as known."""
        return self._state in (self._start, self._inside)

    @property
    def answering(self) -> bool:
        """Whether all further text is answer."""
        return self._state == self._answer

    def push(self, text: str) -> list[Thought | Content]:
        self._held += text
        pieces: list[Thought | Content] = []
        before = None
        while self._held and before != self._state:
            before = self._state
            pieces += self._state()
        return pieces

    def finish(self) -> list[Thought | Content]:
        """The rest, at the end of the text. Reasoning that was never closed is still reasoning."""
        held, self._held = self._held, ""
        if not held or self._state == self._gap:
            return []
        return [Thought(held)] if self._state == self._inside else [Content(held)]

    def _start(self) -> Iterator[Thought | Content]:
        text = self._held.lstrip()
        if len(self._held) - len(text) > _MAX_BLANKS or not (text.startswith(OPENING) or OPENING.startswith(text)):
            self._state = self._answer
        elif text.startswith(OPENING):
            self._held = text.removeprefix(OPENING)
            self.thought = True
            self._state = self._inside
        yield from ()

    def _inside(self) -> Iterator[Thought | Content]:
        if not self._said:
            self._held = self._held.lstrip("\n")
        at = self._held.find(CLOSING)
        end = at if at >= 0 else len(self._held) - overlap(self._held, CLOSING)
        thought = self._held[:end].rstrip("\n")
        if at >= 0:
            self._held = self._held[at + len(CLOSING) :]
            self._state = self._gap
        else:
            self._held = self._held[len(thought) :]  # hold line breaks: the closing tag may follow
        if thought:
            self._said = True
            yield Thought(thought)

    def _gap(self) -> Iterator[Thought | Content]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._answer
        yield from ()

    def _answer(self) -> Iterator[Thought | Content]:
        held, self._held = self._held, ""
        yield Content(held)
