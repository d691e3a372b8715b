"""Validates a conversation and converts it to plain data for a template. Independent of templates.

Only dicts, lists, strings, numbers and None are allowed: an object with methods must not enter the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tripool.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of nesting in messages and tools; real tool schemas have about ten."""


def plain_messages(conversation: object) -> list[dict[str, Any]]:
    """A list of messages, each with a role and text content; text in parts is joined."""
    if not isinstance(conversation, (list, tuple)):
        kind = type(conversation).__name__
        raise InvalidRequest(f"a conversation must be a list of messages, not {kind}", param="messages")
    if not conversation:
        raise InvalidRequest("the conversation is empty", hint="send at least one message", param="messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(conversation)]


def plain_tools(tools: object) -> list[dict[str, Any]] | None:
    """No tools and an empty list are the same to a caller, but not to every template: both give None."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest("tools must be a list of objects", param="tools")
    return [plain_data(tool, "tools") for tool in tools] or None


def plain_data(value: object, where: str, depth: int = 0) -> Any:
    """The same value in exact JSON types; `where` names it in errors, up to the first '[' as a request's field."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} levels deep", param=where.partition("[")[0])
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the base class's: an enum would print its member's name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {plain_data(key, where, depth + 1): plain_data(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, where, depth + 1) for item in value]
    kind = type(value).__name__
    raise InvalidRequest(f"{where} holds a {kind}, which is not JSON", param=where.partition("[")[0])


def _plain_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is not an object with role and content", param="messages")
    plain: dict[str, Any] = plain_data({key: item for key, item in message.items() if key != "content"}, where)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where} has no role", hint="such as system, user or assistant", param="messages")
    content = message.get("content")
    if content is not None:
        plain["content"] = _plain_text(content, where)
    elif not plain.get("tool_calls"):
        raise InvalidRequest(
            f"{where} has no content", hint="only a message with tool calls may have none", param="messages"
        )
    elif "content" in message:
        plain["content"] = None  # templates distinguish null from absent
    return plain


def _plain_text(content: object, where: str) -> str:
    if isinstance(content, str):
        return str.__str__(content)
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(f"the content of {where} is neither text nor a list of parts", param="messages")
    # Templates that iterate over parts write them without a separator, so they are joined the same way.
    return "".join(_plain_part(part, where) for part in content)


def _plain_part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} has a content part that is not an object", param="messages")
    kind = part.get("type")
    if kind != "text":
        hint = "only parts of type 'text' are understood"
        raise InvalidRequest(f"{where} has a content part of type {kind!r}", hint=hint, param="messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} has a text part without text", param="messages")
    return str.__str__(text)
