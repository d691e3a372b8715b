"""Hardware and models by the names that tables give them: what is not surely one of ours is none of ours."""

from __future__ import annotations

import re
from functools import lru_cache

from tripool.planner.hardware import Hardware, hardware_names, named_hardware
from tripool.planner.models import ModelShape, model_names, named_model

_ALIASES = {
    "ascend-910c": re.compile(r"cloud\s?matrix|atlas[ -]?(?:900|800\w?)[ -]?a3\b|\bascend[ -]?a3\b", re.IGNORECASE),
    "h20-3e": re.compile(r"(?<![A-Za-z0-9])H20[ -]*(?:\(?\s*)?141", re.IGNORECASE),
}
_OTHER_BOARD = re.compile(r"\bPCI-?e\b|\bNVL(?![ -]?(?:72|36))", re.IGNORECASE)
"""Boards of the same name with less power and other links."""

_BESIDE_SHAPE = (
    "instruct|thinking|base|chat|hf|it|fp8|nvfp4|mxfp4|fp4|fp8[ _-]?block|block|int8|w8a8|w4a16|int4|awq|gptq|bf16|"
    r"fp16|v?\d{4}|exp|speciale|terminus|zero|preview|dynamic|kv|model[ _-]?opt|a\d+b|quantized|offload|eagle3?|mtp|v2"
)
"""Parts of a model's name that say nothing of its shape."""
_ALIKE = {
    "deepseek-v3.1": "deepseek-v3", "deepseek-r1-distill-llama-70b": "llama-3-70b", "glm-4.6": "glm-4.5",
    "deepseek-r1-distill-llama-8b": "llama-3-8b", "glm-4.7": "glm-4.5", "glm-5.1": "glm-5",
    "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b", "llama-3.1-8b": "llama-3-8b",
    "kimi-k2.5": "kimi-k2", "kimi-k2.6": "kimi-k2", "qwen3-coder-next": "qwen3-next-80b-a3b",
    "qwen3-next": "qwen3-next-80b-a3b", "qwen3-next-80b": "qwen3-next-80b-a3b", "qwen3-235b": "qwen3-235b-a22b",
    "qwen3-30b": "qwen3-30b-a3b", "qwen3-coder-30b": "qwen3-30b-a3b", "qwen3.5-397b": "qwen3.5-397b-a17b",
    "deepseek-v2.5": "deepseek-v2", "deepseek-v3-r1": "deepseek-v3", "deepseek-r1-v3": "deepseek-v3",
    "deepseek-v3.2-exp": "deepseek-v3.2", "qwen3-coder-30b-a3b": "qwen3-30b-a3b", "gpt-oss-120b": "gpt-oss-120b",
    "dsr1": "deepseek-r1", "dsv3": "deepseek-v3", "dsv3.1": "deepseek-v3", "dsv3.2": "deepseek-v3.2",
    "v3.2": "deepseek-v3.2", "v3.2-exp": "deepseek-v3.2", "r1": "deepseek-r1", "v3.1": "deepseek-v3",
}  # fmt: skip
"""Names of one shape."""
_TAIL = r"(?:[ _/-]?(?:[A-Za-z]*\d[\w.]*|[A-Z][\w.]*|lite|coder|next|flash|air|scout|maverick))*"
_NAMED = re.compile(
    r"(?<![A-Za-z])(?:deepseek[ -]?(?:coder[ -]?|math[ -]?|ocr|vl)?(?:r\d|v\d(?:\.\d)?)|kimi[ -]?(?:k\d|linear|vl|dev)|"
    r"longcat|qwen[ -]?\d|qwq|gpt-?oss|glm[ -]?\d|llama[ -]?\d|minimax|mi[sx]tral|ministral|magistral|devstral|ernie|"
    r"hunyuan|pangu|step[ -]?[3-9]|nemotron|gemma|phi[ -]?\d|grok|mimo|ling[ -]|ring[ -]|seed-oss|internlm|intern-s|"
    r"dbrx|falcon|olmo|jamba|arctic|command-?r|exaone|moonlight|granite|baichuan|yi-\d|trinity|solar|opt-\d|dots\.llm|"
    r"dsr1|dsv\d(?:\.\d)?|(?<![\w.-])v3\.[12](?![\w.]))",
    re.IGNORECASE,
)
_STOPS = re.compile(
    r"(?i:sglang|vllm|tensorrt|trt|llm|xllm|nvidia|amd|ascend|h100|h200|h800|h20|gb?[23]00|mi3\d\dx|tp|dp|ep|pp|dep|tep|"
    r"prefill|decode|pd|perfect|default|fp4|nvfp4|mxfp4|eplb|mtp|tbo|dbo|sbo|slo|production|inference\w*|optim\w*|wide|"
    r"simulated|profile|report|technical|blog|paper|deployment)(?:\d[\w.]*)?"
)
"""Words after a model's name that are not of it."""


