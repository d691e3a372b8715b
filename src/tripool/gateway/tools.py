"""Tools of a chat: the client's functions, how they are shown to the model, and the grammar of calls."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tripool.core import Conversation, Message, Structure
from tripool.errors import InvalidRequest
from tripool.gateway.schema_check import ENFORCED, Unenforced
from tripool.grammar.relax import Relax, relaxed
from tripool.grammar.tools import CLOSING, MAX_FUNCTIONS, OPENING, tool_structure

_PREFACE = (
    "You can call the functions that are listed below as JSON, one in a line. To call one, answer with its name and an "
    f'object of arguments, like this:\n{OPENING}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSING}\n<tools>\n'
)


@dataclass(frozen=True, slots=True)
class Tools:
    """What the model is shown, and what it may answer. Without `structure` it answers in plain text."""

    shown: Sequence[Mapping[str, Any]] = ()
    structure: Structure | None = None
    required: bool = False
    """Whether it must begin with a call."""
    unenforced: Unenforced = ENFORCED


def read_tools(fields: Mapping[str, Any], relax: Relax = relaxed) -> Tools:
    """From `tools`, `tool_choice` and `parallel_tool_calls`. `relax`: for schemas that are no promise."""
    tools, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    functions = [_function(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}
    if len(functions) > MAX_FUNCTIONS:
        raise InvalidRequest(f"there are {len(functions)} tools", hint=f"at most {MAX_FUNCTIONS}", param="tools")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice)
        functions = [function for function in functions if function["name"] in allowed]
    if isinstance(choice, dict):
        name = _chosen_name(choice)
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise InvalidRequest(f"there is no tool '{name[:100]}'", hint="name one of 'tools'", param="tool_choice")
    elif choice not in ("none", "auto", "required"):
        hint = "'none', 'auto', 'required', or a function"
        raise InvalidRequest(f"tool_choice is '{choice[:100]}'", hint=hint, param="tool_choice")
    if choice == "required" and not functions:
        raise InvalidRequest("a call is required and there are no tools", hint="send 'tools'", param="tool_choice")
    if choice == "none" or not functions:
        return Tools()
    named = isinstance(choice, dict)
    parallel = fields.get("parallel_tool_calls", True) and not named
    required = choice != "auto"
    unenforced = ENFORCED
    if not required:  # else the schemas are a promise, as they are with `strict`
        functions, unenforced = _relaxed(functions, strict, relax)
    return Tools(tools, tool_structure(functions, required=required, parallel=parallel), required, unenforced)


def _relaxed(
    functions: Sequence[dict[str, Any]], strict: Container[str], relax: Relax
) -> tuple[list[dict[str, Any]], Unenforced]:
    """The same functions with schemas that a grammar can promise, and the parts that it cannot."""
    shorter, unenforced = [], ENFORCED
    for function in functions:
        schema, name = function.get("parameters"), function["name"]
        if isinstance(schema, dict) and name not in strict:
            parameters, dropped = relax(schema)
            function = function | {"parameters": parameters}
            if dropped:
                unenforced |= Unenforced(tuple(f"tools/{name}/{place}" for place in dropped), {name: schema})
        shorter.append(function)
    return shorter, unenforced


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if tool.get("type") != "function" or not isinstance(function, dict) or not named:
        hint = 'like {"type": "function", "function": {"name": ...}}'
        raise InvalidRequest(f"{where} is not a function with a name", hint=hint, param="tools")
    return {name: function[name] for name in ("name", "parameters") if function.get(name) is not None}


def _allowed(choice: Mapping[str, Any]) -> tuple[str, set[str]]:
    """Whether a call is required, and the names of the functions that may be called."""
    allowed = choice.get("allowed_tools", choice)  # nested in a chat, beside the type in the newer API
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    if not isinstance(tools, list) or mode not in ("auto", "required"):
        hint = 'like {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
        raise InvalidRequest("tool_choice has allowed_tools of the wrong shape", hint=hint, param="tool_choice")
    return mode, {_chosen_name({"type": "function", **tool} if isinstance(tool, dict) else {}) for tool in tools}


def _chosen_name(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        hint = 'like {"type": "function", "function": {"name": ...}}'
        raise InvalidRequest("tool_choice names no function", hint=hint, param="tool_choice")
    return name


def as_text(messages: Conversation, shown: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same conversation for a template without tool support: functions, calls and results become text."""
    converted = [_as_text(message) for message in messages]
    if not shown:
        return converted
    listed = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in shown)
    preface = f"{_PREFACE}{listed}</tools>"
    if converted[0]["role"] == "system" and isinstance(converted[0]["content"], str):
        return [{**converted[0], "content": f"{converted[0]['content']}\n\n{preface}"}, *converted[1:]]
    return [{"role": "system", "content": preface}, *converted]


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [f"{OPENING}\n{json.dumps(c['function'], ensure_ascii=False)}\n{CLOSING}" for c in message["tool_calls"]]
    before = [_text(message)] if message["content"] else []
    return {"role": message["role"], "content": "\n".join([*before, *calls])}


def _text(message: Message) -> str:
    content = message["content"]
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise InvalidRequest(f"a message of the role '{message['role']}' has no text", param="messages")
    return content
