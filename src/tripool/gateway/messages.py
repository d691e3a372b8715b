"""Converts OpenAI chat messages to those of chat templates. Their content is checked in `text`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tripool.core import Message
from tripool.errors import InvalidRequest
from tripool.gateway.body import decode_object

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Accepted roles and their names in chat templates."""
_FIELDS = {"assistant": {"tool_calls", "reasoning_content", "reasoning"}, "tool": {"tool_call_id"}}
"""Beyond role, content and name."""
_OPTIONAL = ("name", "tool_call_id", "tool_calls", "reasoning_content")


def to_message(message: Mapping[str, Any], where: str) -> Message:
    """Unknown fields are refused by name, unless they are null."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        hint = f"known: {', '.join(_ROLES)}"
        raise InvalidRequest(f"{where} has the role {str(role)[:100]!r}", hint=hint, param="messages")
    known = {"role", "content", "name"} | _FIELDS.get(role, set())
    fields = {name: value for name, value in message.items() if value is not None}
    for name in fields:
        if name not in known:
            raise InvalidRequest(f"{where} has '{name[:100]}', which is not supported", param="messages")
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidRequest(f"{where} has a {name} that is not a string", param="messages")
    if fields.get("tool_calls"):
        fields["tool_calls"] = _tool_calls(fields["tool_calls"], where)
    if "reasoning" in fields:  # templates use the other name; our own answers have both
        fields.setdefault("reasoning_content", fields["reasoning"])
    # Templates distinguish null from absent, and an empty list of calls from none.
    optional = {name: fields[name] for name in _OPTIONAL if fields.get(name)}
    return {"content": message.get("content"), "role": _ROLES[role], **optional}


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} has tool_calls that are not a list", param="messages")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    """Over HTTP, arguments are JSON text; templates print the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidRequest(f"{where} has a tool call that is not of type 'function'", param="messages")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str) or not isinstance(call.get("id", ""), str):
        hint = "send strings for 'id' and for the function's 'name' and 'arguments'"
        raise InvalidRequest(f"{where} has a tool call of the wrong shape", hint=hint, param="messages")
    parsed = decode_object(arguments or "{}", f"the text of arguments in {where}", param="messages")
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": parsed}}
