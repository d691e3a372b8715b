"""Input items of the Responses API as messages of a chat completion, which the parser of chats then reads.

| item | in the chat |
|---|---|
| a message | a message; `developer` is `system` |
| `reasoning` | the `reasoning_content` of the assistant's message that follows |
| `function_call`, `custom_tool_call` | a call of the assistant's message that they follow, or of a new one |
| `function_call_output`, `custom_tool_call_output` | a message of the role `tool` |
| `item_reference` | the stored item |
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tripool.errors import InvalidRequest

Item = Mapping[str, Any]
Find = Callable[[str], Item]
"""A stored item by its id; raises InvalidRequest."""

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of content parts, and where each has its text."""
_SERVED = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "item_reference",
)  # fmt: skip
_MARK = "tripool-1."
"""Before reasoning in `encrypted_content`."""


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, for clients that send nothing else of it back. Encoded, not encrypted: the same
    text is beside it in `content`."""
    return _MARK + base64.b64encode(reasoning.encode()).decode()


def _unsealed(content: object) -> str:
    """Empty for what another server has sealed: that cannot be read."""
    if not isinstance(content, str) or not content.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise wrong("a reasoning item has 'encrypted_content' that was changed") from error


def as_items(given: str | Sequence[Item]) -> list[Item]:
    """A string is short for one message of the user."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given)


def to_messages(items: Sequence[Item], find: Find, names: Callable[[Item], str]) -> list[dict[str, Any]]:
    """`names`: under which name the model knows the function of a call."""
    builder = _Builder(find, names)
    for number, item in enumerate(items):
        builder.add(item, f"input[{number}]")
    return builder.done()


class _Builder:
    """Joins the items of one turn of the assistant into a message."""

    def __init__(self, find: Find, names: Callable[[Item], str]) -> None:
        self._find, self._names = find, names
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        """The assistant's message under construction."""

    def done(self) -> list[dict[str, Any]]:
        self._end_turn()
        return self._messages

    def add(self, item: Item, where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "item_reference":
            item = self._find(_text(item, "id", where))
            kind = item.get("type", "message")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, kind, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._end_turn()
            content = _content(item.get("output"), f"the output of {where}")
            self._messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
        else:
            hint = f"known: {', '.join(_SERVED)}"
            raise wrong(f"{where} is of the type {str(kind)[:100]!r}", hint=hint)

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise wrong(f"{where} has the role {str(role)[:100]!r}", hint=f"known: {', '.join(_ROLES)}")
        content = _content(item.get("content"), where)
        if role != "assistant":
            self._end_turn()
            self._messages.append({"role": role, "content": content})
            return
        if self._turn is not None and (self._turn["content"] is not None or "tool_calls" in self._turn):
            self._end_turn()
        self._open_turn()["content"] = content

    def _reasoning(self, item: Item, where: str) -> None:
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise wrong(f"{where} has content that is not a list")
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        text = "".join(one for one in texts if isinstance(one, str)) or _unsealed(item.get("encrypted_content"))
        if self._turn is not None and (self._turn["content"] is not None or "tool_calls" in self._turn):
            self._end_turn()
        if text:
            turn = self._open_turn()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _call(self, item: Item, kind: str, where: str) -> None:
        _text(item, "name", where)
        arguments = _text(item, "arguments" if kind == "function_call" else "input", where)
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": arguments}, ensure_ascii=False)
        function = {"name": self._names(item), "arguments": arguments}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        self._open_turn().setdefault("tool_calls", []).append(call)

    def _open_turn(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
        return self._turn

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        # Reasoning without an answer or a call was cut off: there is nothing that it led to.
        if turn is not None and (turn["content"] is not None or "tool_calls" in turn):
            self._messages.append(turn)


def _content(content: object, where: str) -> Any:
    """Text, or a list of text parts as chats have them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(f"{where} has no content", hint="send a string or a list of parts")
    texts = [_part(part, f"{where}[{number}]") for number, part in enumerate(content)]
    return texts[0] if len(texts) == 1 else "" if not texts else [{"type": "text", "text": text} for text in texts]


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXTS:
        hint = f"this server reads text alone: {', '.join(_TEXTS)}"
        raise wrong(f"{where} is of the type {str(kind)[:100]!r}", hint=hint)
    return _text(part, _TEXTS[kind], where)


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where} has no '{name}', or one that is not a string")
    return value


def wrong(message: str, *, hint: str = "") -> InvalidRequest:
    return InvalidRequest(message, hint=hint, param="input")
