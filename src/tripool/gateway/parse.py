"""Parses bodies of the generation endpoints into engine requests. Pure except for the seeds and ids it draws."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from tripool.core import SALT_MARK, Conversation, Request, SamplingParams, Structure
from tripool.errors import ContextOverflow, InvalidRequest, ModelNotFound
from tripool.gateway import options
from tripool.gateway.anthropic.parse import to_chat
from tripool.gateway.body import decode_json
from tripool.gateway.encoding import Encoder, public_tokens
from tripool.gateway.job import Api, Job
from tripool.gateway.messages import to_message
from tripool.gateway.ollama import parse as ollama
from tripool.gateway.reasoning_parser import OPENING
from tripool.gateway.responses.fields import INPUT_TOKENS, RESPONSES
from tripool.gateway.responses.parse import Asked, read
from tripool.gateway.responses.store import NOTHING_STORED, History
from tripool.gateway.responses.truncate import fitting
from tripool.gateway.schema_check import ENFORCED, Unenforced
from tripool.gateway.slo import HeaderSlo, read_slo
from tripool.gateway.structure import read_format
from tripool.gateway.tools import Tools, as_text, read_tools
from tripool.grammar.relax import Relax, opened, relaxed
from tripool.grammar.tools import or_answer
from tripool.router.kept_types import Keyed, seed_of
from tripool.tenants import ANONYMOUS, Tenant
from tripool.text import Tokenizer

_ID_PREFIX: Mapping[Api, str] = {"chat": "chatcmpl-", "completion": "cmpl-", "messages": "msg_", "responses": "resp_"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@+=~-]{1,128}")
"""Safe in a header, a path and a log."""
MAX_SALT_CHARS = 256
_TAIL_TOKENS = 8
"""Enough to see how a prompt ends."""


@dataclass(frozen=True, slots=True)
class _Prompts:
    ids: Sequence[Sequence[int]]
    echoes: tuple[str, ...] = ()
    public_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sender:
    """The tenant of a request and what its headers say; fields of the body take precedence over headers."""

    tenant: Tenant = ANONYMOUS
    request_id: str | None = None
    slo: HeaderSlo = field(default_factory=dict)
    history: History = NOTHING_STORED
    background: bool = False
    """Whether it is a line of a batch."""
    keyed: Keyed | None = None
    """With an idempotency key: ids and seeds follow from it."""
    model: str = ""
    """That answered this key first; empty: the one that the body names."""


_UNKNOWN = Sender()


class Parser:
    """Tokenising takes milliseconds for long prompts: call it outside the event loop then."""

    def __init__(self, tokenizer: Tokenizer, name: str, context_tokens: Callable[[], int] = lambda: 0) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._names = {name, name.partition("@")[0]}
        """A version of a registered model is meant by the model's name, too."""
        self.encoder = Encoder(tokenizer, context_tokens)

    @cached_property
    def quick(self) -> Parser:
        """The same for short bodies on the event loop; raises NotQuick where a chat template takes long."""
        twin = copy.copy(self)
        twin._tokenizer = self._tokenizer.quick
        twin.encoder = self.encoder.quick
        return twin

    def chat(self, raw: bytes, sender: Sender = _UNKNOWN) -> Job:
        fields = self.fields(raw, options.CHAT)
        conversation = [to_message(message, f"messages[{i}]") for i, message in enumerate(fields["messages"])]
        return self._chat_job(fields, conversation, "chat", sender)

    def messages(self, raw: bytes, sender: Sender = _UNKNOWN) -> Job:
        fields, conversation = to_chat(self.fields(raw, options.ANTHROPIC))
        return self._chat_job(fields, conversation, "messages", sender)

    def responses(self, raw: bytes, sender: Sender = _UNKNOWN) -> Job:
        asked = read(self.fields(raw, RESPONSES), sender.history)
        job = self._chat_job(asked.chat, self._fitting(asked), "responses", sender)
        # Never the client's own id: responses are found by theirs.
        return replace(job, id=_ID_PREFIX["responses"] + job.key, shown=asked.shown)

    def count_response(self, raw: bytes, history: History) -> int:
        """Tokens of the input of a response."""
        self.encoder.check_body(len(raw), "input")
        asked = read(self.fields(raw, INPUT_TOKENS), history)
        return len(self.chat_ids(asked.chat, self._fitting(asked), read_tools(asked.chat)))

    def _fitting(self, asked: Asked) -> Conversation:
        """The conversation, without its oldest turns where it is too long and may be truncated."""
        context_tokens = self.encoder.context_tokens
        if not asked.truncates or not context_tokens:
            return asked.conversation()
        room: int = context_tokens - min(asked.chat.get("max_tokens", 1), context_tokens // 2)
        tools = read_tools(asked.chat)

        def fits(messages: Sequence[dict[str, Any]]) -> bool:
            try:
                return len(self.chat_ids(asked.chat, asked.conversation(messages), tools)) <= room
            except ContextOverflow:
                return False

        return asked.conversation(fitting(asked.messages, fits))

    def ollama_chat(self, raw: bytes, sender: Sender = _UNKNOWN) -> Job:
        fields = ollama.to_chat(self._ollama_fields(raw, ollama.CHAT))
        return self._as_chat(fields, "ollama_chat", sender)

    def ollama_generate(self, raw: bytes, sender: Sender = _UNKNOWN) -> Job:
        fields = ollama.to_prompt(self._ollama_fields(raw, ollama.GENERATE))
        if "prompt" not in fields:
            return self._as_chat(fields, "ollama_generate", sender)
        return self._completion_job(options.COMPLETION.checked(fields), "ollama_generate", sender)

    def grpc(self, raw: bytes, sender: Sender = _UNKNOWN) -> Job:
        """`raw` is translated already, to a body of a chat or a completion."""
        body = decode_json(raw)
        if "messages" in body:
            return self._as_chat(self._checked(body, options.CHAT), "grpc", sender)
        return self._completion_job(self._checked(body, options.COMPLETION), "grpc", sender)

    def _ollama_fields(self, raw: bytes, known: options.Fields) -> dict[str, Any]:
        fields = known.checked(decode_json(raw))
        if ollama.model_of(fields) not in self._names:
            raise ModelNotFound(f"model '{fields['model'][:100]}' not found", hint=f"this server has '{self._name}'")
        return fields

    def _as_chat(self, translated: dict[str, Any], api: Api, sender: Sender) -> Job:
        """A body of another API that is one of a chat now: its values are checked as those are."""
        fields = options.CHAT.checked(translated)
        conversation = [to_message(message, f"messages[{i}]") for i, message in enumerate(fields["messages"])]
        return self._chat_job(fields, conversation, api, sender)

    def count(self, raw: bytes) -> int:
        """Tokens of an Anthropic prompt."""
        fields, conversation = to_chat(self.fields(raw, options.ANTHROPIC_COUNT))
        return len(self.chat_ids(fields, conversation, read_tools(fields)))

    def completion(self, raw: bytes, sender: Sender = _UNKNOWN) -> Job:
        fields = self.fields(raw, options.COMPLETION)
        if fields.get("best_of", fields.get("n", 1)) != fields.get("n", 1):
            hint = "leave it out: all answers are sent"
            raise InvalidRequest("'best_of' differs from 'n'", hint=hint, param="best_of")
        return self._completion_job(fields, "completion", sender)

    def _completion_job(self, fields: dict[str, Any], api: Api, sender: Sender) -> Job:
        prompts = self._completion_prompts(fields)
        structure, unenforced = read_format(fields)
        only_echoes = fields.get("echo", False) and fields.get("max_tokens") == 0
        if only_echoes:  # the engine makes one token at least
            fields = fields | {"max_tokens": 1}
        job = self._job(fields, prompts, fields.get("logprobs"), structure, api, sender, unenforced=unenforced)
        return replace(job, only_echoes=True) if only_echoes else job

    def fields(self, raw: bytes, known: options.Fields) -> dict[str, Any]:
        return self._checked(decode_json(raw), known)

    def _checked(self, body: Mapping[str, Any], known: options.Fields) -> dict[str, Any]:
        fields = known.checked(body)
        if fields.get("model", self._name) not in self._names:
            raise ModelNotFound(f"there is no model '{fields['model'][:100]}'", hint=f"this server has '{self._name}'")
        return fields

    def chat_ids(self, fields: Mapping[str, Any], conversation: Conversation, tools: Tools) -> list[int]:
        """Tokens of a conversation, rendered by its template."""
        go_on = fields.get("continue_final_message", False)
        if go_on and fields.get("add_generation_prompt"):
            hint = "a message is either continued or followed by a new one"
            raise InvalidRequest("'continue_final_message' contradicts 'add_generation_prompt'", hint=hint)
        extra = dict(fields.get("chat_template_kwargs", {}))
        for name, value in _thinking(fields).items():
            extra.setdefault(name, value)
        knows = self._tokenizer.knows_tools
        text = self._tokenizer.render_chat(
            conversation if knows else as_text(conversation, tools.shown),
            tools=tools.shown if knows else None,
            add_generation_prompt=fields.get("add_generation_prompt", True),
            continue_final_message=go_on,
            extra=extra,
        )
        return self.encoder.encode(text, special=fields.get("add_special_tokens", False), param="messages")

    def _chat_job(self, fields: dict[str, Any], conversation: Conversation, api: Api, sender: Sender) -> Job:
        logprobs = None
        if fields.get("logprobs"):
            logprobs = fields.get("top_logprobs", 0)
        elif fields.get("top_logprobs"):
            raise InvalidRequest("'top_logprobs' needs 'logprobs'", hint='send "logprobs": true', param="top_logprobs")
        tools = read_tools(fields)
        structure, unenforced = _structure(fields, tools)
        prompt_ids = _truncated(self.chat_ids(fields, conversation, tools), fields)
        thinks: bool | None = None
        # A grammar that applies from the first character leaves no room for reasoning.
        splits = fields.get("separate_reasoning", True) or not fields.get("include_reasoning", True)
        if splits and (structure is tools.structure and not tools.required):
            tail = self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special=False)
            thinks = tail.rstrip().endswith(OPENING)
        # A salt requests isolation from other requests.
        shares = sender.tenant.public_prefix and "cache_salt" not in fields
        public = public_tokens(self._tokenizer, conversation, prompt_ids) if shares else 0
        prompts = _Prompts([prompt_ids], public_tokens=public)
        return self._job(fields, prompts, logprobs, structure, api, sender, thinks=thinks, unenforced=unenforced)

    def _completion_prompts(self, fields: Mapping[str, Any]) -> _Prompts:
        special = fields.get("add_special_tokens", True)
        given = _prompts(fields["prompt"])
        prompts = [self.encoder.encode(p, special=special) if isinstance(p, str) else p for p in given]
        prompts = [_truncated(prompt, fields) for prompt in prompts]
        if not fields.get("echo"):
            return _Prompts(prompts)
        whole = "truncate_prompt_tokens" not in fields
        echoes = (
            text if whole and isinstance(text, str) else self._tokenizer.decode(prompt, skip_special=False)
            for text, prompt in zip(given, prompts, strict=True)
        )
        return _Prompts(prompts, tuple(echoes))

    def _job(
        self,
        fields: Mapping[str, Any],
        prompts: _Prompts,
        logprobs: int | None,
        structure: Structure | None,
        api: Api,
        sender: Sender,
        *,
        thinks: bool | None = None,
        unenforced: Unenforced = ENFORCED,
    ) -> Job:
        chosen = {name: fields[name] for name in options.SAMPLING if name in fields}
        chosen["logit_bias"] = {int(token_id): bias for token_id, bias in fields.get("logit_bias", {}).items()}
        scores = _prompt_logprobs(fields)
        params = SamplingParams.from_options(
            chosen | {"logprobs": logprobs, "prompt_logprobs": scores, "structure": structure}
        )
        if len(prompts.ids) * params.n > options.MAX_ANSWERS:
            hint = f"prompts times choices must be at most {options.MAX_ANSWERS}; use several requests"
            raise InvalidRequest(f"{len(prompts.ids)} prompts with {params.n} choices each", hint=hint, param="n")
        keyed, own = sender.keyed, secrets.token_hex(12)
        key = own if keyed is None else keyed.answer
        named = _request_id(fields)
        request_id = named or sender.request_id or key
        slo = read_slo(fields, sender.tenant, sender.slo, key, background=sender.background)
        namespace = _namespace(fields, sender.tenant)
        if not all(prompts.ids):
            raise InvalidRequest("a prompt is empty", hint="send at least one token", param="prompt")
        requests = tuple(
            Request(
                id=f"{own}-{i}", prompt_ids=tuple(prompt), params=params, end_ids=self._tokenizer.end_ids,
                seed=params.seed if params.seed is not None else _seed(keyed, i), namespace=namespace,
                public_tokens=prompts.public_tokens, slo=slo,
            )
            for i, prompt in enumerate(prompts.ids)
        )  # fmt: skip
        stream, shown = fields.get("stream", False), fields.get("stream_options", {})
        if "stream_options" in fields and not stream:
            raise InvalidRequest("'stream_options' needs 'stream'", hint='send "stream": true', param="stream_options")
        return Job(
            # Of a keyed request the same for each repeat, which a proxy may have given another `X-Request-Id`.
            id=_ID_PREFIX.get(api, "") + (request_id if keyed is None else named or key),
            request_id=request_id,
            key=key,
            keyed=keyed,
            api=api,
            requests=requests,
            stream=stream,
            include_usage=shown.get("include_usage", False),
            continuous_usage=shown.get("continuous_usage_stats", False),
            return_token_ids=fields.get("return_token_ids", False),
            tokens_as_ids=fields.get("return_tokens_as_token_ids", False),
            echoes=prompts.echoes,
            prompt_logprobs=fields.get("prompt_logprobs"),
            calls=structure is not None and structure.kind == "tool_calls",
            thinks=thinks,
            hides_reasoning=not fields.get("include_reasoning", True),
            unenforced=unenforced,
            looser=None if structure is None else partial(_looser, fields),
        )


