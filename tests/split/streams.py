"""Many clients at once, each reading its own stream; and what an engine alone would have told them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tripool.core import Request, SamplingParams
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake

DEADLINE_S = 60.0
AGAIN_S = 0.05
"""Until a client with an idempotency key asks again."""


@dataclass(slots=True)
class Outcome:
    """What one client saw, choice by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    """Of the tokens, where they were asked for."""
    error: str | None = None
    usage: dict[str, Any] | None = None
    left: bool = False
    """It hung up by itself."""
    num_tries: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    body: dict[str, Any]
    leaves: bool = False
    """Hangs up when it is told to."""
    key: str = ""
    """Its idempotency key: with one it asks again, from where it is, when its stream is cut off."""


def make_bodies(count: int, *, prompt_tokens: int, answer_tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    bodies = []
    for i in range(count):
        size = rng.randint(prompt_tokens // 2, prompt_tokens)
        bodies.append(
            {
                "prompt": [rng.randint(4, 250) for _ in range(size)],
                "seed": i,
                "n": 2 if i % 5 == 4 else 1,
                "max_tokens": rng.randint(answer_tokens // 2, answer_tokens),
                "ignore_eos": True,
            }
        )
    return bodies


def expected(body: dict[str, Any]) -> dict[int, list[int]]:
    """The fake engine, offline and alone."""
    text = fake_text()
    engine = PagedFake(text, context_tokens=10**9, num_blocks=4096)
    options = {name: value for name, value in body.items() if name not in ("prompt", "seed")}
    params = SamplingParams.from_options(options)
    engine.add(
        Request(id="x", prompt_ids=tuple(body["prompt"]), params=params, seed=body["seed"], end_ids=text.end_ids)
    )
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for event in engine.step():
            tokens.setdefault(event.choice, []).append(event.token_id)
    return tokens


class Clients:
    """`run` all of them on an event loop, `at_once` or all together; `flowing` is set once the first has a token."""

    def __init__(self, url: str, asked: Sequence[Asked], at_once: int | None = None) -> None:
        self.url, self.asked, self.at_once = url, asked, at_once
        self.outcomes = [Outcome() for _ in asked]
        self.flowing = asyncio.Event()
        self.leave = asyncio.Event()

    @property
    def num_served(self) -> int:
        """Those that have their whole answer."""
        return sum(len(o.finish) == a.body["n"] for a, o in zip(self.asked, self.outcomes, strict=True))

    async def run(self) -> list[Outcome]:
        limits = httpx.Limits(max_connections=self.at_once)
        timeout = httpx.Timeout(DEADLINE_S, pool=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits) as http:
            await asyncio.gather(*(self._one(http, *pair) for pair in zip(self.asked, self.outcomes, strict=True)))
        return self.outcomes

    async def _one(self, http: httpx.AsyncClient, asked: Asked, outcome: Outcome) -> None:
        if not asked.leaves:
            await self._read(http, asked, outcome)
            return
        reading = asyncio.ensure_future(self._read(http, asked, outcome))
        leaving = asyncio.ensure_future(self.leave.wait())
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        outcome.left = not reading.done()
        reading.cancel()
        leaving.cancel()
        await asyncio.wait({reading, leaving})

    async def _read(self, http: httpx.AsyncClient, asked: Asked, outcome: Outcome) -> None:
        extra = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        headers, deadline_s = {"Idempotency-Key": asked.key} if asked.key else {}, time.monotonic() + DEADLINE_S
        while True:
            outcome.num_tries += 1
            try:
                async with http.stream("POST", "/v1/completions", json=asked.body | extra, headers=headers) as response:
                    if response.status_code != 200:
                        outcome.error = (await response.aread()).decode()
                        return
                    if await self._events(response, headers, outcome):
                        return
                    problem = "it ended without its last event"
            except httpx.HTTPError as error:
                problem = repr(error)
            if not asked.key or time.monotonic() > deadline_s:
                outcome.error = problem
                return
            await asyncio.sleep(AGAIN_S)

    async def _events(self, response: httpx.Response, headers: dict[str, str], outcome: Outcome) -> bool:
        """Whether it came to its end. An event counts when it is whole, and with it its id."""
        data = event_id = ""
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
            elif line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif data == "[DONE]":
                return True
            elif data:
                self._take(json.loads(data), outcome)
                if outcome.error is not None:
                    return True
                if event_id:
                    headers["Last-Event-ID"] = event_id
                data = event_id = ""
        return False

    def _take(self, chunk: dict[str, Any], outcome: Outcome) -> None:
        if "error" in chunk:
            outcome.error = chunk["error"]["message"]
            return
        outcome.usage = chunk.get("usage") or outcome.usage
        for choice in chunk["choices"]:
            outcome.tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
            if choice.get("logprobs"):
                outcome.logprobs.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"] is not None:
                outcome.finish[choice["index"]] = choice["finish_reason"]
            self.flowing.set()
