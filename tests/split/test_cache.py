"""The cache pool behind a split server: what one worker computed, any other finds, also after its death."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import faults
from .serving import SplitServer, split_server
from .streams import expected


@pytest.fixture
def server() -> Iterator[SplitServer]:
    with split_server("fake", prefill=1, decode=1, options=("--cache-gb", "0.005")) as running:
        running.wait(lambda pools: [member["away"] for member in pools["cache"]] == [False, False])
        yield running


def ask(server: SplitServer, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 1, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status().json()
    assert answer["choices"][0]["token_ids"] == expected(body)[0]
    return answer


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def committed(pools: dict[str, Any]) -> int:
    return sum(member["committed"] for member in pools["cache"])


def replace(server: SplitServer, role: str) -> None:
    before = server.worker_ids()
    faults.kill(server.pids(role)[0])
    server.wait(lambda pools: server.worker_ids() != before and len(pools["workers"]) == len(before))


def test_the_next_turn_of_a_chat_finds_question_and_answer(server: SplitServer) -> None:
    question = list(range(4, 204))
    first = ask(server, question, max_tokens=600)
    so_far = question + first["choices"][0]["token_ids"]
    # All full blocks but that of the newest token, whose KV is never computed.
    blocks = (len(so_far) - 1) // 64
    server.wait(lambda pools: committed(pools) == blocks)
    second = ask(server, [*so_far, 7, 8, 9])
    assert cached(first) == 0
    assert cached(second) == blocks * 64
    assert cached(second) >= 0.95 * len(so_far)


def test_a_new_worker_finds_what_the_old_one_computed(server: SplitServer) -> None:
    prompt = list(range(4, 250)) * 2
    ask(server, prompt)
    server.wait(lambda pools: committed(pools) == len(prompt) // 64)
    replace(server, "prefill")
    assert cached(ask(server, prompt)) == (len(prompt) - 1) // 64 * 64
    server.wait_idle(2)
    server.wait(lambda pools: all((m["leases"], m["reserved"]) == (0, 0) for m in pools["cache"]))


def test_without_a_member_everything_goes_on_and_it_comes_back_with_its_blocks(server: SplitServer) -> None:
    prompt = list(range(4, 250)) * 2
    ask(server, prompt)
    server.wait(lambda pools: committed(pools) == len(prompt) // 64)
    folder = Path(server.pools()["join"].removeprefix("ipc://")).parent
    faults.kill(server.child("cache-0"))
    faults.kill(server.child("cache-1"))
    ask(server, [5, *prompt])
    server.wait(lambda pools: [member["away"] for member in pools["cache"]] == [False, False])
    server.wait(lambda pools: committed(pools) >= len(prompt) // 64)
    replace(server, "prefill")
    assert cached(ask(server, prompt)) == (len(prompt) - 1) // 64 * 64
    assert sorted(file.name for file in folder.glob("*.arena")) == ["cache-0.arena", "cache-1.arena"]
