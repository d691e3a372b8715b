"""`tripool keys`, `usage` and `cache` as a person types them, and a server that will not stand open by mistake."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tripool.cli.keys import ago_s, later_s
from tripool.cli.main import main
from tripool.core import Usage
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import InvalidRequest
from tripool.gateway.server import listen
from tripool.serving.access import AccessConfig, OpenToAll
from tripool.tenants import Caller, Tenant
from tripool.tenants.key_store import KeyStore, KeyStoreError
from tripool.tenants.usage_log import UsageLog


class Ran(NamedTuple):
    code: Any
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


@pytest.fixture
def tripool(capsys: pytest.CaptureFixture[str], path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([*argv, "--keys", str(path)], lambda model, config: PagedFake(fake_text()))
        said = capsys.readouterr()
        return Ran(ended.value.code, said.out, said.err)

    return run


def test_a_key_is_shown_once_and_works(tripool: Run, path: Path) -> None:
    added = tripool("keys", "add", "alice", "--rpm", "60", "--cache-gb", "0.5", "--tpot-ms", "30", "--public-prefix")
    key = added.out.strip()
    assert added.code == 0 and key.startswith("tp-") and "\n" not in key, "nothing else on stdout: it can be piped"
    with KeyStore(path) as key_store:
        caller = key_store.key_table().find(key, time.time())
    assert caller is not None and caller.tenant.public_prefix and caller.tenant.limits.cache_bytes == 2**29
    shown = tripool("keys", "list").out
    assert "alice" in shown and key[:11] in shown and key not in shown
    assert "rpm 60" in shown and "cache 0.5 GB" in shown and "public prefix" in shown
    (row,) = json.loads(tripool("keys", "list", "--json").out)
    assert (row["tenant"], row["state"], row["tpot_ms"], row["weight"]) == ("alice", "good", 30, 1)
    assert key not in json.dumps(row)


def test_keys_are_revoked_by_beginning_or_by_tenant(tripool: Run) -> None:
    first = json.loads(tripool("keys", "add", "alice", "--json").out)["key"]
    second = json.loads(tripool("keys", "add", "alice", "--admin", "--json", "--expires", "30d").out)["key"]
    assert json.loads(tripool("keys", "revoke", first[:9], "--json").out) == {"revoked": [first[:11]]}
    states = {row["key"]: row["state"] for row in json.loads(tripool("keys", "list", "--json").out)}
    assert states == {first[:11]: "revoked", second[:11]: "good"}
    assert second[:11] in tripool("keys", "revoke", "alice").out
    assert "before" in tripool("keys", "revoke", "alice").out
    missing = tripool("keys", "revoke", "nobody")
    assert missing.code == 2 and "no key is called 'nobody'" in missing.err


def test_mistakes_are_said_in_one_line(tripool: Run) -> None:
    for argv in (("keys", "add", "a b"), ("keys", "add", "a", "--rpm", "0"), ("keys", "add", "a", "--expires", "soon")):
        ran = tripool(*argv)
        assert ran.code == 2 and ran.err.startswith("error: ") and not ran.out
    assert tripool("cache", "quota", "nobody", "1").code == tripool("cache", "purge", "nobody").code == 2


def test_usage_is_shown_in_groups(tripool: Run, path: Path) -> None:
    KeyStore(path, create=True).close()
    usage_log = UsageLog(path, clock=lambda: 1_800_000_000.0)
    for model in ("m1", "m2", "m1"):
        usage_log.add(
            Caller(tenant=Tenant(name="alice", namespace="x"), key="tp-12345678"), model, [Usage(1000, 20, 64)]
        )
    usage_log.add(Caller(tenant=Tenant(name="bob", namespace="y"), key="tp-87654321"), "m1", [Usage(5, 6)])
    usage_log.close()
    rows = json.loads(tripool("usage", "--by", "model", "--tenant", "alice", "--json").out)
    assert [(row["model"], row["requests"], row["prompt_tokens"], row["cached_tokens"]) for row in rows] == [
        ("m1", 2, 2000, 128),
        ("m2", 1, 1000, 64),
    ]
    shown = tripool("usage").out
    assert "2027-01-15" in shown and "3,000" in shown and "bob" in shown
    assert "08:00" in tripool("usage", "--by", "hour").out
    assert json.loads(tripool("usage", "--since", "2027-01-16", "--json").out) == []


def test_quota_and_purge_change_the_key_store(tripool: Run, path: Path) -> None:
    tripool("keys", "add", "alice")
    with KeyStore(path) as key_store:
        before = key_store.key_table().tenants["alice"]
        assert tripool("cache", "quota", "alice", "0.25").code == 0
        assert tripool("cache", "purge", "alice").code == 0
        after = key_store.key_table().tenants["alice"]
    assert after.limits.cache_bytes == 2**28 and after.namespace != before.namespace


def test_a_server_does_not_serve_other_machines_without_keys(tripool: Run, path: Path) -> None:
    refused = tripool("serve", "fake", "--host", "0.0.0.0", "--port", "0")
    assert refused.code == 2
    assert "no API keys" in refused.err and "tripool keys add" in refused.err and "--open" in refused.err
    assert not path.exists()


def test_a_server_starts_open_only_where_that_was_chosen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(path.parent))
    with listen("0.0.0.0", 0) as world, listen("127.0.0.1", 0) as here:
        assert AccessConfig(None, False).starts_open(here)
        assert AccessConfig(None, True).starts_open(world)
        assert AccessConfig(path, True).starts_open(here)
        with pytest.raises(OpenToAll, match="other machines"):
            AccessConfig(None, False).starts_open(world)
        with pytest.raises(OpenToAll, match="there is no key store"):
            AccessConfig(path, False).starts_open(here)
        assert not path.exists()
        with KeyStore(path, create=True) as key_store:
            assert AccessConfig(path, False).starts_open(here), "a key store without keys"
            key_store.add_key("alice", now_s=0.0)
            for may_be_open in (False, True):
                assert not AccessConfig(path, may_be_open).starts_open(world), "keys count, --open or not"
            key_store.revoke("alice", now_s=0.0)
            assert not AccessConfig(path, True).starts_open(world)
        for wrong in (b"", b"x" * 5000):
            path.write_bytes(wrong)
            with pytest.raises(KeyStoreError):
                AccessConfig(path, True).starts_open(here)


def test_only_adding_a_key_creates_a_key_store(tripool: Run, path: Path) -> None:
    verbs = [("keys", "list"), ("keys", "revoke", "alice"), ("usage",), ("cache", "purge", "alice")]
    for argv in [*verbs, ("cache", "quota", "alice", "1")]:
        ran = tripool(*argv)
        assert ran.code == 2 and "there is no key store" in ran.err and "tripool keys add" in ran.err, argv
    tripool("keys", "add", "a b")
    assert not path.exists()


def test_a_server_that_does_not_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cache", "stats", "--url", "http://127.0.0.1:1"])
    assert ended.value.code == 2 and "does not answer" in capsys.readouterr().err


def test_times_on_the_command_line() -> None:
    assert later_s("90m", now_s=100.0, param="x") == 100 + 5400
    assert later_s("2d", now_s=0.0, param="x") == 2 * 86400
    assert ago_s("12h", now_s=86400.0, param="x") == 43200
    assert later_s("2026-12-31", now_s=0.0, param="x") == ago_s("2026-12-31", now_s=0.0, param="x") == 1798675200
    for wrong in ("", "h", "5y", "-3d", "tomorrow"):
        with pytest.raises(InvalidRequest, match="is not a time"):
            later_s(wrong, now_s=0.0, param="x")