def _seed(keyed: Keyed | None, place: int) -> int:
    return secrets.randbits(63) if keyed is None else seed_of(keyed.answer, place)


def _structure(fields: Mapping[str, Any], tools: Tools, relax: Relax = relaxed) -> tuple[Structure | None, Unenforced]:
    """Of a chat: with tools, the model may call one or answer in the format. And what of both is not ensured."""
    structure, unenforced = read_format(fields, relax)
    if structure is None or tools.structure is None:
        return structure or tools.structure, tools.unenforced | unenforced
    if structure.kind not in ("json_schema", "json_object"):
        hint = 'leave one of them out, or send "tool_choice": "none"'
        raise InvalidRequest(f"'{structure.param}' cannot go with 'tools'", hint=hint, param=structure.param)
    schema = json.loads(structure.value) if structure.kind == "json_schema" else {"type": "object"}
    return or_answer(tools.structure, schema), tools.unenforced | unenforced


def _looser(fields: Mapping[str, Any]) -> tuple[Structure | None, Unenforced]:
    return _structure(fields, read_tools(fields, opened), opened)


def header_id(header: str | None) -> str | None:
    """The client's `X-Request-Id`, if it is valid. Proxies add such headers: an invalid one is no error."""
    return header if header is not None and _REQUEST_ID.fullmatch(header) else None


