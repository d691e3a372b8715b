"""Cached tokens over a production trace, told by a split server, against an oracle that only remembers prompts.

The oracle knows every full block that anybody has computed so far, by the tokens from the first one on; the server has
two prefill workers, so that about half of the hits come through the cache pool.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tripool.bench.prompts import ORDINARY_IDS, TokenPrompts
from tripool.bench.trace import TraceRequest, parse_trace
from tripool.bench.workload import trace_shots

from .serving import SplitServer, split_server

BLOCK = 64
IN_A_ROW = 8
TRACE = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"


class Oracle:
    def __init__(self) -> None:
        self._known: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return len(self._known)

    def cached(self, prompt: list[int]) -> int:
        """Tokens of the longest known beginning in whole blocks; the last token is always computed."""
        blocks = 0
        while (blocks + 1) * BLOCK < len(prompt) and hash(tuple(prompt[: (blocks + 1) * BLOCK])) in self._known:
            blocks += 1
        return blocks * BLOCK

    def remember(self, tokens: list[int]) -> None:
        self._known.update(hash(tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK))


def committed(pools: dict[str, Any]) -> int:
    return sum(member.get("committed", 0) for member in pools["cache"])


def wait_for_the_pool(server: SplitServer) -> int:
    """Until every worker has found every member: the pool is a help, and who misses it says nothing.

    Strangers' prompts of one block each, until several in a row were kept; returns how many blocks there are then.
    """
    server.wait(lambda pools: [member["away"] for member in pools["cache"]] == [False, False])
    in_a_row = number = 0
    while in_a_row < IN_A_ROW:
        number += 1
        assert number < 200, "the cache pool keeps nothing"
        before = committed(server.pools())
        body = {"prompt": [240, *(4 + number % 200 for _ in range(BLOCK)), number // 200 + 4], "max_tokens": 2}
        server.http.post("/v1/completions", json=body | {"ignore_eos": True}).raise_for_status()
        server.wait_idle(3)
        in_a_row = in_a_row + 1 if committed(server.pools()) == before + 1 else 0
    return committed(server.pools())


def replay(server: SplitServer, requests: list[TraceRequest], scale: float) -> tuple[int, int]:
    """One request after the other; returns cached tokens and prompt tokens in all."""
    oracle, prompts, others = Oracle(), TokenPrompts(ORDINARY_IDS, 0), wait_for_the_pool(server)
    cached_in_all = tokens_in_all = 0
    for shot in trace_shots(requests, scale_tokens=scale):
        prompt = prompts.ids(shot.pieces)
        body = {"prompt": prompt, "max_tokens": shot.output_tokens, "seed": shot.index, "ignore_eos": True}
        answer = server.http.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status().json()
        told = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert told == oracle.cached(prompt), f"request {shot.index}"
        generated = answer["choices"][0]["token_ids"]
        # A one-token answer has no decode worker that would publish it; the newest token's KV is never computed.
        oracle.remember(prompt + generated[:-1])
        server.wait(lambda pools: committed(pools) == others + oracle.num_blocks)
        cached_in_all, tokens_in_all = cached_in_all + told, tokens_in_all + len(prompt)
    return cached_in_all, tokens_in_all


def made_up_trace(count: int) -> list[TraceRequest]:
    """Conversations that go on, a system prompt that all share, and strangers."""
    rng, chats = Random(3), []
    requests, fresh = [], 1
    for index in range(count):
        if chats and rng.random() < 0.5:
            ids = chats.pop(rng.randrange(len(chats)))
        else:
            ids = (0,) if rng.random() < 0.7 else ()
        more = rng.randrange(1, 4)
        ids = (*ids, *range(fresh, fresh + more))
        fresh += more
        chats.append(ids)
        requests.append(TraceRequest(float(index), 512 * len(ids), rng.randrange(16, 1200), ids))
    return requests


@pytest.mark.prove
def test_cached_tokens_are_those_of_an_oracle() -> None:
    options = ("--cache-gb", "0.02")
    with split_server("fake:context=4096", prefill=2, decode=1, options=options) as server:
        cached, tokens = replay(server, made_up_trace(40), scale=1 / 8)
    assert 0.3 * tokens < cached < tokens


@pytest.mark.prove
def test_cached_tokens_over_a_production_trace() -> None:
    if not TRACE.exists():
        pytest.skip("the production traces are not beside this clone")
    with TRACE.open() as lines:
        requests = parse_trace(lines, max_requests=1000)
    options = ("--cache-gb", "0.1")
    with split_server("fake:context=16384,blocks=1024", prefill=2, decode=1, options=options) as server:
        cached, tokens = replay(server, requests, scale=1 / 16)
    print(f"{len(requests)} requests: {cached:,} of {tokens:,} prompt tokens cached, as the oracle says")
    assert cached > 0
