"""Pre-tokenisers of byte-level vocabularies: data, by the name in the GGUF metadata.

Each entry restates the model's own tokenizer.json; the file has only the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tripool.text.familiar_patterns import (
    DEEPSEEK_CODER_PATTERNS,
    DEEPSEEK_LLM_PATTERNS,
    DEEPSEEK_V3_PATTERNS,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
)

Step = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    steps: tuple[Step, ...]
    normalizer: Step | None = None
    whole_words: bool = False
    """Whether a piece that is in the vocabulary is taken whole, even without merges that lead to it."""
    adds_begin: bool = False
    """Default for adding the begin token when the file does not say."""


def _split(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> Step:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


GPT2 = PreTokenizer((_byte_level(use_regex=True),))
SINGLE_DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)))
LLAMA3 = PreTokenizer(
    (_split(LLAMA3_PATTERN), _byte_level(use_regex=False)),
    whole_words=True,
    adds_begin=True,
)
QWEN2 = PreTokenizer((_split(QWEN2_PATTERN), _byte_level(use_regex=False)), normalizer={"type": "NFC"})
DEEPSEEK_LLM = PreTokenizer((*map(_split, DEEPSEEK_LLM_PATTERNS), _byte_level(use_regex=False)))
DEEPSEEK_CODER = PreTokenizer(
    (
        *map(_split, DEEPSEEK_CODER_PATTERNS),
        {"type": "Digits", "individual_digits": True},
        _byte_level(use_regex=False),
    )
)
DEEPSEEK_V3 = PreTokenizer((*map(_split, DEEPSEEK_V3_PATTERNS), _byte_level(use_regex=False)))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK_V3,
}
