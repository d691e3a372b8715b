"""The bundled model over HTTP, split into processes: the tokens of the engine alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tripool import LLM
from tripool.config import EngineConfig
from tripool.core import SamplingParams
from tripool.engine.load import load_engine

from .serving import split_server
from .streams import Asked, Clients

PROMPTS = ["Once upon a time", "The sea at night is", "A clock that runs backwards", "Bread is made of"]
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


def test_split_over_http_is_the_engine_alone(offline: LLM) -> None:
    asked = bodies(9)
    options = ("--precision", "int8", "--threads", "1", "--kv-gb", "0.02")
    with split_server("tiny", prefill=1, decode=1, options=options) as server:
        outcomes = asyncio.run(Clients(server.url, [Asked(body) for body in asked]).run())
        server.wait_idle(2)
    for body, outcome in zip(asked, outcomes, strict=True):
        params = SamplingParams.from_options({name: value for name, value in body.items() if name != "prompt"})
        (alone,) = offline.generate([body["prompt"]], params)
        assert outcome.error is None
        assert outcome.tokens == {choice.index: list(choice.token_ids) for choice in alone.choices}
