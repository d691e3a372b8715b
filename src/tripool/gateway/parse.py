"""Bodies of the generation endpoints, turned into requests for the engine. Pure but for the seeds and ids it draws."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tripool.core import Message, Request, SamplingParams
from tripool.errors import InvalidRequest, ModelNotFound
from tripool.gateway.body import decode_json
from tripool.gateway.options import CHAT, COMPLETION, MAX_PROMPTS, SAMPLING, checked
from tripool.text import Tokenizer

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles and what a chat template calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request: what to compute, and how to answer."""

    id: str
    chat: bool
    requests: tuple[Request, ...]
    """One per prompt; a choice's index over HTTP is prompt index x n + choice."""
    stream: bool
    include_usage: bool


class Parser:
    """Tokenising takes milliseconds for long prompts: call these outside the event loop."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    def chat(self, raw: bytes) -> Job:
        fields = self._fields(raw, CHAT, required="messages")
        if "max_completion_tokens" in fields:
            fields["max_tokens"] = fields["max_completion_tokens"]
        logprobs = None
        if fields.get("logprobs"):
            logprobs = fields.get("top_logprobs", 0)
        elif fields.get("top_logprobs"):
            raise InvalidRequest("'top_logprobs' needs 'logprobs'", hint='send "logprobs": true', param="top_logprobs")
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(fields["messages"])]
        return self._job(fields, [self._tokenizer.encode_chat(messages)], logprobs, chat=True)

    def completion(self, raw: bytes) -> Job:
        fields = self._fields(raw, COMPLETION, required="prompt")
        prompts = [self._tokenizer.encode(p) if isinstance(p, str) else p for p in _prompts(fields["prompt"])]
        return self._job(fields, prompts, fields.get("logprobs"), chat=False)

    def _fields(self, raw: bytes, known: Mapping[str, Any], required: str) -> dict[str, Any]:
        fields = checked(decode_json(raw), known)
        if fields.get("model", self._name) != self._name:
            raise ModelNotFound(f"there is no model '{fields['model'][:100]}'", hint=f"this server has '{self._name}'")
        if required not in fields:
            raise InvalidRequest(f"'{required}' is missing", param=required)
        return fields

    def _job(
        self, fields: Mapping[str, Any], prompts: Sequence[Sequence[int]], logprobs: int | None, *, chat: bool
    ) -> Job:
        options = {name: fields[name] for name in SAMPLING if name in fields}
        options["logit_bias"] = {int(token_id): bias for token_id, bias in fields.get("logit_bias", {}).items()}
        params = SamplingParams.from_options(options | {"logprobs": logprobs})
        job_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        requests = tuple(self._request(f"{job_id}-{i}", prompt, params) for i, prompt in enumerate(prompts))
        usage = fields.get("stream_options", {}).get("include_usage", False)
        stream = fields.get("stream", False)
        if "stream_options" in fields and not stream:
            raise InvalidRequest("'stream_options' needs 'stream'", hint='send "stream": true', param="stream_options")
        return Job(id=job_id, chat=chat, requests=requests, stream=stream, include_usage=usage)

    def _request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        if not prompt_ids:
            raise InvalidRequest("a prompt is empty", hint="send at least one token", param="prompt")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        end_ids = self._tokenizer.end_ids
        return Request(id=request_id, prompt_ids=tuple(prompt_ids), params=params, seed=seed, end_ids=end_ids)


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not 0 < len(prompt) <= MAX_PROMPTS:
        hint = f"send 1 to {MAX_PROMPTS}, or use several requests"
        raise InvalidRequest(f"'prompt' holds {len(prompt)} prompts", hint=hint, param="prompt")
    return prompt


def _message(message: Mapping[str, Any], where: str) -> Message:
    """A template's names for roles. Content is checked where templates are; what only tools need is refused here."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        hint = f"known: {', '.join(_ROLES)}"
        raise InvalidRequest(f"{where} has the role {str(role)[:100]!r}", hint=hint, param="messages")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value is not None:
            raise InvalidRequest(f"{where} has '{name[:100]}', which is not supported", param="messages")
    if not isinstance(message.get("name", ""), str | None):
        raise InvalidRequest(f"{where} has a name that is not a string", param="messages")
    return {"content": message.get("content"), "role": _ROLES[role]} | (
        {"name": message["name"]} if message.get("name") else {}
    )
