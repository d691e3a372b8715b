"""Output items of a response, built from the pieces of the model's text as they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from tripool.errors import InvalidRequest
from tripool.gateway.body import decode_object
from tripool.gateway.respond import encode
from tripool.gateway.responses.items import sealed
from tripool.gateway.responses.tools import ToolName

Status = Literal["in_progress", "completed", "incomplete"]
_AT_ONCE = 64
"""Log-probabilities joined in one piece."""


class OutputItem:
    """One item: its texts arrive in pieces."""

    prefix = ""

    def __init__(self, key: str, index: int) -> None:
        self.index = index
        self.id = f"{self.prefix}_{key}{index:04x}"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def add(self, text: str) -> None:
        self._texts.append(text)

    def shape(self, status: Status) -> dict[str, Any]:
        raise NotImplementedError

    def pieces(self, status: Status) -> Iterator[bytes]:
        """Its JSON."""
        yield encode(self.shape(status))


class MessageItem(OutputItem):
    prefix = "msg"

    def __init__(self, key: str, index: int) -> None:
        super().__init__(key, index)
        self.logprobs: list[bytes] = []
        """Per token, as JSON; of whole answers only."""

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def shape(self, status: Status) -> dict[str, Any]:
        content = [] if status == "in_progress" and not self._texts else [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def pieces(self, status: Status) -> Iterator[bytes]:
        if not self.logprobs:
            yield from super().pieces(status)
            return
        before, after = encode(self.shape(status)).rsplit(b'"logprobs":[]', 1)
        yield before + b'"logprobs":['
        for first in range(0, len(self.logprobs), _AT_ONCE):
            yield (b"," if first else b"") + b",".join(self.logprobs[first : first + _AT_ONCE])
        yield b"]" + after


class ReasoningItem(OutputItem):
    prefix = "rs"

    def __init__(self, key: str, index: int, *, seals: bool) -> None:
        super().__init__(key, index)
        self._seals = seals

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def shape(self, status: Status) -> dict[str, Any]:
        begun = bool(self._texts)
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self.part(self.text)] if begun else [],
            "encrypted_content": sealed(self.text) if self._seals and begun and status != "in_progress" else None,
        }


class CallItem(OutputItem):
    prefix = "fc"

    def __init__(self, key: str, index: int, name: ToolName) -> None:
        super().__init__(key, index)
        self.call_id = f"call_{key}{index:04x}"
        self._name = name

    def shape(self, status: Status) -> dict[str, Any]:
        shape = {
            "id": self.id, "type": "function_call", "status": status, "call_id": self.call_id,
            "name": self._name.name, "arguments": self.text,
        }  # fmt: skip
        return shape if self._name.namespace is None else shape | {"namespace": self._name.namespace}


class CustomCallItem(CallItem):
    prefix = "ctc"

    @property
    def input(self) -> str:
        """Empty while the call is incomplete."""
        try:
            found = decode_object(self.text, "the model's arguments").get("input")
        except InvalidRequest:
            return ""
        return found if isinstance(found, str) else ""

    def shape(self, status: Status) -> dict[str, Any]:
        shape = super().shape(status) | {"type": "custom_tool_call", "input": self.input}
        del shape["arguments"]
        return shape


def whole_output(items: Sequence[OutputItem], last: Status) -> Iterator[bytes]:
    """The JSON list of all items. Only the last one can be unfinished."""
    yield b"["
    for item in items:
        if item.index:
            yield b","
        yield from item.pieces(last if item is items[-1] else "completed")
    yield b"]"
