"""The bundled model over HTTP, split into processes: the tokens of the engine alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tripool import LLM
from tripool.config import EngineConfig
from tripool.core import SamplingParams
from tripool.engine.load import load_engine
from tripool.gateway.structure import read_structure

from .serving import split_server
from .streams import Asked, Clients, Outcome

PROMPTS = ["Once upon a time", "The sea at night is", "A clock that runs backwards", "Bread is made of"]
AT_ONCE = 48
"""Clients at a time: more would be refused, as trials of grammars wait in a bounded queue."""
LEAST = -9999.0
"""What JSON has for minus infinity."""
CONFIG = EngineConfig(precision="int8", threads=1, kv_gb=0.02)


def bodies(count: int) -> list[dict[str, Any]]:
    varied: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "n": 2},
        {"temperature": 0.7, "top_p": 0.9},
    ]
    return [
        {"prompt": PROMPTS[i % 4] + " and so on" * (i * 7 % 40), "seed": i, "max_tokens": 24, **varied[i % 3]}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM(load_engine("tiny", CONFIG)) as llm:
        yield llm


def mixed(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Greedy and seeded, several choices, stops, and a grammar of each kind, every third with log-probabilities; drafts
    are on."""
    rng = random.Random(seed)
    person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}}}
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "n": 3},
        {"temperature": 0.7, "top_k": 40, "stop": ["the", "."]},
        {"temperature": 0.0, "guided_regex": "[a-z]{3,9} and [a-z]{3,9}"},
        {"temperature": 0.8, "guided_json": person | {"required": ["name", "old"]}},
        {"temperature": 1.0, "guided_choice": ["a boat", "a boathouse", "nothing"]},
        {"temperature": 0.6, "min_p": 0.05, "repetition_penalty": 1.1},
    ]
    return [
        {
            "prompt": PROMPTS[rng.randrange(4)] + " and so on" * rng.randrange(60) + f" ({number})",
            "seed": rng.randrange(2**31),
            "max_tokens": rng.randint(1, 60),
            **rng.choice(wishes),
            **({"logprobs": 2} if number % 3 == 0 else {}),
        }
        for number in range(count)
    ]


def params_of(body: dict[str, Any]) -> SamplingParams:
    options = {name: value for name, value in body.items() if name != "prompt" and not name.startswith("guided_")}
    return replace(SamplingParams.from_options(options), structure=read_structure(body))


def check(offline: LLM, asked: list[dict[str, Any]], outcomes: list[Outcome]) -> None:
    """Every token, and every log-probability that was asked for, is that of the engine alone."""
    for body, outcome in zip(asked, outcomes, strict=True):
        (alone,) = offline.generate([body["prompt"]], params_of(body))
        assert outcome.error is None
        assert outcome.tokens == {choice.index: list(choice.token_ids) for choice in alone.choices}
        scores = {choice.index: choice.logprobs for choice in alone.choices if choice.logprobs is not None}
        assert outcome.logprobs == {index: [max(one.chosen, LEAST) for one in each] for index, each in scores.items()}


def compare(offline: LLM, asked: list[dict[str, Any]], *, each: int, kv_gb: str) -> None:
    options = ("--precision", "int8", "--threads", "1", "--kv-gb", kv_gb)
    with split_server("tiny", prefill=each, decode=each, options=options) as server:
        outcomes = asyncio.run(Clients(server.url, [Asked(body) for body in asked], AT_ONCE).run())
        server.wait_idle(2 * each)
    check(offline, asked, outcomes)


def test_split_over_http_is_the_engine_alone(offline: LLM) -> None:
    compare(offline, bodies(9), each=1, kv_gb="0.02")


@pytest.mark.prove
def test_three_hundred_mixed_requests_over_two_and_two_processes(offline: LLM) -> None:
    compare(offline, mixed(300), each=2, kv_gb="0.2")
