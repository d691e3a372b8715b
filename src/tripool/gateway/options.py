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

SAMPLING: Mapping[str, JsonType] = {
    "temperature": of.NUMBER,
    "top_p": of.NUMBER,
    "top_k": of.INTEGER,
    "min_p": of.NUMBER,
    "repetition_penalty": of.NUMBER,
    "frequency_penalty": of.NUMBER,
    "presence_penalty": of.NUMBER,
    "logit_bias": of.BIAS,
    "n": of.INTEGER,
    "seed": of.INTEGER,
    "stop": of.STOP,
    "stop_token_ids": of.IDS,
    "min_tokens": of.INTEGER,
    "max_tokens": of.INTEGER,
    "ignore_eos": of.BOOLEAN,
    "include_stop_str_in_output": of.BOOLEAN,
    "skip_special_tokens": of.BOOLEAN,
}
"""Passed to SamplingParams under the same names."""

STRUCTURE: Mapping[str, JsonType] = {
    "response_format": of.OBJECT,
    "structured_outputs": of.OBJECT,
    "regex": of.TEXT,
    "ebnf": of.TEXT,
    "guided_json": of.SCHEMA,
    "guided_regex": of.TEXT,
    "guided_choice": of.CHOICES,
    "guided_grammar": of.TEXT,
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
    "model": of.TEXT,
    "stream": of.BOOLEAN,
    "stream_options": of.STREAM_OPTIONS,
    "no_stop_trim": of.BOOLEAN,
    "request_id": of.TEXT,
    "rid": of.TEXT,
    "cache_salt": of.TEXT,
    "slo": of.OBJECT,
    "priority": of.INTEGER,
    "truncate_prompt_tokens": of.INTEGER,
    "return_token_ids": of.BOOLEAN,
}

_TEMPLATE: Mapping[str, JsonType] = {
    "tools": of.TOOLS,
    "add_generation_prompt": of.BOOLEAN,
    "continue_final_message": of.BOOLEAN,
    "chat_template_kwargs": of.OBJECT,
}
"""Fields that affect how a chat is rendered, besides its messages."""

_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "session_id",
    "kv_transfer_params",
    "prediction",
)

_ONLY_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "stream_reasoning": (True,),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none", "auto"),
}


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one endpoint's body."""

    known: Mapping[str, JsonType]
    required: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Accepted without effect: they control a hosted service, not the answer."""
    only_plain: Mapping[str, tuple[Any, ...]] | None = None
    """Known to clients but not supported: accepted only with the values that request nothing."""

    def checked(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The effective fields, each of the right type. Unknown ones are refused by name, never dropped."""
        fields: dict[str, Any] = {}
        plain = self.only_plain or {}
        for name, value in body.items():
            if name in self.known:
                if value is not None:
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
    if value is not None and not any(value == v and type(value) is type(v) for v in plain):
        values = " or ".join(map(repr, plain))
        hint = f"leave it out, or send {values}" if plain else "leave it out"
        raise InvalidRequest(f"'{name}' is not supported", hint=hint, param=name)


CHAT = Fields(
    known={
        "messages": of.MESSAGES,
        **_GENERATION,
        **_TEMPLATE,
        "max_completion_tokens": of.INTEGER,
        "logprobs": of.BOOLEAN,
        "top_logprobs": of.INTEGER,
        "tool_choice": of.TOOL_CHOICE,
        "parallel_tool_calls": of.BOOLEAN,
        "reasoning_effort": of.TEXT,
        "separate_reasoning": of.BOOLEAN,
    },
    required=("messages",),
    ignored=_IGNORED,
    only_plain={**_ONLY_PLAIN, "echo": (False,), "best_of": (1,), "add_special_tokens": (False,)},
)

COMPLETION = Fields(
    known={
        "prompt": of.PROMPT,
        **_GENERATION,
        "logprobs": of.INTEGER,
        "echo": of.BOOLEAN,
        "best_of": of.INTEGER,
        "add_special_tokens": of.BOOLEAN,
    },
    required=("prompt",),
    ignored=_IGNORED,
    only_plain={
        **_ONLY_PLAIN,
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
    "tool_choice": of.OBJECT,
    "thinking": of.OBJECT,
    "output_config": of.OBJECT,
}
_ANTHROPIC_IGNORED = (
    "metadata",
    "service_tier",
    "cache_control",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
    "diagnostics",
)
ANTHROPIC = Fields(
    known={
        **_ANTHROPIC,
        "max_tokens": of.INTEGER,
        "stop_sequences": of.STOPS,
        "stream": of.BOOLEAN,
        "temperature": of.NUMBER,
        "top_p": of.NUMBER,
        "top_k": of.INTEGER,
        "slo": of.OBJECT,
        "priority": of.INTEGER,
    },
    required=("messages", "max_tokens"),
    ignored=_ANTHROPIC_IGNORED,
)
ANTHROPIC_COUNT = Fields(known=_ANTHROPIC, required=("messages",), ignored=_ANTHROPIC_IGNORED)
