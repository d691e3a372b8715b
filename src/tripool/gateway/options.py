"""The fields of request bodies: one table from which both the checks and the OpenAPI schema are made.

Types are checked here, ranges in SamplingParams. A null is the same as leaving the field out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tripool.errors import InvalidRequest
from tripool.gateway import json_types as of
from tripool.gateway.json_types import JsonType

MAX_PROMPTS = 256
MAX_ANSWERS = 1024
"""Prompts times choices of one request."""


def _all(kind: JsonType, names: str) -> dict[str, JsonType]:
    return dict.fromkeys(names.split(), kind)


SAMPLING: Mapping[str, JsonType] = {
    **_all(of.NUMBER, "temperature top_p min_p repetition_penalty frequency_penalty presence_penalty"),
    **_all(of.INTEGER, "top_k n seed min_tokens max_tokens"),
    **_all(of.BOOLEAN, "ignore_eos include_stop_str_in_output skip_special_tokens"),
    "logit_bias": of.BIAS,
    "stop": of.STOP,
    "stop_token_ids": of.IDS,
}
"""Passed to SamplingParams under the same names."""

STRUCTURE: Mapping[str, JsonType] = {
    **_all(of.OBJECT, "response_format structured_outputs"),
    **_all(of.TEXT, "regex ebnf guided_regex guided_grammar"),
    "guided_json": of.SCHEMA,
    "guided_choice": of.CHOICES,
}
"""Ways to constrain an answer's form; a request may use one of them."""

ALIASES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "rid": "request_id",
    "stop_sequences": "stop",
}
"""Other clients' names of the same field. Where both are given, the one on the left takes precedence."""

_GENERATION: Mapping[str, JsonType] = {
    **SAMPLING,
    **STRUCTURE,
    **_all(of.TEXT, "model request_id rid cache_salt"),
    **_all(of.BOOLEAN, "stream no_stop_trim return_token_ids return_tokens_as_token_ids add_special_tokens"),
    **_all(of.INTEGER, "priority truncate_prompt_tokens prompt_logprobs"),
    "stream_options": of.STREAM_OPTIONS,
    "slo": of.OBJECT,
}

_TEMPLATE: Mapping[str, JsonType] = {
    "tools": of.TOOLS,
    "add_generation_prompt": of.BOOLEAN,
    "continue_final_message": of.BOOLEAN,
    "chat_template_kwargs": of.OBJECT,
    "reasoning_effort": of.TEXT,
    "enable_thinking": of.BOOLEAN,
    **_all(of.SWITCH, "thinking reasoning"),
}
"""Fields that affect how a chat is rendered, besides its messages."""

_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "session_id", "kv_transfer_params", "prediction", "verbosity", "guided_decoding_backend",
    "guided_whitespace_pattern", "functions", "function_call", "length_penalty", "spaces_between_special_tokens",
    "stream_reasoning", "web_search_options", "provider", "transforms", "route", "plugins", "usage", "documents",
    "mm_processor_kwargs", "mm_payload", "media_io_kwargs", "extra_body", "moderation", "ec_transfer_params",
    "stream_interval", "routed_experts_prompt_start", "vllm_xargs",
)  # fmt: skip

