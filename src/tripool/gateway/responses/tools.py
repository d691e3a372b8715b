"""Tools of the Responses API as functions of a chat, and the way back from a call to an item.

| tool | the model sees |
|---|---|
| `function` | the function |
| `custom` | a function with one string, `input` |
| `namespace` | its tools, named `namespace__tool` |
| a hosted tool, such as `web_search` | nothing: it runs at a hosted service, and there is none |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tripool.errors import InvalidRequest

HOSTED = (
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search",
    "local_shell", "shell", "computer", "computer_use_preview", "apply_patch", "programmatic_tool_calling",
)  # fmt: skip
"""Left out without an error: clients add them by themselves, and a model may always answer without one."""
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolName:
    """What a function of the chat is to the client."""

    name: str
    custom: bool = False
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSet:
    functions: Sequence[Mapping[str, Any]] = ()
    """As a chat has them."""
    names: Mapping[str, ToolName] | None = None
    """By the name that the model sees; functions that are called the same on both sides are left out."""

    def of_model(self, name: str) -> ToolName:
        return (self.names or {}).get(name, ToolName(name))


def read_tools(tools: Sequence[Mapping[str, Any]]) -> ToolSet:
    functions: list[Mapping[str, Any]] = []
    names: dict[str, ToolName] = {}
    for shown, tool, tool_name in _flat(tools):
        function: dict[str, Any] = {"name": shown}
        if tool_name.custom:
            function |= {"parameters": _INPUT}
        given = ("description",) if tool_name.custom else ("description", "parameters", "strict")
        function |= {name: tool[name] for name in given if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
        if tool_name != ToolName(shown):
            names[shown] = tool_name
    return ToolSet(functions, names)


def model_name(namespace: object, name: str) -> str:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def _flat(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], ToolName]]:
    for number, tool in enumerate(tools):
        kind, where = tool.get("type"), f"tools[{number}]"
        if kind == "namespace":
            inner, namespace = tool.get("tools"), tool.get("name")
            if not isinstance(inner, list) or not isinstance(namespace, str):
                raise _wrong(f"{where} is a namespace without a name or tools")
            for one in inner:
                if isinstance(one, dict) and one.get("type") not in HOSTED:
                    yield _named(one, where, namespace)
        elif kind not in HOSTED:
            yield _named(tool, where, None)


def _named(tool: Mapping[str, Any], where: str, namespace: str | None) -> tuple[str, Mapping[str, Any], ToolName]:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        hint = f"served: function, custom, namespace; left out: {', '.join(HOSTED)}"
        raise _wrong(f"{where} is of the type {str(kind)[:100]!r}", hint=hint)
    if not isinstance(name, str):
        raise _wrong(f"{where} has no name", hint='like {"type": "function", "name": ..., "parameters": {...}}')
    return model_name(namespace, name), tool, ToolName(name, kind == "custom", namespace)


def read_choice(choice: str | Mapping[str, Any], tools: ToolSet) -> tuple[Any, ToolSet]:
    """The `tool_choice` of a chat, and the tools that it leaves."""
    if isinstance(choice, str):
        return choice, tools
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": _chosen(choice)}}, tools
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list) and choice.get("mode") in ("auto", "required"):
        allowed = {_chosen(one) for one in choice["tools"] if isinstance(one, dict) and one.get("type") not in HOSTED}
        left = [one for one in tools.functions if one["function"]["name"] in allowed]
        return choice["mode"], ToolSet(left, tools.names)
    hint = "'none', 'auto', 'required', a function, a custom tool, or allowed_tools with a mode and tools"
    raise InvalidRequest(f"tool_choice is of the type {str(kind)[:100]!r}", hint=hint, param="tool_choice")


def _chosen(choice: Mapping[str, Any]) -> str:
    name = choice.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(
            "tool_choice names no tool", hint='like {"type": "function", "name": ...}', param="tool_choice"
        )
    return model_name(choice.get("namespace"), name)


def _wrong(message: str, *, hint: str = "") -> InvalidRequest:
    return InvalidRequest(message, hint=hint, param="tools")
