"""Bodies of the generation endpoints, turned into requests for the engine. Pure but for the seeds and ids it draws."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tripool.core import Request, SamplingParams, Structure
from tripool.errors import InvalidRequest, ModelNotFound
from tripool.gateway.body import decode_json
from tripool.gateway.messages import to_message
from tripool.gateway.options import CHAT, COMPLETION, MAX_PROMPTS, SAMPLING, checked
from tripool.gateway.structure import read_structure
from tripool.gateway.tools import Tools, as_text, read_tools
from tripool.grammar import Trial
from tripool.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request: what to compute, and how to answer."""

    id: str
    chat: bool
    requests: tuple[Request, ...]
    """One per prompt; a choice's index over HTTP is prompt index x n + choice."""
    stream: bool
    include_usage: bool
    calls: bool = False
    """Whether answers may hold tool calls."""


class Parser:
    """Tokenising takes milliseconds for long prompts, trying a grammar longer: call these outside the event loop."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._trial = Trial()

    def chat(self, raw: bytes) -> Job:
        fields = self._fields(raw, CHAT, required="messages")
        if "max_completion_tokens" in fields:
            fields["max_tokens"] = fields["max_completion_tokens"]
        logprobs = None
        if fields.get("logprobs"):
            logprobs = fields.get("top_logprobs", 0)
        elif fields.get("top_logprobs"):
            raise InvalidRequest("'top_logprobs' needs 'logprobs'", hint='send "logprobs": true', param="top_logprobs")
        tools = read_tools(fields)
        structure = self._structure(fields, tools.structure)
        prompt_ids = self._prompt_ids(fields["messages"], tools)
        return self._job(fields, [prompt_ids], logprobs, structure, chat=True)

    def completion(self, raw: bytes) -> Job:
        fields = self._fields(raw, COMPLETION, required="prompt")
        prompts = [self._tokenizer.encode(p) if isinstance(p, str) else p for p in _prompts(fields["prompt"])]
        return self._job(fields, prompts, fields.get("logprobs"), self._structure(fields), chat=False)

    def _fields(self, raw: bytes, known: Mapping[str, Any], required: str) -> dict[str, Any]:
        fields = checked(decode_json(raw), known)
        if fields.get("model", self._name) != self._name:
            raise ModelNotFound(f"there is no model '{fields['model'][:100]}'", hint=f"this server has '{self._name}'")
        if required not in fields:
            raise InvalidRequest(f"'{required}' is missing", param=required)
        return fields

    def _structure(self, fields: Mapping[str, Any], calls: Structure | None = None) -> Structure | None:
        structure = read_structure(fields)
        if structure is not None and calls is not None:
            hint = 'leave one of them out, or send "tool_choice": "none"'
            raise InvalidRequest(f"'{structure.param}' cannot go with 'tools'", hint=hint, param=structure.param)
        return structure or calls

    def _prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        conversation = [to_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if self._tokenizer.knows_tools:
            return self._tokenizer.encode_chat(conversation, tools=tools.shown)
        return self._tokenizer.encode_chat(as_text(conversation, tools.shown))

    def _job(
        self,
        fields: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        logprobs: int | None,
        structure: Structure | None,
        *,
        chat: bool,
    ) -> Job:
        options = {name: fields[name] for name in SAMPLING if name in fields}
        options["logit_bias"] = {int(token_id): bias for token_id, bias in fields.get("logit_bias", {}).items()}
        params = SamplingParams.from_options(options | {"logprobs": logprobs, "structure": structure})
        job_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        requests = tuple(self._request(f"{job_id}-{i}", prompt, params) for i, prompt in enumerate(prompts))
        usage = fields.get("stream_options", {}).get("include_usage", False)
        stream = fields.get("stream", False)
        if "stream_options" in fields and not stream:
            raise InvalidRequest("'stream_options' needs 'stream'", hint='send "stream": true', param="stream_options")
        if structure is not None:
            self._trial.check(structure)
        calls = structure is not None and structure.kind == "tool_calls"
        return Job(id=job_id, chat=chat, requests=requests, stream=stream, include_usage=usage, calls=calls)

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
