"""Translates bodies of `/v1/messages` to fields of a chat completion, which the same parser then reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tripool.core import Message
from tripool.errors import InvalidRequest
from tripool.gateway.refusals import ThreadUnsupported

_ROLES = ("user", "assistant", "system")
_TOOL_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_IGNORED_IN_TOOLS = {
    "cache_control", "strict", "defer_loading", "eager_input_streaming", "input_examples", "allowed_callers",
}  # fmt: skip
_IGNORED_IN_BLOCKS = {"cache_control", "citations", "caller", "toolset_name"}
_IGNORED_IN_MESSAGES = {"cache_control", "output_config"}
"""Accepted without effect, like those of the body itself."""
_BLOCKS: Mapping[str, set[str]] = {
    "text": {"text"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}
"""Types of content blocks and their fields."""


def to_chat(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[Message]]:
    """Fields of a chat completion, and the conversation for a chat template."""
    same = (
        "model", "max_tokens", "stop", "stream", "temperature", "top_p", "top_k", "slo", "priority", "cache_salt",
        "chat_template_kwargs",
    )  # fmt: skip
    chat: dict[str, Any] = {name: fields[name] for name in same if name in fields}
    _check_thread(fields.get("thread", {}))
    conversation = list(_system(fields.get("system")))
    for number, message in enumerate(_still_shown(fields["messages"])):
        conversation += _messages(message, f"messages[{number}]")
    conversation = _one_system(conversation)
    if conversation and conversation[-1]["role"] == "assistant" and not conversation[-1].get("tool_calls"):
        chat["continue_final_message"] = True  # prefill of the answer, in these clients' form
    if "tools" in fields:
        chat["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(fields["tools"])]
    if "tool_choice" in fields:
        chat |= _tool_choice(fields["tool_choice"])
    if "thinking" in fields:
        said = _thinking(fields["thinking"])
        if "chat_template_kwargs" in said:
            said["chat_template_kwargs"] |= chat.get("chat_template_kwargs", {})
        chat |= said
    if "output_format" in fields:  # the older name of a part of `output_config`
        chat |= _output_config({"format": fields["output_format"]})
    if "output_config" in fields:
        chat |= _output_config(fields["output_config"])
    return chat, conversation


def _check_thread(thread: Mapping[str, Any]) -> None:
    """A client asks the server to hold its conversation and still sends all of it (`create`), or only what is new
    (`continue`). Nothing is held here: with this error clients send everything, and no threads any more."""
    if thread.get("type") == "continue":
        hint = "send the full conversation without 'thread'"
        raise ThreadUnsupported("this server holds no conversations", hint=hint, param="thread")


def _still_shown(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Without the system messages that a later message of the user has cleared."""
    last_user = max((number for number, one in enumerate(messages) if one.get("role") == "user"), default=-1)
    for number, message in enumerate(messages):
        cleared = message.get("role") == "system" and message.get("clear_at") == "next_user_message"
        if not cleared or number > last_user:
            yield message


def _one_system(conversation: list[Message]) -> list[Message]:
    """Leading system messages are one: most chat templates know one, at the beginning."""
    rest = next((number for number, one in enumerate(conversation) if one["role"] != "system"), len(conversation))
    if rest < 2:
        return conversation
    return [
        {"role": "system", "content": "\n\n".join(one["content"] for one in conversation[:rest])},
        *conversation[rest:],
    ]


def _system(system: str | list[Any] | None) -> Iterator[Message]:
    text = system if isinstance(system, str) else _text(system or [], "system", "system")
    if text:
        yield {"role": "system", "content": text}


