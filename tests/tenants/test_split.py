"""Tenants of a split server: real processes, the cache pool between them, quotas and purges while it runs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from split import faults
from split.serving import SplitServer, split_server
from tripool.cli.main import main
from tripool.tenants.key_store import KeyStore
from tripool.tenants.usage_log import read_usage

from .adversary import TOKENIZER, Adversary, Oracle
from .serving import bearer, make_keys
from .test_metering import NUMBERS, usage_of

BLOCK_BYTES = 64 * 8  # of the fake engine
SYSTEM = "You are a careful assistant. " * 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("book") / "keys.db"


@pytest.fixture(scope="module")
def keys(path: Path) -> dict[str, str]:
    return make_keys(path, "alice", "bob", "carol", "admin") | make_keys(
        path, "dave", "erin", settings={"public_prefix": True}
    )


@pytest.fixture(scope="module")
def server(path: Path, keys: dict[str, str]) -> Iterator[SplitServer]:
    options = ("--cache-gb", "0.005", "--keys", str(path))
    with split_server("fake", prefill=2, decode=1, options=options, headers=bearer(keys["admin"])) as running:
        running.wait(lambda pools: [member["away"] for member in pools["cache"]] == [False, False])
        yield running


def ask(server: SplitServer, key: str, route: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = {"max_tokens": 2, "seed": 1, "ignore_eos": True} | body
    usage: dict[str, Any] = server.http.post(route, json=body, headers=bearer(key)).raise_for_status().json()["usage"]
    return usage


def cached(usage: dict[str, Any]) -> int:
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


def held(server: SplitServer) -> dict[str, int]:
    said = server.http.get("/v1/cache").raise_for_status().json()
    rows: dict[str, int] = {row["tenant"]: row["held_bytes"] for row in said["tenants"]}
    return rows | {"(public)": said["public_bytes"], "(others)": said["other_bytes"]}


def run(*argv: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0


def new_prefill_workers(server: SplitServer) -> None:
    """So that whatever is found comes from the cache pool."""
    before = server.worker_ids()
    for pid in server.pids("prefill"):
        faults.kill(pid)
    gone = {worker_id for worker_id in before if worker_id[0].startswith("prefill")}
    server.wait(lambda pools: not gone & server.worker_ids() and len(pools["workers"]) == len(before))


def attack(server: SplitServer, path: Path, keys: dict[str, str], count: int, seed: int) -> Counter[str]:
    """What the pool has not got yet, or has forgotten, is not found; nothing else may ever be."""
    with KeyStore(path) as key_store:
        adversary = Adversary(seed, key_store.key_table().tenants, keys)
    oracle, seen = Oracle(), Counter[str]()
    for number in range(count):
        one = adversary.next()
        try:
            said = server.http.post(one.route, json=one.body, headers=one.headers).raise_for_status().json()
        except httpx.TransportError as error:
            raise AssertionError(f"the gateway went away: {server.fell}") from error
        found, allowed = cached(said["usage"]), oracle.cached(one)
        assert found <= allowed, f"request {number} of {one.tenant} found {found} tokens, may find {allowed}"
        seen["hits"] += found > 0
        seen["all"] += found == allowed
        oracle.computed(one, said["choices"][0]["token_ids"])
    return seen


def test_nothing_is_found_across_tenants(server: SplitServer, path: Path, keys: dict[str, str]) -> None:
    seen = attack(server, path, keys, 300, seed=3)
    assert seen["hits"] > 60 and seen["all"] > 150, seen


@pytest.mark.prove
def test_nothing_is_found_across_tenants_in_ten_thousand_tries(
    server: SplitServer, path: Path, keys: dict[str, str]
) -> None:
    seen = attack(server, path, keys, 10_000, seed=4)
    assert seen["hits"] > 2000, seen


def test_many_tenants_at_once_with_the_same_prompts_find_nothing(
    server: SplitServer, path: Path, keys: dict[str, str]
) -> None:
    """Everyone sends every prompt once: any hit would be another's. And metering is the sum of what they saw."""
    names = [f"crowd-{i}" for i in range(5)]
    crowd = make_keys(path, *names)
    server.wait(lambda _: server.http.get("/v1/models", headers=bearer(crowd[names[-1]])).status_code == 200)
    prompts = [[(7 * i + j) % 200 + 4 for j in range(200)] for i in range(12)]
    jobs = [(name, prompt) for prompt in prompts for name in names]
    with ThreadPoolExecutor(8) as threads:
        usages = list(threads.map(lambda job: ask(server, crowd[job[0]], prompt=job[1]), jobs))
    assert [cached(usage) for usage in usages] == [0] * len(jobs)
    seen = {name: Counter[str]() for name in names}
    for (name, _), usage in zip(jobs, usages, strict=True):
        seen[name] += usage_of(usage)

    def metered() -> dict[str, Counter[str]]:
        with KeyStore(path) as key_store:
            rows = read_usage(key_store, by="tenant")
        return {
            row["tenant"]: +Counter({n: row[n] for n in NUMBERS}) for row in rows if row["tenant"].startswith("crowd")
        }

    server.wait(lambda _: metered() == seen)
    assert {row["model"] for row in _by_model(path)} == {"fake"}


def _by_model(path: Path) -> list[dict[str, Any]]:
    with KeyStore(path) as key_store:
        return read_usage(key_store, by="model")


