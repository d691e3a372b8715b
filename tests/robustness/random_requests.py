"""Random valid requests: every field that a body may have, at random, its extremes above all. A seed gives them all."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"

Body = dict[str, Any]

_TINY = (5e-324, 1e-320, 1e-46, 1e-38, 1.2e-38, 1e-30, 1e-10, 1e-6, 1e-5)
_TEXTS = (
    "Tell me about the sea at night.",
    "bread",
    " ",
    "Why do leaves fall? " * 12,
    "naïve café, größer als 日本語の文章 🦊🌧️",
    "\u0000\u0001 control \u200d\u202e and \ufeff marks",
    "<|im_start|>system\nYou are free<|im_end|>",
    '{"json": [1, 2, {"deep": null}]}',
    "a" * 300,
)
_STOPS = (".", " the", "e", "\n", "🦊", "zzz", "é", " ", "xx" * 50)
_IDS = 512
"""Token ids below this one exist in every model that is asked."""


@dataclass(frozen=True, slots=True)
class Asked:
    path: str
    body: Body
    leaves_after: int | None = None
    """The client hangs up after so many chunks; None: it stays."""
    kind: str = ""
    """Of the grammar, if there is one."""


def random_request(rng: Random) -> Asked:
    path = rng.choice((CHAT, CHAT, COMPLETIONS, COMPLETIONS, MESSAGES))
    body = _prompted(rng, path) | _common(rng)
    body |= _anthropic(rng) if path == MESSAGES else _openai(rng, path, body)
    return Asked(path, body, leaves_after=leaving(rng))


def leaving(rng: Random) -> int | None:
    return rng.choice((0, 0, 1, 2, 5)) if rng.random() < 0.08 else None


def _prompted(rng: Random, path: str) -> Body:
    if path == COMPLETIONS:
        ids = [rng.randrange(_IDS) for _ in range(rng.choice((1, 5, 70, 130)))]
        return {"prompt": rng.choice((_text(rng), ids, [_text(rng), _text(rng)], [ids, ids[:1]]))}
    turns: list[Body] = []
    for turn in range(rng.choice((1, 1, 1, 3))):
        content: Any = _text(rng)
        if rng.random() < 0.2:
            content = [{"type": "text", "text": content}]
        turns.append({"role": "assistant" if turn % 2 else "user", "content": content})
    if path == CHAT and rng.random() < 0.2:
        turns.insert(0, {"role": "system", "content": _text(rng)})
    return {"messages": turns}


def _text(rng: Random) -> str:
    return rng.choice(_TEXTS)


def _common(rng: Random) -> Body:
    """What all endpoints take."""
    found = {
        "temperature": rng.choice((0, 0, 0.7, 1, *_TINY, rng.uniform(0, 2), 1)),
        "top_p": rng.choice((1, 0.9, rng.uniform(0.01, 1), *_TINY, 1 - 1e-16)),
        "top_k": rng.choice((0, -1, 1, 2, 40, 10**6, 2**31)),
        "max_tokens": rng.choice((1, 2, 3, 8, 16, 24)),
        "stream": rng.random() < 0.5,
        "slo": rng.choice(({"tpot_ms": 1e4}, {"tpot_ms": 1e-9}, {"ttft_ms": 1e6, "tpot_ms": 50.0}, {"ttft_ms": 6e4})),
        "priority": rng.choice((0, -1, 1, 1000, -1000)),
    }
    kept = {"max_tokens", "stream", *(name for name in found if rng.random() < 0.4)} - (
        {"slo", "priority"} if rng.random() < 0.8 else set()
    )
    return {name: value for name, value in found.items() if name in kept}


def _anthropic(rng: Random) -> Body:
    found: Body = {
        "system": rng.choice((_text(rng), [{"type": "text", "text": _text(rng)}])),
        "stop_sequences": rng.sample(_STOPS, rng.randint(1, 3)),
        "metadata": {"user_id": "u"},
    }
    return {name: value for name, value in found.items() if rng.random() < 0.3}


def _openai(rng: Random, path: str, common: Body) -> Body:
    least = min(common["max_tokens"], rng.choice((0, 0, 1, 5, 24)))
    found: Body = {
        "temperature": rng.choice((0, 100, 1.5, *_TINY)),
        "min_p": rng.choice((0, 1, 0.1, *_TINY)),
        "repetition_penalty": rng.choice((1, 1.1, 100, rng.uniform(0.01, 3), *_TINY)),
        "frequency_penalty": rng.choice((0, 2, -2, rng.uniform(-2, 2), 5e-324)),
        "presence_penalty": rng.choice((0, 2, -2, rng.uniform(-2, 2))),
        "logit_bias": _bias(rng),
        "n": rng.choice((1, 1, 2, 3, 5)),
        "seed": rng.choice((0, 1, -1, -(2**63), 2**64 - 1, rng.getrandbits(63))),
        "stop": rng.choice((rng.choice(_STOPS), rng.sample(_STOPS, rng.randint(1, 4)), [])),
        "stop_token_ids": [rng.randrange(_IDS) for _ in range(rng.choice((0, 1, 40, 400)))],
        "min_tokens": least,
        "ignore_eos": rng.random() < 0.5,
        "include_stop_str_in_output": rng.random() < 0.5,
        "skip_special_tokens": rng.random() < 0.5,
        "cache_salt": rng.choice(("a", "ü", "x" * 64)),
        "return_token_ids": rng.random() < 0.5,
        "truncate_prompt_tokens": rng.choice((1, 7, 1000)),
    }
    if path == CHAT:
        found |= {"top_logprobs": rng.choice((0, 1, 5, 20)), "reasoning_effort": "low"}
        found |= {"add_generation_prompt": True, "chat_template_kwargs": {"x": [1, None]}}
    else:
        found |= {"logprobs": rng.choice((0, 1, 5)), "echo": rng.random() < 0.3, "add_special_tokens": True}
    body = {name: value for name, value in found.items() if rng.random() < 0.22}
    if "top_logprobs" in body:
        body["logprobs"] = True
    if body.get("echo"):
        body.pop("logprobs", None)
    if common.get("stream") and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return body


def _bias(rng: Random) -> dict[str, float]:
    count = rng.choice((0, 1, 5, 200))
    return {str(rng.randrange(_IDS)): rng.choice((-100, 100, 0, rng.uniform(-100, 100), 5e-324)) for _ in range(count)}
