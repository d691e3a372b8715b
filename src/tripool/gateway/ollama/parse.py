"""Translates bodies of `/api/chat` and `/api/generate` to those of a chat or completion, which one parser reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tripool.errors import InvalidRequest
from tripool.gateway import json_types as of
from tripool.gateway.json_types import JsonType
from tripool.gateway.options import Fields

_FORMAT = JsonType(
    "'json', or a JSON schema",
    {"anyOf": [{"enum": ["json", ""]}, of.OBJECT.schema]},
    lambda value: value in ("json", "") or isinstance(value, dict),
)
_THINK = JsonType(
    "true, false or a level", {"type": ["boolean", "string"]}, lambda value: isinstance(value, (bool, str))
)
_MESSAGES = JsonType("a list of messages", {"type": "array", "items": {"type": "object"}}, of.TOOLS.fits)
_BOTH: Mapping[str, JsonType] = {
    "model": of.TEXT, "stream": of.BOOLEAN, "format": _FORMAT, "options": of.OBJECT, "think": _THINK,
}  # fmt: skip
_IGNORED = ("keep_alive", "truncate", "shift", "_debug_render_only")

CHAT = Fields(known={**_BOTH, "messages": _MESSAGES, "tools": of.TOOLS}, required=("model",), ignored=_IGNORED)
GENERATE = Fields(
    known={**_BOTH, "prompt": of.TEXT, "system": of.TEXT, "raw": of.BOOLEAN},
    required=("model",),
    ignored=_IGNORED,
    only_plain={"images": ([],), "suffix": ("",), "template": ("",), "context": ([],)},
)
SHOW = Fields(
    known={"model": of.TEXT, "name": of.TEXT, "verbose": of.BOOLEAN}, required=(), ignored=("system", "template")
)

SERVED_OPTIONS: Mapping[str, str] = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed", "stop": "stop",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "num_predict": "max_tokens",
}  # fmt: skip
"""Served options, and what a chat calls them."""
IGNORED_OPTIONS = (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram",
    "numa", "repeat_last_n", "typical_p", "tfs_z", "mirostat", "mirostat_eta", "mirostat_tau", "penalize_newline",
    "f16_kv", "vocab_only", "logits_all",
)  # fmt: skip
"""About memory and devices, which the operator decides, or about sampling that no other server has."""
_IN_MESSAGES = {"role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id", "images"}


class OnlyLoads(Exception):
    """The body has nothing to answer: it asks for the model, which is the argument, to be in memory."""


def model_of(fields: Mapping[str, Any]) -> str:
    """Ollama's clients may add the tag that it assumes."""
    name: str = fields.get("model") or fields.get("name") or ""
    return name.removesuffix(":latest")


def to_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of `/api/chat`."""
    if not fields.get("messages"):
        raise OnlyLoads(model_of(fields))
    chat = _common(fields)
    chat["messages"] = [_message(one, f"messages[{i}]") for i, one in enumerate(fields["messages"])]
    _name_calls(chat["messages"])
    return chat | ({"tools": fields["tools"]} if fields.get("tools") else {})


def to_prompt(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of `/api/generate`: fields of a completion if the prompt is raw, else of a chat."""
    if not fields.get("prompt"):
        raise OnlyLoads(model_of(fields))
    chat = _common(fields)
    if fields.get("raw"):
        return chat | {"prompt": fields["prompt"]}
    system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    return chat | {"messages": [*system, {"role": "user", "content": fields["prompt"]}]}


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {"stream": fields.get("stream", True)} | _options(fields.get("options", {}))
    wanted, think = fields.get("format"), fields.get("think")
    if wanted == "json":
        chat["response_format"] = {"type": "json_object"}
    elif wanted:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted}}
    if think is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": bool(think)}
        chat |= {"reasoning_effort": think} if isinstance(think, str) else {}
    return chat


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in SERVED_OPTIONS:
            found[SERVED_OPTIONS[name]] = value
        elif name not in IGNORED_OPTIONS and value is not None:
            hint = f"known: {', '.join((*SERVED_OPTIONS, *IGNORED_OPTIONS))}"
            raise InvalidRequest(f"options has '{name[:100]}', which is not supported", hint=hint, param="options")
    if isinstance(found.get("max_tokens"), int) and found["max_tokens"] < 0:  # no bound
        del found["max_tokens"]
    return found


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in message.keys() - _IN_MESSAGES:
        raise InvalidRequest(f"{where} has '{name[:100]}', which is not supported", param="messages")
    if message.get("images"):
        raise InvalidRequest(f"{where} has images", hint="this server reads text alone", param="messages")
    same = ("role", "content", "tool_call_id")
    chat = {name: message[name] for name in same if message.get(name) is not None}
    chat.setdefault("content", "")
    if message.get("thinking"):
        chat["reasoning_content"] = message["thinking"]
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where} has tool_calls that are not a list", param="messages")
        chat["tool_calls"] = [_call(call) for call in calls]
    return chat


def _call(call: object) -> object:
    """Here arguments are an object; over OpenAI's API they are its text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call  # refused as every call of a wrong shape is
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**named, "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def _name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Calls and results without ids belong together in their order."""
    waiting: list[str] = []
    for number, message in enumerate(messages):
        for position, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call, dict):
                waiting.append(call.setdefault("id", f"call_{number}_{position}"))
        if message.get("role") == "tool":
            own = message.setdefault("tool_call_id", waiting[0] if waiting else "call")
            if own in waiting:
                waiting.remove(own)