@lru_cache(maxsize=1)
def _families() -> tuple[tuple[str, str], ...]:
    """(family, name), the longest first: H20 must not match rows of H200."""
    found = ((named_hardware(name).family, name) for name in hardware_names())
    return tuple(sorted(found, key=lambda pair: -len(pair[0])))


def hardware_named(cell: str) -> Hardware | None:
    """Matches `H100`, `8xH100`, `NVIDIA H100-80GB`, `Ascend910C`; neither `GH100` nor `H1000`, nor several kinds."""
    found = {name for name, known in _ALIASES.items() if known.search(cell)}
    for family, name in _families():
        begin = r"(?<![0-9])" if family[0].isdigit() else r"(?:(?<![A-Za-z0-9])|(?<=[0-9]x))"
        end = r"(?![0-9])" if family[-1].isalpha() else r"(?![0-9]|-?3e)"
        if re.search(rf"{begin}{re.escape(family)}{end}", cell, re.IGNORECASE):
            found.add(name)
    if {"h20", "h20-3e"} <= found:
        found.remove("h20")
    if len(found) != 1 or _OTHER_BOARD.search(cell):
        return None
    return named_hardware(found.pop())


def find_model(text: str) -> str | None:
    """The model that a sentence names, with all that belongs to its name; None if it names none."""
    found = _NAMED.search(text)
    if found is None:
        return None
    name, rest = found[0], text[found.end() :]
    joined = re.match(r"[\w.+]*(?:[-_][\w.]+)*", rest)
    assert joined is not None
    name, rest = name + joined[0], rest[joined.end() :]
    while word := re.match(r" (?=[A-Z0-9])([\w.]+(?:-[\w.]+)*)", rest):  # as in `Llama 3.3 70B`, `Kimi K2 Thinking`
        if _STOPS.fullmatch(word[1]) or re.match(r"20\d\d-", word[1]):
            break
        if not re.fullmatch(
            rf"(?i:{_BESIDE_SHAPE}|\d+b|lite|next|coder|flash|air|scout|maverick|\d+(?:\.\d+)?)", word[1]
        ):
            break
        name, rest = f"{name}-{word[1]}", rest[word.end() :]
    return name.rstrip("-_. ")


def model_named(name: str) -> ModelShape | None:
    """A model by its own config; None if it is not surely one of ours: `GLM-4.5-Air` is not `GLM-4.5`."""
    plain = re.sub(r"[\s_]+", "-", name.rpartition("/")[2].strip().lower())
    plain = re.sub(r"^(?:meta-)?(deepseek|kimi|qwen|glm|llama|gpt-?oss)-?(?=[rkv]?\d)", _hyphened, plain)
    known = {each: each for each in model_names()} | _ALIKE
    while plain not in known:
        plain, cut = re.subn(rf"-(?:{_BESIDE_SHAPE})$", "", plain)
        if not cut:
            return None
    return named_model(known[plain])


def _hyphened(found: re.Match[str]) -> str:
    family = "gpt-oss" if found[1] == "gptoss" else found[1]
    return family if family == "qwen" else f"{family}-"
