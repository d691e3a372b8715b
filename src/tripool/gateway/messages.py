"""Converts OpenAI chat messages to those of chat templates. Their content is checked in `text`.

Clients send earlier answers back with what their own libraries added. What is known to carry nothing for the model is
ignored (`IGNORED`), and so is what was broken when an answer was cut off; other fields are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tripool.core import Message
from tripool.errors import InvalidRequest
from tripool.gateway.body import decode_object

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Accepted roles and their names in chat templates."""
_FIELDS = {
    "assistant": {"tool_calls", "function_call", "reasoning_content", "reasoning", "refusal"},
    "tool": {"tool_call_id"},
    "function": set[str](),
}
"""Beyond role, content and name."""
IGNORED = frozenset({
    "parsed", "provider_specific_fields", "annotations", "reasoning_details", "thinking_blocks", "cache_control",
    "timestamp", "id", "index", "audio", "images", "citations", "logprobs", "finish_reason", "stop_reason",
    "created_at", "metadata", "additional_kwargs", "response_metadata", "usage", "usage_metadata", "model", "status",
    "reasoning_signature", "reasoning_text", "reasoning_opaque", "tool_responses", "experimental_attachments", "parts",
    "createdAt", "type", "object", "weight", "is_error",
})  # fmt: skip
"""In any message."""
_OPTIONAL = ("name", "tool_call_id", "tool_calls", "reasoning_content")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts, and where their text is."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Parts with earlier reasoning, which chat templates leave out too."""


def to_message(message: Mapping[str, Any], where: str) -> Message:
    """Unknown fields are refused by name, unless they are null."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        hint = f"known: {', '.join(_ROLES)}"
        raise InvalidRequest(f"{where} has the role {str(role)[:100]!r}", hint=hint, param="messages")
    known = {"role", "content", "name"} | _FIELDS.get(role, set())
    fields = {name: value for name, value in message.items() if value is not None and name not in IGNORED}
    for name in fields:
        if name not in known:
            raise InvalidRequest(f"{where} has '{name[:100]}', which is not supported", param="messages")
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidRequest(f"{where} has a {name} that is not a string", param="messages")
    if fields.get("tool_calls"):
        fields["tool_calls"] = _tool_calls(fields["tool_calls"], where)
    elif "function_call" in fields:
        fields["tool_calls"] = [_tool_call({"function": fields["function_call"]}, where)]
    if "reasoning" in fields:  # templates use the other name; our own answers have both
        fields.setdefault("reasoning_content", fields["reasoning"])
    content = fields.get("content", fields.get("refusal"))
    if isinstance(content, list):
        content = [_part(part) for part in content]
    elif content is None and _ROLES[role] in ("assistant", "tool") and not fields.get("tool_calls"):
        content = ""
    # Templates distinguish null from absent, and an empty list of calls from none.
    optional = {name: fields[name] for name in _OPTIONAL if fields.get(name)}
    return {"content": content, "role": _ROLES[role], **optional}


def _part(part: object) -> object:
    """As a part of text, where it is one under another name."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        return part
    if kind in _THOUGHTS:
        return {"type": "text", "text": ""}
    return {"type": "text", "text": part.get(_TEXTS[kind])} if kind in _TEXTS else part


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} has tool_calls that are not a list", param="messages")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    """Over HTTP, arguments are JSON text; templates print the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or (call.get("type") or "function") != "function":
        raise InvalidRequest(f"{where} has a tool call that is not of type 'function'", param="messages")
    name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
    right = isinstance(name, str) and isinstance(arguments, str | dict | None) and isinstance(call_id, str | None)
    if not right:
        hint = "send strings for 'id' and for the function's 'name' and 'arguments'"
        raise InvalidRequest(f"{where} has a tool call of the wrong shape", hint=hint, param="messages")
    identity = {} if call_id is None else {"id": call_id}
    return {**identity, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """None, for text that is no JSON object: an answer that was cut off comes back as `{"`, and some clients send
    "null" for a call without arguments."""
    if isinstance(arguments, dict):
        return arguments
    try:
        return decode_object(arguments or "{}", "the text of arguments")
    except InvalidRequest:
        return {}
