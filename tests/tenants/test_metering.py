"""Metering equals what clients saw: many at once, streaming and not, several answers each, some of them hang up."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.tenants.key_store import KeyStore
from tripool.tenants.usage_log import read_usage

from .serving import DEADLINE_S, Guarded, bearer, guarded_server, make_keys, paged

NUMBERS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


def metered(path: Path, server: Guarded) -> dict[str, Counter[str]]:
    server.usage_log.flush()
    with KeyStore(path) as key_store:
        return {row["key"]: Counter({name: row[name] for name in NUMBERS}) for row in read_usage(key_store, by="key")}


def usage_of(said: dict[str, Any]) -> Counter[str]:
    cached = (said.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    counts = {"prompt_tokens": said["prompt_tokens"], "completion_tokens": said["completion_tokens"]}
    return Counter({"requests": 1, "cached_tokens": cached, **counts})


def anthropic_usage(said: dict[str, Any]) -> Counter[str]:
    """Anthropic tells read and computed prompt tokens apart."""
    cached = said.get("cache_read_input_tokens") or 0
    prompt = said["input_tokens"] + cached
    return Counter(requests=1, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=said["output_tokens"])


def bodies(count: int) -> list[tuple[str, dict[str, Any]]]:
    rng = random.Random(5)
    shared = [4 + rng.randrange(240) for _ in range(200)]
    made: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        limits = {"max_tokens": rng.randint(1, 12), "seed": number, "n": rng.choice([1, 1, 2]), "ignore_eos": True}
        streams = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        if number % 3 == 0:
            prompts = [[*shared[: rng.randrange(1, 200)], number % 200 + 4] for _ in range(rng.choice([1, 3]))]
            made.append(("/v1/completions", {"prompt": prompts, **limits, **streams}))
        elif number % 3 == 1:
            messages = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": f"{number % 5}"}]
            made.append(("/v1/chat/completions", {"messages": messages, **limits, **streams}))
        else:
            messages = [{"role": "user", "content": f"Say {number % 5}. " * 30}]
            body = {"messages": messages, "max_tokens": limits["max_tokens"], "stream": bool(streams)}
            made.append(("/v1/messages", body))
    return made


def usage_in(route: str, body: dict[str, Any], content: bytes) -> Counter[str]:
    """From an answer's bytes, as a client would."""
    if not body.get("stream"):
        said = json.loads(content)["usage"]
        return anthropic_usage(said) if route == "/v1/messages" else usage_of(said)
    events = [json.loads(line[6:]) for line in content.decode().splitlines() if line.startswith("data: {")]
    if route == "/v1/messages":
        last = next(event for event in reversed(events) if event["type"] == "message_delta")
        return anthropic_usage(last["usage"])
    return usage_of(next(event["usage"] for event in reversed(events) if event.get("usage")))


async def ask_all(server: Guarded, keys: Sequence[str], asked: list[tuple[str, dict[str, Any]]]) -> list[Counter[str]]:
    limits = httpx.Limits(max_connections=12)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=limits) as http:

        async def one(number: int, route: str, body: dict[str, Any]) -> Counter[str]:
            key = keys[number % len(keys)]
            answer = await http.post(route, json=body, headers=bearer(key))
            assert answer.status_code == 200, answer.text
            return usage_in(route, body, answer.content)

        return await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked)))


def test_metering_is_the_sum_of_what_concurrent_clients_saw(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    keys = list(make_keys(path, "alice", "bob").values())
    keys += make_keys(path, "alice").values()
    admin = make_keys(path, "admin")["admin"]
    with guarded_server(path) as server:
        asked = bodies(90)
        seen = asyncio.run(ask_all(server, keys, asked))
        server.wait_empty(admin)
        found = metered(path, server)
    expected: dict[str, Counter[str]] = {key[:11]: Counter() for key in keys}
    for number, usage in enumerate(seen):
        expected[keys[number % len(keys)][:11]] += usage
    assert {key: +counts for key, counts in found.items()} == expected
    assert all(counts["cached_tokens"] for counts in expected.values()), "some of it was cached"


def test_who_hangs_up_is_metered_with_what_was_sent(tmp_path: Path) -> None:
    """What metering says is what `explain` says, and at least what the client had read when it left."""
    path = tmp_path / "keys.db"
    keys = make_keys(path, "alice", "admin")
    engine = PagedFake(fake_text(), context_tokens=100_000, num_blocks=4096, step_s=0.001)
    prompt = list(range(4, 150))
    read: list[int] = []
    with guarded_server(path, engine=engine) as server:
        for number in range(6):
            body = {
                "prompt": prompt,
                "max_tokens": 50_000,
                "stream": True,
                "ignore_eos": True,
                "request_id": f"r{number}",
            }
            with server.http.stream("POST", "/v1/completions", json=body, headers=bearer(keys["alice"])) as answer:
                assert answer.status_code == 200
                lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
                read.append(sum(1 for _, line in zip(range(number * 3 + 1), lines, strict=False)))
        server.wait_empty(keys["admin"])
        explained = [
            server.http.get(f"/v1/requests/r{number}/explain", headers=bearer(keys["alice"])).json()
            for number in range(6)
        ]
        found = metered(path, server)[keys["alice"][:11]]
    assert {one["state"] for one in explained} == {"cancelled"}
    assert all(one["completion_tokens"] >= count for one, count in zip(explained, read, strict=True))
    assert found["requests"] == 6 and found["prompt_tokens"] == 6 * len(prompt)
    assert found["completion_tokens"] == sum(one["completion_tokens"] for one in explained) < 6 * 50_000
    assert found["cached_tokens"] == sum(one["cached_tokens"] for one in explained) == 5 * 128


def test_who_reads_nothing_is_metered_with_all_that_was_computed(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    keys = make_keys(path, "alice", "admin")
    body = {"prompt": [5, 6, 7], "n": 8, "max_tokens": 100, "logprobs": 20, "ignore_eos": True, "stream": True}
    raw = json.dumps(body | {"request_id": "unread"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(raw)}\r\nx-api-key: {keys['alice']}\r\n"
    with guarded_server(path) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(DEADLINE_S)
        connection.connect(("127.0.0.1", httpx.URL(server.url).port))
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + raw)
        assert connection.recv(300).startswith(b"HTTP/1.1 200")
        deadline_s = time.monotonic() + DEADLINE_S
        while server.http.get("/load", headers=bearer(keys["admin"])).json()["running"]:
            assert time.monotonic() < deadline_s
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        server.wait_empty(keys["admin"])
        reported = server.http.get("/v1/requests/unread/explain", headers=bearer(keys["alice"])).json()
        found = metered(path, server)[keys["alice"][:11]]
    assert (reported["state"], reported["completion_tokens"]) == ("cancelled", 800)
    assert found == Counter(requests=1, prompt_tokens=3, completion_tokens=800, cached_tokens=0)


def test_what_was_refused_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    keys = make_keys(path, "alice", "admin")
    with guarded_server(path, engine=paged(context_tokens=256)) as server:
        for body in ({"prompt": [5] * 300}, {"prompt": []}, {"prompt": [5], "max_tokens": -1}, {"prompt": [10**6]}):
            answer = server.http.post("/v1/completions", json=body, headers=bearer(keys["alice"]))
            assert answer.status_code == 400
        server.wait_empty(keys["admin"])
        assert metered(path, server) == {}


def test_a_server_without_keys_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.db"
    with guarded_server(path) as server:
        assert server.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 2}).status_code == 200
    assert not path.exists()
