"""Three hosts that share only a network: A has gateway and prefill, B decode, C decode and a part of the cache."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hosts.fleet import Fleet, fleet
from hosts.joining import join_line, joined
from hosts.namespaces import network, possible
from split.serving import split_server
from split.streams import Asked, Clients, Outcome, expected, make_bodies
from tripool import LLM, SamplingParams
from tripool.checkpoints.names import BUNDLED

pytestmark = [pytest.mark.prove, pytest.mark.skipif(not possible(), reason="needs network namespaces")]


@pytest.fixture
def three() -> Iterator[Fleet]:
    with fleet() as found:
        found.join("b")
        found.join("c", "--cache-gb", "0.05")
        found.wait(3)
        yield found


def check(outcomes: list[Outcome], bodies: list[dict]) -> None:  # type: ignore[type-arg]
    wrong = [
        (number, one.error)
        for number, one in enumerate(outcomes)
        if one.error or one.tokens != expected(bodies[number])
    ]
    assert not wrong, wrong[:5]


def test_300_requests_are_answered_as_by_one_process(three: Fleet) -> None:
    bodies = make_bodies(300, prompt_tokens=900, answer_tokens=40, seed=3)
    outcomes = asyncio.run(Clients(three.server.url, [Asked(body) for body in bodies], at_once=48).run())
    check(outcomes, bodies)
    three.server.wait_idle(3)
    workers = {worker["worker"]: worker["steps"] for worker in three.server.pools()["workers"]}
    assert all(workers.values()), f"every host has worked: {workers}"


def test_the_bundled_model_answers_as_in_one_process() -> None:
    """Its weights, too, have come over the network: the other host's user has no copy."""
    prompts = [f"Once upon a time there were {n} small pools. " * (3 + n) for n in range(12)]
    with LLM("tiny", threads=1, kv_gb=0.05) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        want = [answer.choices[0].text for answer in llm.generate(prompts, params)]
    with network() as net, tempfile.TemporaryDirectory() as kept:
        address = net.address("a")
        checkpoint = Path(kept) / "model"
        shutil.copytree(BUNDLED["tiny"], checkpoint)  # under another name than the bundled one: it must be fetched
        options = ("--listen", f"{address}:9100", "--host", address, "--open", "--threads", "1", "--kv-gb", "0.05")
        with split_server(str(checkpoint), decode=0, options=options, prefix=net.prefix("a")) as server:
            prefix = (*net.prefix("b"), "env", f"XDG_CACHE_HOME={kept}/b")
            arguments = [*join_line(server), "--role", "decode", "--threads", "1", "--kv-gb", "0.05"]
            with joined(arguments, prefix=prefix) as host:
                server.wait(lambda pools: len(pools["workers"]) == 2)
                assert any(line.startswith("fetch:") for line in host.said), host.said
                bodies = [{"prompt": prompt, "max_tokens": 24, "temperature": 0} for prompt in prompts]
                with ThreadPoolExecutor(6) as pool:
                    answers = list(pool.map(lambda body: server.http.post("/v1/completions", json=body).json(), bodies))
                assert [answer["choices"][0]["text"] for answer in answers] == want
