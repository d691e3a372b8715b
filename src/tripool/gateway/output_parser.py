"""Splits one choice's text into reasoning, content and tool calls as it arrives, independent of pieces."""

from __future__ import annotations

from tripool.gateway.reasoning_parser import ReasoningParser
from tripool.gateway.tool_parser import Content, ParsedOutput, Piece, Thought, ToolParser


class OutputParser:
    """`thinks`: whether reasoning is split off; None when not, else whether the prompt already opened it. `hides`:
    whether it is left out."""

    def __init__(self, *, calls: bool, thinks: bool | None, hides: bool = False) -> None:
        self._hides = hides
        self._calls = ToolParser() if calls else None
        self._thinking = None if thinks is None else ReasoningParser(opened=thinks)
        self.parsed = ParsedOutput()
        """Everything so far."""
        self._num_before_answer = 0

    @property
    def plain(self) -> bool:
        """All further text is content, and passes unchanged."""
        return self._calls is None and (self._thinking is None or self._thinking.answering)

    @property
    def called(self) -> bool:
        """Whether the text is a complete list of calls: one cut off inside a call does not count."""
        return self._calls is not None and self._calls.num_calls > 0 and self._calls.complete

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning; 0 without reasoning."""
        return self._num_before_answer if self._thinking is not None and self._thinking.thought else 0

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """The pieces that one more token's text adds. Call it once for every token, the last one marked."""
        pieces: list[Piece] = []
        for part in self._split(text, last=last):
            if self._calls is not None and isinstance(part, Content):
                pieces += self._calls.push(part.text)
            else:
                pieces.append(part)
        if last and self._calls is not None:
            pieces += self._calls.finish()
            self.parsed.complete = self._calls.complete
        for piece in pieces:
            self.parsed.add(piece)
        return pieces

    def _split(self, text: str, *, last: bool) -> list[Piece]:
        if self._thinking is None or self._thinking.answering:
            return [Content(text)] if text else []
        self._num_before_answer += self._thinking.thinking
        parts: list[Piece] = list(self._thinking.push(text))
        if last:
            parts += self._thinking.finish()
        return [part for part in parts if not isinstance(part, Thought)] if self._hides else parts