def _request_id(fields: Mapping[str, Any]) -> str | None:
    given: str | None = fields.get("request_id")
    if given is not None and not _REQUEST_ID.fullmatch(given):
        hint = "1 to 128 letters, digits and any of . _ : @ + = ~ -"
        raise InvalidRequest("'request_id' is of the wrong shape", hint=hint, param="request_id")
    return given


def _namespace(fields: Mapping[str, Any], tenant: Tenant) -> str:
    """A client's salt can only narrow its tenant's namespace, never select another."""
    salt = fields.get("cache_salt")
    if salt is None:
        return tenant.namespace
    if not 0 < len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest("'cache_salt' is of the wrong length", hint=f"1 to {MAX_SALT_CHARS}", param="cache_salt")
    return f"{tenant.namespace}{SALT_MARK}{salt}"


def _prompt_logprobs(fields: Mapping[str, Any]) -> int | None:
    """How many are wanted of the prompt: for itself, or to go with its echo."""
    wanted = [fields[name] for name in ("prompt_logprobs",) if name in fields]
    if fields.get("echo") and fields.get("logprobs") is not None:
        wanted.append(fields["logprobs"])
    if wanted and fields.get("stream"):
        param = "prompt_logprobs" if "prompt_logprobs" in fields else "echo"
        hint = "send the request without 'stream'"
        raise InvalidRequest("log-probabilities of a prompt cannot be streamed", hint=hint, param=param)
    return max(wanted, default=None)