_ONLY_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "truncation_side": ("left",),
    "watermarking": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_mm_kwargs": (False,),
    "chat_template": (),
    "logprob_token_ids": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
}


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one endpoint's body."""

    known: Mapping[str, JsonType]
    required: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Accepted without effect: they control a hosted service, or another server's way to the same answer."""
    only_plain: Mapping[str, tuple[Any, ...]] | None = None
    """Known to clients but not supported: accepted only with the values that request nothing."""

    def checked(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The effective fields, each of the right type. Unknown ones are refused by name, never dropped."""
        fields: dict[str, Any] = {}
        plain = self.only_plain or {}
        for name, value in body.items():
            if value is None:
                continue
            if name in self.known:
                if not self.known[name].fits(value):
                    raise InvalidRequest(f"'{name}' must be {self.known[name].says}", param=name)
                fields[name] = value
            elif name in plain:
                _check_plain(name, value, plain[name])
            elif name not in self.ignored:
                hint = f"known: {', '.join(sorted(self.known))}"
                raise InvalidRequest(f"unknown parameter '{name[:100]}'", hint=hint, param=name[:100])
        for name in self.required:
            if name not in fields:
                raise InvalidRequest(f"'{name}' is missing", param=name)
        for name in ALIASES.keys() & fields.keys():
            fields[ALIASES[name]] = fields.pop(name)
        return fields

    def schema(self) -> dict[str, Any]:
        """The JSON schema of a body, for the OpenAPI page."""
        properties: dict[str, Any] = {
            name: dict(kind.schema) if name in self.required else {"anyOf": [kind.schema, {"type": "null"}]}
            for name, kind in self.known.items()
        }
        properties = {name: {} for name in (*self.ignored, *(self.only_plain or ()))} | properties
        return {
            "type": "object",
            "required": list(self.required),
            "properties": properties,
            "additionalProperties": False,
        }


def _check_plain(name: str, value: object, plain: tuple[Any, ...]) -> None:
    # Compared with their types: Python treats 0 as False and 1.0 as 1.
    if not any(value == v and type(value) is type(v) for v in plain):
        values = " or ".join(map(repr, plain))
        hint = f"leave it out, or send {values}" if plain else "leave it out"
        raise InvalidRequest(f"'{name}' is not supported", hint=hint, param=name)


CHAT = Fields(
    known={
        "messages": of.MESSAGES,
        **_GENERATION,
        **_TEMPLATE,
        **_all(of.INTEGER, "max_completion_tokens top_logprobs"),
        **_all(of.BOOLEAN, "logprobs parallel_tool_calls separate_reasoning include_reasoning"),
        "tool_choice": of.TOOL_CHOICE,
    },
    required=("messages",),
    ignored=_IGNORED,
    only_plain={**_ONLY_PLAIN, "echo": (False,), "best_of": (1,)},
)

COMPLETION = Fields(
    known={
        "prompt": of.PROMPT,
        **_GENERATION,
        **_all(of.INTEGER, "logprobs best_of"),
        "echo": of.BOOLEAN,
    },
    required=("prompt",),
    ignored=_IGNORED,
    only_plain={
        **_ONLY_PLAIN,
        "include_reasoning": (True,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
    },
)

_TOKENIZE: Mapping[str, JsonType] = {
    "model": of.TEXT,
    "prompt": of.TEXT,
    "messages": of.MESSAGES,
    **_TEMPLATE,
    "add_special_tokens": of.BOOLEAN,
    "return_token_strs": of.BOOLEAN,
}
TOKENIZE = Fields(known=_TOKENIZE, required=())
ONE_MODEL = Fields(known={"model": of.TEXT}, required=("model",))
DETOKENIZE = Fields(known={"model": of.TEXT, "tokens": of.IDS}, required=("tokens",))

_ANTHROPIC: Mapping[str, JsonType] = {
    "messages": of.MESSAGES,
    "model": of.TEXT,
    "system": of.TEXT_OR_BLOCKS,
    "tools": of.TOOLS,
    **_all(of.OBJECT, "tool_choice thinking output_config output_format thread chat_template_kwargs"),
}
_ANTHROPIC_IGNORED = (
    "metadata", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id", "workspace_id",
    "diagnostics", "context_management", "compaction", "fallbacks", "fallback_credit_token", "kv_transfer_params",
    "ec_transfer_params", "mm_payload", "vllm_xargs",
)  # fmt: skip
_ANTHROPIC_ONLY_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "watermarking": (False,),
    "return_mm_kwargs": (False,),
}
ANTHROPIC = Fields(
    known={
        **_ANTHROPIC,
        **_all(of.INTEGER, "max_tokens top_k priority"),
        **_all(of.NUMBER, "temperature top_p"),
        "stop_sequences": of.STOPS,
        "stream": of.BOOLEAN,
        "cache_salt": of.TEXT,
        "slo": of.OBJECT,
    },
    required=("messages", "max_tokens"),
    ignored=_ANTHROPIC_IGNORED,
    only_plain=_ANTHROPIC_ONLY_PLAIN,
)
ANTHROPIC_COUNT = Fields(
    known=_ANTHROPIC, required=("messages",), ignored=_ANTHROPIC_IGNORED, only_plain=_ANTHROPIC_ONLY_PLAIN
)
