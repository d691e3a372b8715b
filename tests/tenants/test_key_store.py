"""The key store: what is stored of keys, what others can see of it, and two processes at once."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from tripool.errors import InvalidRequest
from tripool.tenants import KeyTable
from tripool.tenants.key_store import KeyStore, KeyStoreError, KeyStoreMissing, KeyUnknown, TenantUnknown, default_path

NOW_S = 1_800_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.db"


def files(path: Path) -> list[Path]:
    return sorted(path.parent.iterdir())


def test_only_the_owner_can_read_it_and_no_key_is_in_it(path: Path) -> None:
    with KeyStore(path, create=True) as key_store:
        key = key_store.add_key("alice", now_s=NOW_S)
        assert key.startswith("tp-") and len(key) >= 3 + 43
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for file in files(path):  # with the log and its index, which exist while it is open
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
            assert key.encode() not in file.read_bytes()
            assert key[11:].encode() not in file.read_bytes()
        assert len(files(path)) == 3


def test_a_file_that_others_can_read_is_not_used(path: Path) -> None:
    KeyStore(path, create=True).close()
    path.chmod(0o640)
    with pytest.raises(KeyStoreError, match="chmod 600"):
        KeyStore(path, create=True)


def test_only_adding_a_key_creates_the_file(path: Path) -> None:
    with pytest.raises(KeyStoreMissing, match="tripool keys add"):
        KeyStore(path)
    assert not path.parent.exists()
    path.parent.mkdir()
    path.touch(0o600)
    with pytest.raises(KeyStoreError, match="empty"):
        KeyStore(path)
    assert path.read_bytes() == b"" and files(path) == [path], "nothing was written into another file"
    path.unlink()
    path.mkdir(0o700)
    with pytest.raises(KeyStoreError, match="not a file"):
        KeyStore(path)


def test_a_key_is_its_tenants_until_it_is_revoked_or_expires(path: Path) -> None:
    with KeyStore(path, create=True) as key_store:
        first, second = (
            key_store.add_key("alice", now_s=NOW_S),
            key_store.add_key("alice", now_s=NOW_S, expires_s=NOW_S + 60),
        )
        other = key_store.add_key("bob", now_s=NOW_S, admin=True)
        key_table = key_store.key_table()
        for key in (first, second):
            caller = key_table.find(key, NOW_S)
            assert caller is not None and (caller.tenant.name, caller.admin) == ("alice", False)
            assert key.startswith(caller.key) and len(caller.key) < 12
        boss = key_table.find(other, NOW_S)
        assert boss is not None and (boss.tenant.name, boss.admin) == ("bob", True)
        assert key_table.find(second, NOW_S + 60) is None, "expired"
        for wrong in ("", "tp-", first[:-1], first + "x", first.swapcase(), first[3:], "tp-" + "x" * 10_000):
            assert key_table.find(wrong, NOW_S) is None
        assert key_store.revoke(first[:11], now_s=NOW_S) == [first[:11]]
        assert key_table.find(first, NOW_S) is not None, "a reading does not change"
        assert key_store.key_table().find(first, NOW_S) is None
        assert key_store.revoke("alice", now_s=NOW_S) == [second[:11]]
        assert key_store.revoke("alice", now_s=NOW_S) == [], "revoked before"
        with pytest.raises(KeyUnknown):
            key_store.revoke("carol", now_s=NOW_S)
        with pytest.raises(InvalidRequest, match="3 keys begin with"):
            key_store.revoke("tp-", now_s=NOW_S)


def test_revoked_keys_stay_in_the_store(path: Path) -> None:
    with KeyStore(path, create=True) as key_store:
        assert not key_store.key_table().keys
        key_store.add_key("alice", now_s=NOW_S)
        key_store.revoke("alice", now_s=NOW_S)
        assert key_store.key_table().keys


def test_namespaces_are_drawn_once_and_anew_by_a_purge(path: Path) -> None:
    with KeyStore(path, create=True) as key_store:
        key_store.add_key("alice", now_s=NOW_S)
        key_store.add_key("bob", now_s=NOW_S)
        before = key_store.key_table().tenants
        assert before["alice"].namespace != before["bob"].namespace
        assert "alice" not in before["alice"].namespace
        key_store.add_key("alice", now_s=NOW_S, settings={"rpm": 5})
        assert key_store.key_table().tenants["alice"].namespace == before["alice"].namespace, "several keys, one tenant"
        key_store.renew_namespace("alice")
        after = key_store.key_table().tenants
        assert after["alice"].namespace != before["alice"].namespace
        assert after["bob"] == before["bob"]
        with pytest.raises(TenantUnknown):
            key_store.renew_namespace("carol")


def test_settings_given_replace_and_others_stay(path: Path) -> None:
    with KeyStore(path, create=True) as key_store:
        key_store.add_key("alice", now_s=NOW_S, settings={"rpm": 5, "tpot_ms": 30, "public_prefix": True})
        key_store.add_key("alice", now_s=NOW_S, settings={"rpm": 7, "cache_bytes": 0})
        tenant = key_store.key_table().tenants["alice"]
        assert (tenant.limits.requests_per_minute, tenant.limits.cache_bytes, tenant.tpot_ms) == (7, 0, 30)
        assert tenant.public_prefix and tenant.limits.weight == 1
        for wrong in ({"rpm": 0}, {"weight": -1}, {"cache_bytes": -1}, {"tpot_ms": float("nan")}):
            with pytest.raises(InvalidRequest):
                key_store.change("alice", wrong)
        assert key_store.key_table().tenants["alice"] == tenant
        for name in ("", "tp-x", "a b", "x" * 65, "a\x1fb", "../x"):
            with pytest.raises(InvalidRequest):
                key_store.add_key(name, now_s=NOW_S)


def test_many_writers_at_once_lose_nothing(path: Path) -> None:
    made: list[str] = []

    def write(name: str) -> None:
        with KeyStore(path, create=True, busy_s=60.0) as key_store:
            for _ in range(10):
                made.append(key_store.add_key(name, now_s=NOW_S))

    threads = [threading.Thread(target=write, args=(f"tenant-{i % 3}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with KeyStore(path, create=True) as key_store:
        key_table = key_store.key_table()
    assert len(set(made)) == len(key_table.keys) == 60
    assert len(key_table.tenants) == 3
    assert all(key_table.find(key, NOW_S) is not None for key in made)


def test_a_wait_for_another_writer_is_bounded(path: Path) -> None:
    with KeyStore(path, create=True) as key_store, KeyStore(path, busy_s=0.01) as other:
        key = key_store.add_key("alice", now_s=NOW_S)
        with key_store.writing():
            with pytest.raises(KeyStoreError, match="locked"):
                other.add_key("bob", now_s=NOW_S)
            assert other.key_table().find(key, NOW_S) is not None, "readers do not wait"
        other.add_key("bob", now_s=NOW_S)


def test_a_file_that_is_not_a_key_store_is_an_error(path: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "text.db"
    wrong.write_text("not a database, but long enough to be looked at\n" * 50)
    wrong.chmod(0o600)
    with pytest.raises(KeyStoreError, match="damaged"):
        KeyStore(wrong)
    KeyStore(path, create=True).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(KeyStoreError, match="schema 99"):
        KeyStore(path, create=True)
    with pytest.raises(KeyStoreError):
        KeyStore(path / "below" / "a" / "file")


def test_a_reading_is_kept_while_nothing_changes(path: Path) -> None:
    with KeyStore(path, create=True) as key_store:
        key_store.add_key("alice", now_s=NOW_S)
        key_table = key_store.key_table()
        assert key_store.key_table(key_table) is key_table
        key_store.change("alice", {"rpm": 9})
        assert key_store.key_table(key_table) is not key_table


def test_digests_of_two_stores_cannot_be_compared(path: Path, tmp_path: Path) -> None:
    with KeyStore(path, create=True) as key_store, KeyStore(tmp_path / "other.db", create=True) as other:
        key = key_store.add_key("alice", now_s=NOW_S)
        theirs = KeyTable(key_store.key_table().tenants.values(), key_store.key_table().keys, pepper=other._pepper())
        assert theirs.find(key, NOW_S) is None


def test_the_default_place_follows_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "tripool" / "keys.db"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".local" / "state" / "tripool" / "keys.db"