def _thinking(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is said to the chat template of reasoning, under any of the names in use."""
    said: dict[str, Any] = {}
    for name in ("thinking", "reasoning"):
        given = fields.get(name)
        if isinstance(given, bool):
            said["enable_thinking"] = given
        elif given is not None:
            if given.get("type") in ("enabled", "disabled"):
                said["enable_thinking"] = given["type"] == "enabled"
            if isinstance(given.get("enabled"), bool):
                said["enable_thinking"] = given["enabled"]
            if isinstance(given.get("effort"), str):
                said["reasoning_effort"] = given["effort"]
    return said | {name: fields[name] for name in ("enable_thinking", "reasoning_effort") if name in fields}


def _truncated(prompt: list[int], fields: Mapping[str, Any]) -> list[int]:
    """The last tokens, if the request limits them."""
    count = fields.get("truncate_prompt_tokens")
    if count is None:
        return prompt
    if count < 1:
        param = "truncate_prompt_tokens"
        raise InvalidRequest(f"'{param}' is {count}", hint="must be at least 1", param=param)
    return prompt[-count:]


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not 0 < len(prompt) <= options.MAX_PROMPTS:
        hint = f"send 1 to {options.MAX_PROMPTS}, or use several requests"
        raise InvalidRequest(f"'prompt' holds {len(prompt)} prompts", hint=hint, param="prompt")
    return prompt
