"""Translates bodies of `/v1/responses` to fields of a chat completion, which the same parser then reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tripool.core import Message
from tripool.errors import InvalidRequest
from tripool.gateway.messages import to_message
from tripool.gateway.responses.fields import INCLUDED, INCLUDED_OF_HOSTED_TOOLS
from tripool.gateway.responses.items import Item, as_items, to_messages, wrong
from tripool.gateway.responses.store import History
from tripool.gateway.responses.tools import ToolSet, model_name, read_choice, read_tools

_SAME = (
    "model", "stream", "temperature", "top_p", "min_p", "top_k", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "seed", "min_tokens", "priority", "ignore_eos", "skip_special_tokens", "request_id",
    "cache_salt", "slo", "stop", "stop_token_ids", "logit_bias", "parallel_tool_calls", "chat_template_kwargs",
    "include_reasoning", "include_stop_str_in_output", "structured_outputs",
)  # fmt: skip
"""Fields with the name and meaning that they have in a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One body, read."""

    chat: dict[str, Any]
    """Fields of a chat completion, without its messages."""
    messages: list[dict[str, Any]]
    truncates: bool
    shown: Shown

    def conversation(self, messages: Sequence[dict[str, Any]] | None = None) -> list[Message]:
        """Of these messages, or all, for a chat template."""
        try:
            given = self.messages if messages is None else messages
            return [to_message(message, "'input', as a chat,") for message in given]
        except InvalidRequest as error:
            raise InvalidRequest(error.message, hint=error.hint, param="input") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the answer needs of its request."""

    fields: Mapping[str, Any]
    """Repeated in the response."""
    tools: ToolSet
    sealed_reasoning: bool
    """Whether reasoning items have `encrypted_content`."""
    items: tuple[Item, ...]
    """The input of this request alone."""
    stores: bool
    """Whether the client wants it to be stored; it is if the server has a store."""


def read(fields: Mapping[str, Any], history: History) -> Asked:
    """Fields that were checked already."""
    chat: dict[str, Any] = {name: fields[name] for name in _SAME if name in fields}
    tools = _add_tools(fields, chat)
    _add_text(fields.get("text", {}), chat)
    _add_reasoning(fields.get("reasoning", {}), chat)
    included = _included(fields.get("include", []))
    if "max_output_tokens" in fields:
        chat["max_tokens"] = fields["max_output_tokens"]
    if "message.output_text.logprobs" in included:
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs", 0)}
    elif fields.get("top_logprobs"):
        hint = 'send "include": ["message.output_text.logprobs"]'
        raise InvalidRequest("'top_logprobs' needs 'include'", hint=hint, param="top_logprobs")
    own = as_items(fields["input"])
    previous = fields.get("previous_response_id")
    items = [*(history.before(previous) if previous is not None else ()), *own]
    messages = to_messages(items, history.item, lambda call: model_name(call.get("namespace"), call["name"]))
    if not messages:
        raise wrong("'input' has no message", hint="send at least one")
    return Asked(
        chat=chat,
        messages=_with_instructions(fields.get("instructions"), messages),
        truncates=_truncates(fields.get("truncation", "disabled")),
        shown=Shown(
            fields=_shown(fields),
            tools=tools,
            sealed_reasoning="reasoning.encrypted_content" in included,
            items=tuple(own),
            stores=fields.get("store", True),
        ),
    )


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leading system messages are one: most chat templates know one, at the beginning."""
    texts = [instructions] if instructions else []
    rest = 0
    while rest < len(messages) and messages[rest]["role"] in ("system", "developer"):
        content = messages[rest]["content"]
        texts.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
        rest += 1
    return [*([{"role": "system", "content": "\n\n".join(texts)}] if texts else []), *messages[rest:]]


def _add_tools(fields: Mapping[str, Any], chat: dict[str, Any]) -> ToolSet:
    tools = read_tools(fields.get("tools", []))
    choice, left = read_choice(fields.get("tool_choice", "auto"), tools)
    if left.functions:
        chat["tools"] = list(left.functions)
    if "tool_choice" in fields and (left.functions or choice != "auto"):
        chat["tool_choice"] = choice
    return tools


def _add_text(text: Mapping[str, Any], chat: dict[str, Any]) -> None:
    """`verbosity` has no effect: no chat template knows it."""
    for name in text.keys() - {"format", "verbosity"}:
        raise InvalidRequest(f"text has '{name[:100]}', which is not supported", param="text")
    wanted = text.get("format")
    if wanted is None:
        return
    if not isinstance(wanted, dict):
        raise InvalidRequest("text has a format that is not an object", hint='like {"type": "text"}', param="text")
    if wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        chat["response_format"] = dict(wanted)


def _add_reasoning(reasoning: Mapping[str, Any], chat: dict[str, Any]) -> None:
    """`effort` is passed to the chat template; the other parts have no effect: reasoning is sent as it is."""
    for name in reasoning.keys() - {"effort", "summary", "generate_summary", "context", "mode"}:
        raise InvalidRequest(f"reasoning has '{name[:100]}', which is not supported", param="reasoning")
    effort = reasoning.get("effort")
    if effort is None:
        return
    if not isinstance(effort, str):
        raise InvalidRequest("reasoning has an effort that is not a string", param="reasoning")
    chat["reasoning_effort"] = effort
    if effort == "none":
        chat["chat_template_kwargs"] = {"enable_thinking": False} | chat.get("chat_template_kwargs", {})


def _included(include: list[str]) -> list[str]:
    for name in include:
        if name not in INCLUDED and name not in INCLUDED_OF_HOSTED_TOOLS:
            hint = f"known: {', '.join((*INCLUDED, *INCLUDED_OF_HOSTED_TOOLS))}"
            raise InvalidRequest(f"include has '{name[:100]}', which is not supported", hint=hint, param="include")
    return include


def _truncates(truncation: str) -> bool:
    if truncation not in ("auto", "disabled"):
        raise InvalidRequest(f"truncation is '{truncation[:100]}'", hint="'auto' or 'disabled'", param="truncation")
    return truncation == "auto"


def _shown(fields: Mapping[str, Any]) -> dict[str, Any]:
    text, reasoning = fields.get("text", {}), fields.get("reasoning", {})
    return {
        "background": False,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": fields.get("previous_response_id"),
        "prompt_cache_key": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_logprobs": fields.get("top_logprobs", 0),
        "truncation": fields.get("truncation", "disabled"),
        "user": None,
    }
