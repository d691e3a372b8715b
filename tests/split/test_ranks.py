"""Instances of several ranks over HTTP, as real processes: the tokens of one engine, also while ranks die or stop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tripool import LLM
from tripool.cli.status import render
from tripool.engine.load import load_engine
from tripool.experts.prompt_split import PromptView
from tripool.experts.slabs import attach_prompts

from . import faults, forking
from .serving import DEADLINE_S, SplitServer, split_server
from .streams import Asked, Clients, Outcome
from .test_tiny import CONFIG, LEAST, bodies, check, mixed, params_of

FORKING = f"import runpy; runpy.run_path({forking.__file__!r}, run_name='__main__')"
OPTIONS = ("--precision", "int8", "--threads", "1", "--kv-gb", "0.02")
PREFILL, DECODE = "1x2", "1x3"
WORKERS = 5


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM(load_engine("tiny", CONFIG)) as llm:
        yield llm


@pytest.fixture(scope="module")
def server() -> Iterator[SplitServer]:
    with split_server("tiny", prefill=PREFILL, decode=DECODE, options=OPTIONS, start=FORKING) as running:
        yield running


def strike(server: SplitServer, worker: str, fault: Callable[[int], None]) -> int:
    """The process that was hit. One that was stopped before may be replaced just now."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        for one in server.pools()["workers"]:
            if one["worker"] == worker:
                with contextlib.suppress(ProcessLookupError):
                    fault(one["pid"])
                    return one["pid"]
        assert time.monotonic() < deadline_s


def all_there(pools: dict[str, Any]) -> bool:
    return len(pools["workers"]) == WORKERS and all(rank["present"] for i in pools["instances"] for rank in i["ranks"])


def with_fault(
    server: SplitServer,
    asked: list[dict[str, Any]],
    worker: str,
    fault: Callable[[int], None],
    after_s: float = 0.0,
    wake_s: float | None = None,
) -> list[Outcome]:
    """The fault hits the worker `after_s` after the first token of any answer; `wake_s` later it is woken."""

    async def run() -> list[Outcome]:
        clients = Clients(server.url, [Asked(body) for body in asked], at_once=48)
        running = asyncio.ensure_future(clients.run())
        await asyncio.wait_for(clients.flowing.wait(), DEADLINE_S)
        await asyncio.sleep(after_s)
        pid = await asyncio.to_thread(strike, server, worker, fault)
        if wake_s is not None:
            await asyncio.sleep(wake_s)
            faults.wake(pid)
        return await running

    outcomes = asyncio.run(run())
    server.wait(all_there)
    server.wait_idle(WORKERS)
    return outcomes


def long_bodies(count: int, seed: int) -> list[dict[str, Any]]:
    return [body | {"max_tokens": 60, "seed": seed + body["seed"]} for body in bodies(count)]


def test_ranks_over_http_give_the_tokens_of_one_engine(offline: LLM, server: SplitServer) -> None:
    asked = bodies(9)
    check(offline, asked, asyncio.run(Clients(server.url, [Asked(body) for body in asked]).run()))
    server.wait_idle(WORKERS)
    pools = server.pools()
    assert sorted((w["instance"], w["worker"]) for w in pools["workers"]) == [
        *(("decode-0", f"decode-0-r{rank}") for rank in range(3)),
        *(("prefill-0", f"prefill-0-r{rank}") for rank in range(2)),
    ]
    decode, prefill = pools["instances"]
    assert (decode["name"], len(decode["ranks"])) == ("decode-0", 3) and decode["epoch"] >= 3
    assert (prefill["name"], len(prefill["ranks"])) == ("prefill-0", 2) and prefill["epoch"] >= 2
    for instance in (decode, prefill):
        assert all(rank["present"] and rank["experts"] and rank["rows"] for rank in instance["ranks"])
    console = Console(file=StringIO(), width=200)
    console.print(render(pools))
    assert isinstance(console.file, StringIO) and "prefill-0: map" in console.file.getvalue()
    metrics = server.http.get("/metrics").text
    assert 'tripool_expert_map_epoch{instance="decode-0",model_name="tiny"}' in metrics
    assert 'tripool_rank_present{instance="prefill-0",model_name="tiny",rank="1"} 1.0' in metrics
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text("utf-8")
    named = set(re.findall(r"`(tripool_\w+)`", page))
    assert named == set(re.findall(r"^# TYPE (tripool_(?:expert|rank)_\w+)", metrics, re.MULTILINE))


@pytest.mark.parametrize("worker", ["decode-0-r1", "prefill-0-r0"])
def test_a_killed_rank_changes_no_token(offline: LLM, server: SplitServer, worker: str) -> None:
    asked = long_bodies(6, 100 if worker.startswith("decode") else 200)
    before = server.worker_ids()
    check(offline, asked, with_fault(server, asked, worker, faults.kill))
    assert {name for name, _ in before ^ server.worker_ids()} == {worker}, "the others went on"


