"""The fields of bodies of `/v1/responses`: served, ignored, or accepted only with the default value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tripool.gateway import json_types as of
from tripool.gateway.json_types import JsonType
from tripool.gateway.options import Fields


def _all(kind: JsonType, names: str) -> dict[str, JsonType]:
    return dict.fromkeys(names.split(), kind)


INPUT = JsonType(
    "a string, or a list of items",
    {"anyOf": [of.TEXT.schema, of.TOOLS.schema]},
    lambda value: of.TEXT.fits(value) or (of.TOOLS.fits(value) and bool(value)),
)
STREAM_OPTIONS = JsonType(
    'an object like {"include_obfuscation": false}',
    {"type": "object", "properties": {"include_obfuscation": {"type": "boolean"}}},
    lambda value: isinstance(value, dict) and value.keys() <= {"include_obfuscation", "include_usage"},
)

INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
"""Values of `include` that have an effect."""
INCLUDED_OF_HOSTED_TOOLS = (
    "web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
)  # fmt: skip
"""Accepted without effect: they are about tools and inputs that no answer of this server has."""

_COUNTED: Mapping[str, JsonType] = {
    "input": INPUT,
    **_all(of.TEXT, "model instructions previous_response_id truncation"),
    **_all(of.OBJECT, "text reasoning chat_template_kwargs"),
    "tools": of.TOOLS,
    "tool_choice": of.TOOL_CHOICE,
    "parallel_tool_calls": of.BOOLEAN,
}
"""Fields that decide how many tokens the input has, and their companions in a count."""
_IGNORED = (
    "user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "max_tool_calls", "client_metadata", "context_management", "moderation", "session_id", "kv_transfer_params",
    "ec_transfer_params", "mm_processor_kwargs", "mm_payload", "media_io_kwargs", "vllm_xargs",
)  # fmt: skip
_ONLY_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "enable_response_messages": (False,),
    "previous_input_messages": (),
    "watermarking": (False,),
    "return_mm_kwargs": (False,),
}

RESPONSES = Fields(
    known={
        **_COUNTED,
        **_all(of.NUMBER, "temperature top_p min_p repetition_penalty frequency_penalty presence_penalty"),
        **_all(of.INTEGER, "max_output_tokens top_logprobs top_k seed min_tokens priority"),
        **_all(of.BOOLEAN, "stream store ignore_eos skip_special_tokens include_reasoning include_stop_str_in_output"),
        **_all(of.TEXT, "request_id cache_salt"),
        **_all(of.OBJECT, "metadata slo structured_outputs"),
        "stream_options": STREAM_OPTIONS,
        "include": of.CHOICES,
        "stop": of.STOP,
        "stop_token_ids": of.IDS,
        "logit_bias": of.BIAS,
    },
    required=("input",),
    ignored=_IGNORED,
    only_plain=_ONLY_PLAIN,
)
INPUT_TOKENS = Fields(known=_COUNTED, required=("input",), ignored=_IGNORED, only_plain=_ONLY_PLAIN)
