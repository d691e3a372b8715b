"""Log-probabilities in the two styles of OpenAI's clients: per token for a chat, in columns for a completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tripool.core import TokenLogprobs
from tripool.text import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

Pairs = Iterable[tuple[int, TokenLogprobs]]


def chat_logprobs(tokenizer: Tokenizer, pairs: Pairs) -> dict[str, Any]:
    content = []
    for token_id, logprobs in pairs:
        top = [_scored(tokenizer, top_id, logprob) for top_id, logprob in logprobs.top]
        content.append(_scored(tokenizer, token_id, logprobs.chosen) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, pairs: Pairs, text_offset: int) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, logprobs in pairs:
        token = tokenizer.token_text(token_id)
        scores = {tokenizer.token_text(i): max(score, _LEAST) for i, score in logprobs.top}
        columns["tokens"].append(token)
        columns["token_logprobs"].append(max(logprobs.chosen, _LEAST))
        # The chosen token is always listed, also when it was not among the likeliest.
        columns["top_logprobs"].append({token: max(logprobs.chosen, _LEAST)} | scores)
        columns["text_offset"].append(text_offset)
        text_offset += len(token)
    return columns


def _scored(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(raw)}
