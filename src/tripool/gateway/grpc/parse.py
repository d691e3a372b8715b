"""Translates a `GenerateRequest` to the body of a chat or completion, which one parser reads."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import DecodeError

from tripool.errors import InvalidRequest
from tripool.gateway.body import decode_object, decode_text
from tripool.gateway.grpc.messages import GenerateRequest

_JSON = ("response_format", "tools", "tool_choice")
_NOT_SHOWN = frozenset(
    {"stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "best_of", "return_token_ids"}
)
"""Fields of HTTP bodies that a `GenerateReply` has no place for."""


def to_body(raw: bytes) -> bytes:
    asked = _read(raw)
    body: dict[str, Any] = {"stream": True}
    if asked.model:
        body["model"] = asked.model
    kind = asked.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("the request has no input", hint="set one of chat, prompt and token_ids", param="input")
    if kind == "chat":
        body["messages"] = [_message(message) for message in asked.chat.messages]
    else:
        body["prompt"] = asked.prompt if kind == "prompt" else list(asked.token_ids.ids)
    for field, value in asked.sampling.ListFields():
        body[field.name] = value if isinstance(value, (int, float)) else list(value)
    for name in _JSON:
        text = getattr(asked, f"{name}_json")
        if text:
            body[name] = decode_text(text, f"{name}_json", param=f"{name}_json")
    # A double may be one that JSON has no word for: it is refused with the body.
    return json.dumps(body | _options(asked.options_json, body), ensure_ascii=False).encode()


def _read(raw: bytes) -> Any:
    hint = "make your client from gateway/grpc/tripool.proto"
    try:
        asked = GenerateRequest.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest("the message is no tripool.v1.GenerateRequest", hint=hint) from error
    num_bytes = asked.ByteSize()
    asked.DiscardUnknownFields()
    if asked.ByteSize() != num_bytes:
        raise InvalidRequest("the message has fields that this server does not know", hint=hint)
    return asked


def _options(text: str, body: dict[str, Any]) -> dict[str, Any]:
    options = decode_object(text, "options_json", param="options_json") if text else {}
    for name in options:
        if name in body or name in ("messages", "prompt", "model"):
            hint = "it has a field of its own in the message"
            raise InvalidRequest(f"options_json has '{name[:100]}'", hint=hint, param="options_json")
        if name in _NOT_SHOWN:
            hint = "send the request over HTTP"
            raise InvalidRequest(f"'{name}' is not supported over gRPC", hint=hint, param="options_json")
    return options


def _message(message: Any) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        chat["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return chat
