"""Scores of prompts over HTTP in 8 bits: the same bits split as colocated, and close to those of float32.

`tests/clients/test_lm_eval.py` compares float32 with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from clients.conftest import serving

pytestmark = pytest.mark.prove

STORY = "Once upon a time there was a little dog who lived by the sea. One day he met a cat. "
PROMPTS = ["A dog", STORY, STORY * 12, STORY * 12 + "The end."]
"""The third is scored in several chunks; the fourth has a known prefix, which is computed again."""
WITHIN_S = 120.0
MEAN_NATS, MOST_NATS, SHIFT_NATS = 0.15, 2.0, 0.02
"""Between 8 bits and float32, over all tokens: of a single score, of the worst, and of the mean (the perplexity)."""


@contextmanager
def served(*words: str) -> Iterator[httpx.Client]:
    running = serving("tiny", *words)
    with httpx.Client(base_url=next(running).url, timeout=WITHIN_S) as http:
        yield http
    next(running, None)


def scores(http: httpx.Client) -> list[dict[str, Any]]:
    found = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "seed": 1, "echo": True, "logprobs": 3}
        answer = http.post("/v1/completions", json=body | {"prompt_logprobs": 2})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        found.append({"echo": choice["logprobs"], "by id": choice["prompt_logprobs"], "text": choice["text"]})
    return found


def test_split_colocated_and_float32() -> None:
    with served() as http:
        colocated = scores(http)
        assert scores(http) == colocated, "a prompt that is known is scored as a new one"
    with served("--split") as http:
        assert scores(http) == colocated
    with served("--precision", "float32") as http:
        whole = scores(http)
    differences: list[float] = []
    for ours, theirs in zip(colocated, whole, strict=True):
        assert ours["echo"]["tokens"] == theirs["echo"]["tokens"]
        pairs = list(zip(ours["echo"]["token_logprobs"], theirs["echo"]["token_logprobs"], strict=True))
        assert pairs[0][0] is None and all(score is not None for score, _ in pairs[1:])
        differences += [a - b for a, b in pairs[1:]]
    sizes, count = [abs(one) for one in differences], len(differences)
    print(f"{count} tokens: mean {sum(sizes) / count:.4f}, most {max(sizes):.4f}, shift {sum(differences) / count:.4f}")
    assert sum(sizes) / count < MEAN_NATS and max(sizes) < MOST_NATS and abs(sum(differences)) / count < SHIFT_NATS