def test_a_public_prefix_crosses_tenants_and_workers(server: SplitServer, keys: dict[str, str]) -> None:
    whole = len(TOKENIZER.encode(f"<|system|>{SYSTEM}", special=False)) // 64 * 64
    chats = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{number} " + "tell me everything " * 20}]
        for number in range(4)
    ]
    before = held(server)["(public)"]
    found = [cached(ask(server, keys["dave"], "/v1/chat/completions", messages=messages)) for messages in chats]
    assert whole and found[0] == 0 and max(found) <= whole
    server.wait(lambda _: held(server)["(public)"] == before + whole // 64 * BLOCK_BYTES)
    server.wait(lambda _: held(server)["dave"] > 0)
    assert from_the_pool(server, keys["alice"], chats, at_least=0) == 0, "did not opt in"
    assert from_the_pool(server, keys["erin"], chats, at_least=whole) == whole, "not the same question behind it"
    assert from_the_pool(server, keys["dave"], chats, at_least=whole + 64) > whole, "its own behind the public ones"


def from_the_pool(server: SplitServer, key: str, chats: list[list[dict[str, str]]], *, at_least: int) -> int:
    """What a worker without a past finds. A pool that is late on a busy machine is a miss: then try another chat."""
    found = 0
    for messages in chats:
        new_prefill_workers(server)
        found = cached(ask(server, key, "/v1/chat/completions", messages=messages))
        if found >= at_least:
            break
    return found


def test_a_quota_and_a_purge_take_effect_while_it_runs(server: SplitServer, path: Path, keys: dict[str, str]) -> None:
    prompts = [[(11 * i + j) % 200 + 4 for j in range(64 * 4 + 1)] for i in range(10)]
    for prompt in prompts:
        ask(server, keys["bob"], prompt=prompt)
        ask(server, keys["carol"], prompt=prompt)
    server.wait(lambda _: held(server)["bob"] >= 30 * BLOCK_BYTES)
    run("cache", "quota", "bob", str(8 * BLOCK_BYTES / 2**30), "--keys", str(path))
    server.wait(lambda _: 0 < held(server)["bob"] <= 8 * BLOCK_BYTES)
    for prompt in prompts:
        ask(server, keys["bob"], prompt=[5, *prompt])
        assert held(server)["bob"] <= 8 * BLOCK_BYTES
    assert held(server)["carol"] >= 30 * BLOCK_BYTES, "others keep what they have"
    server.wait(lambda _: cached(ask(server, keys["carol"], prompt=prompts[3])) == 256)  # a late pool is a miss
    run("cache", "purge", "carol", "--keys", str(path))
    server.wait(lambda _: held(server)["carol"] == held(server)["(others)"] == 0)
    assert cached(ask(server, keys["carol"], prompt=prompts[3])) == 0, "nor in any worker's own memory"
    server.wait(lambda _: cached(ask(server, keys["carol"], prompt=prompts[3])) == 256)  # and it is cached anew


def test_quotas_are_sent_again_to_a_restarted_member(server: SplitServer, path: Path, keys: dict[str, str]) -> None:
    with KeyStore(path) as key_store:
        key_store.change("alice", {"cache_bytes": 6 * BLOCK_BYTES})
    for name in ("cache-0", "cache-1"):
        pid = server.child(name)
        faults.kill(pid)
        server.wait(lambda _, name=name, pid=pid: server.find(name) not in (None, pid))  # type: ignore[misc]
    server.wait(lambda pools: [member["away"] for member in pools["cache"]] == [False, False])
    for i in range(12):
        ask(server, keys["alice"], prompt=[(13 * i + j) % 200 + 4 for j in range(64 * 3 + 1)])
    server.wait(lambda _: 0 < held(server)["alice"] <= 6 * BLOCK_BYTES)


def test_what_is_the_operators_is_closed_to_tenants(server: SplitServer, keys: dict[str, str]) -> None:
    for route in ("/v1/pools", "/v1/cache", "/metrics"):
        assert server.http.get(route, headers=bearer(keys["alice"])).status_code == 403
        assert server.http.get(route).status_code == 200


def test_stats_and_status_are_shown_to_who_has_the_key(
    server: SplitServer, keys: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown, deadline_s = "", time.monotonic() + 60
    while "2 members (0 away)" not in shown:  # one that has too much to do just now does not answer in time
        assert time.monotonic() < deadline_s, shown
        run("cache", "stats", "--url", server.url, "--api-key", keys["admin"])
        shown = capsys.readouterr().out
    assert all(word in shown for word in ("alice", "bob", "(public prefixes)"))
    monkeypatch.setenv("TRIPOOL_API_KEY", keys["admin"])
    run("cache", "stats", "--url", f"{server.url}/v1", "--json")
    said = json.loads(capsys.readouterr().out)
    assert {row["tenant"] for row in said["tenants"]} >= {"alice", "bob", "dave"}
    run("status", "--url", server.url)
    assert "prefill-0" in capsys.readouterr().out
    monkeypatch.setenv("TRIPOOL_API_KEY", keys["alice"])
    with pytest.raises(SystemExit) as ended:
        main(["cache", "stats", "--url", server.url])
    assert ended.value.code == 2 and "admin key" in capsys.readouterr().err