def _messages(message: Mapping[str, Any], where: str) -> Iterator[Message]:
    """One message may become several: every tool result is a message of its own, in its place."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise _wrong(f"{where} has the role {str(role)[:100]!r}", hint=f"known: {', '.join(_ROLES)}")
    known = {"role", "content"} | _IGNORED_IN_MESSAGES | ({"clear_at"} if role == "system" else set())
    for name in message.keys() - known:
        if message[name] is not None:
            raise _wrong(f"{where} has '{name[:100]}', which is not supported")
    if role == "system":
        yield from _system(content if isinstance(content, (str, list)) else None)
        return
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list) or not content:
        raise _wrong(f"{where} has no content", hint="send a string or a list of blocks")
    blocks = [_block(block, f"{where}.content[{number}]", role) for number, block in enumerate(content)]
    yield from _assistant(blocks) if role == "assistant" else _user(blocks, where)


def _user(blocks: list[Mapping[str, Any]], where: str) -> Iterator[Message]:
    texts: list[str] = []
    for block in blocks:
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            yield {"role": "user", "content": "".join(texts)}
            texts = []
        content = block.get("content") or ""
        text = content if isinstance(content, str) else _text(content, where, "messages")
        yield {"role": "tool", "content": text, "tool_call_id": block["tool_use_id"]}
    if texts:
        yield {"role": "user", "content": "".join(texts)}


def _assistant(blocks: list[Mapping[str, Any]]) -> Iterator[Message]:
    calls = [
        {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    yield message | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thoughts} if thoughts else {})


def _block(block: object, where: str, role: str) -> Mapping[str, Any]:
    """A block whose fields have the right types."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str) or kind not in _BLOCKS:
        raise _wrong(f"{where} is of the type {str(kind)[:100]!r}", hint=f"known: {', '.join(_BLOCKS)}")
    if kind != "text" and (kind == "tool_result") != (role == "user"):
        raise _wrong(f"{where} is a {kind}, which the role '{role}' cannot have")
    fields = {name: value for name, value in block.items() if value is not None}
    for name in fields.keys() - _BLOCKS[kind] - _IGNORED_IN_BLOCKS - {"type"}:
        raise _wrong(f"{where} has '{name[:100]}', which is not supported")
    wanted = {"text": ("text",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",), "thinking": ("thinking",)}
    for name in wanted.get(kind, ()):
        if not isinstance(fields.get(name), str):
            raise _wrong(f"{where} has no '{name}', or one that is not a string")
    if kind == "tool_use" and not isinstance(fields.get("input"), dict):
        raise _wrong(f"{where} has an input that is not an object")
    if kind == "tool_result" and not isinstance(fields.get("content", ""), (str, list)):
        raise _wrong(f"{where} has content that is neither a string nor a list of blocks")
    return fields


def _text(blocks: list[Any], where: str, param: str) -> str:
    texts = []
    for block in blocks:
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{where} has a block that is not text", hint="send text blocks", param=param)
        texts.append(text)
    return "".join(texts)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        hint = "only tools that the client runs: no 'type', or 'custom'"
        raise InvalidRequest(f"{where} is of the type {str(tool['type'])[:100]!r}", hint=hint, param="tools")
    for name in tool.keys() - {"type", "name", "description", "input_schema"} - _IGNORED_IN_TOOLS:
        raise InvalidRequest(f"{where} has '{name[:100]}', which is not supported", param="tools")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {ours: tool[theirs] for theirs, ours in names.items() if tool.get(theirs) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind, name = choice.get("type"), choice.get("name")
    for field in choice.keys() - {"type", "name", "disable_parallel_tool_use"}:
        raise InvalidRequest(f"tool_choice has '{field[:100]}', which is not supported", param="tool_choice")
    if kind == "tool" and isinstance(name, str):
        ours: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        ours = _TOOL_CHOICES[kind]
    else:
        hint = "'auto', 'any', 'none', or 'tool' with a name"
        raise InvalidRequest(f"tool_choice is of the type {str(kind)[:100]!r}", hint=hint, param="tool_choice")
    return {"tool_choice": ours, "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


def _thinking(thinking: Mapping[str, Any]) -> dict[str, Any]:
    """Passed to templates that support it. `budget_tokens` has no effect."""
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        hint = "known: enabled, disabled, adaptive, between_tools"
        raise InvalidRequest(f"thinking is of the type {str(kind)[:100]!r}", hint=hint, param="thinking")
    return (
        {}
        if kind in ("adaptive", "between_tools")
        else {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}
    )


def _output_config(config: Mapping[str, Any]) -> dict[str, Any]:
    for name in config.keys() - {"format", "effort", "task_budget"}:
        raise InvalidRequest(f"output_config has '{name[:100]}', which is not supported", param="output_config")
    chat: dict[str, Any] = {}
    wanted, effort = config.get("format"), config.get("effort")
    if wanted is not None:
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            hint = 'like {"type": "json_schema", "schema": {...}}'
            raise InvalidRequest("output_config has a format of the wrong shape", hint=hint, param="output_config")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    if effort is not None:
        if not isinstance(effort, str):
            raise InvalidRequest("output_config has an effort that is not a string", param="output_config")
        chat["reasoning_effort"] = effort
    return chat


def _wrong(message: str, *, hint: str = "") -> InvalidRequest:
    return InvalidRequest(message, hint=hint, param="messages")