def test_a_stopped_rank_is_replaced_and_changes_no_token(offline: LLM, server: SplitServer) -> None:
    """The others ask it for rows and get no answer, long before its heartbeats are missed."""
    asked = long_bodies(6, 300)
    before = server.worker_ids()
    check(offline, asked, with_fault(server, asked, "decode-0-r2", faults.stop))
    assert {name for name, _ in before ^ server.worker_ids()} == {"decode-0-r2"}
    assert any("process ended" in line and "silent for" in line for line in server.log), server.log


def test_long_prompts_are_shared_by_prefill_ranks(offline: LLM, server: SplitServer) -> None:
    """One rank is killed in the middle: it owns one of the prompts, or helps."""
    ids = random.Random(5)
    bodies_ = [
        {
            "prompt": [ids.randrange(100, 8000) for _ in range(length)],
            "max_tokens": 4,
            "seed": length,
            "temperature": 0.8,
        }
        for length in (900, 20, 700)
    ]
    asked = [body | {"ignore_eos": True} for body in bodies_]
    check(offline, asked, with_fault(server, asked, "prefill-0-r1", faults.kill))
    folder = Path(server.pools()["join"].removeprefix("ipc://")).parent
    view = PromptView(*attach_prompts(folder / "prefill-0.prompts"))
    assert any(int(view.owner(rank)["state"][0]) & 0xFFFFFFFF for rank in range(2)), "a step was shared"


def check_prompt_scores(offline: LLM, server: SplitServer, lengths: Sequence[int]) -> None:
    """Every log-probability of prompts too, which cannot be streamed."""
    ids = random.Random(8)
    for length in lengths:
        body = {"prompt": [ids.randrange(100, 8000) for _ in range(length)], "max_tokens": 3, "seed": length}
        body |= {"prompt_logprobs": 2, "temperature": 0.7}
        (choice,) = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        (alone,) = offline.generate([body["prompt"]], params_of(body))
        assert choice["text"] == alone.text and alone.prompt_logprobs is not None
        shown = [{int(name): one["logprob"] for name, one in each.items()} for each in choice["prompt_logprobs"][1:]]
        assert shown == [
            {name: max(score, LEAST) for name, score in (*scores.top, (token, scores.chosen))}
            for token, scores in zip(body["prompt"][1:], alone.prompt_logprobs, strict=True)
        ]


def test_log_probabilities_of_prompts(offline: LLM, server: SplitServer) -> None:
    check_prompt_scores(offline, server, (500, 40))


def leaked(server: SplitServer) -> list[str]:
    """Files of dead ranks in the run's folder."""
    folder = Path(server.pools()["join"].removeprefix("ipc://")).parent
    living = {f"{name}.{epoch}" for name, epoch in server.worker_ids()}
    ranks = [path.name for path in folder.iterdir() if "-r" in path.name]
    return [name for name in ranks if name.rpartition(".")[0] not in living]


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "rounds"), [("kill", 50), ("stop", 10)])
def test_many_lost_ranks_change_no_token(offline: LLM, server: SplitServer, kind: str, rounds: int) -> None:
    rng = random.Random(kind)
    workers = [f"decode-0-r{rank}" for rank in range(3)] + [f"prefill-0-r{rank}" for rank in range(2)]
    for number in range(rounds):
        asked = mixed(12, number)
        worker, after_s = rng.choice(workers), rng.uniform(0.0, 0.5)
        began_s = time.monotonic()
        if kind == "kill":
            outcomes = with_fault(server, asked, worker, faults.kill, after_s)
        else:
            outcomes = with_fault(server, asked, worker, faults.stop, after_s, rng.choice((0.1, 0.4, 0.8, 1.5)))
        check(offline, asked, outcomes)
        print(f"{kind} {number}: {worker} after {after_s:.2f} s, all done in {time.monotonic() - began_s:.1f} s")
    assert leaked(server) == []


@pytest.mark.prove
@pytest.mark.parametrize(("prefill", "decode"), [("1", "1x2"), ("1x2", "1x3"), ("2", "2x2"), ("1x1+1", "1x2+2")])
def test_three_hundred_mixed_requests_over_ranks(offline: LLM, prefill: str, decode: str) -> None:
    """Started as a user starts them."""
    asked = mixed(300)
    with split_server("tiny", prefill=prefill, decode=decode, options=(*OPTIONS[:4], "--kv-gb", "0.2")) as running:
        outcomes = asyncio.run(Clients(running.url, [Asked(body) for body in asked], at_once=48).run())
        assert not [outcome.error for outcome in outcomes if outcome.error], running.log
        check_prompt_scores(offline, running, (700, 1, 90, 300))
        running.wait_idle(len(running.pools()["workers"]))
    check(offline, asked, outcomes)
