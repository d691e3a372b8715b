"""No hit across tenants: what each finds in the cache is exactly what an oracle of its own past says, never more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tripool.tenants.key_store import KeyStore

from .adversary import Adversary, Oracle
from .serving import guarded_server, make_keys, paged


def attack(path: Path, count: int, seed: int) -> dict[str, int]:
    """Returns how often there was a hit, how often others had computed more of it, and how often that was public."""
    keys = make_keys(path, "alice", "bob", "carol", "admin")
    keys |= make_keys(path, "dave", "erin", settings={"public_prefix": True})
    with KeyStore(path) as key_store:
        adversary = Adversary(seed, key_store.key_table().tenants, keys)
    oracle, everyone, alone = Oracle(), Oracle(), Oracle()
    seen = {"hits": 0, "tempted": 0, "public": 0}
    with guarded_server(path, engine=paged(num_blocks=count * 6 + 64)) as server:
        for number in range(count):
            one = adversary.next()
            answered = server.http.post(one.route, json=one.body, headers=one.headers)
            assert answered.status_code == 200, answered.text
            said = answered.json()
            found = said["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert said["usage"]["prompt_tokens"] == len(one.prompt_ids)
            allowed = oracle.cached(one)
            assert found == allowed, f"request {number} of {one.tenant} found {found} tokens, may find {allowed}: {one}"
            seen["hits"] += found > 0
            nobodys = replace(one, tenant="", body={}, public_tokens=0)
            private = replace(one, public_tokens=0)
            seen["tempted"] += everyone.cached(nobodys) > found
            seen["public"] += found > alone.cached(private)
            answer = said["choices"][0]["token_ids"]
            for past, request in ((oracle, one), (everyone, nobodys), (alone, private)):
                past.computed(request, answer)
    return seen


def test_nothing_is_found_that_another_tenant_has_computed(tmp_path: Path) -> None:
    seen = attack(tmp_path / "keys.db", 500, seed=1)
    assert seen["hits"] > 100 and seen["tempted"] > 100 and seen["public"] > 0, seen


@pytest.mark.prove
def test_nothing_is_found_in_ten_thousand_tries(tmp_path: Path) -> None:
    seen = attack(tmp_path / "keys.db", 10_000, seed=2)
    assert seen["hits"] > 2000 and seen["tempted"] > 1000 and seen["public"] > 0, seen


def test_the_test_sees_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same attack on a server that takes namespaces from clients, or has none."""
    monkeypatch.setattr("tripool.gateway.parse._namespace", lambda fields, tenant: "")
    with pytest.raises(AssertionError, match="may find"):
        attack(tmp_path / "keys.db", 500, seed=1)


def test_the_test_sees_public_blocks_that_are_not_followed_by_a_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tripool.cache.keys._salted", lambda parent, namespace: parent)
    with pytest.raises(AssertionError, match="may find"):
        attack(tmp_path / "keys.db", 500, seed=1)


def test_the_test_sees_a_prompt_that_is_all_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.gateway.parse.public_tokens", lambda tokenizer, conversation, prompt: len(prompt))
    with pytest.raises(AssertionError, match="may find"):
        attack(tmp_path / "keys.db", 500, seed=1)
