"""A running server's view of the key store: changes are noticed in time, and a lost store does not open the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tripool.tenants.key_store import KeyStore, KeyStoreError, KeyStoreMissing
from tripool.tenants.key_watcher import LOOK_S, STALE_S, KeyWatcher

from .serving import NOW_S, Clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


def test_a_revoked_key_is_refused_within_a_second(path: Path) -> None:
    clock = Clock()
    with KeyStore(path, create=True) as key_store:
        key = key_store.add_key("alice", now_s=NOW_S)
        key_watcher = KeyWatcher(path, may_be_open=True, clock=clock)
        assert key_watcher.key_table().find(key, NOW_S) is not None
        key_store.revoke("alice", now_s=NOW_S)
        clock.now_s += LOOK_S
        assert key_watcher.key_table().find(key, NOW_S) is None
        assert LOOK_S < 1.0
        other = key_store.add_key("bob", now_s=NOW_S)
        clock.now_s += LOOK_S
        assert key_watcher.key_table().find(other, NOW_S) is not None
    key_watcher.close()


def test_what_is_no_change_of_keys_is_not_read_again(path: Path) -> None:
    clock = Clock()
    with KeyStore(path, create=True) as key_store:
        key_store.add_key("alice", now_s=NOW_S)
        key_watcher = KeyWatcher(path, may_be_open=True, clock=clock)
        key_table = key_watcher.key_table()
        with key_store.writing() as db:
            db.execute("INSERT INTO usage VALUES (0, 'alice', 'k', 'm', 1, 1, 1, 1)")
        clock.now_s += LOOK_S
        assert key_watcher.key_table() is key_table
    key_watcher.close()


def test_a_later_key_store_ends_open_access(path: Path) -> None:
    clock = Clock()
    key_watcher = KeyWatcher(path, may_be_open=True, clock=clock)
    assert not key_watcher.key_table().keys and key_watcher.is_open
    assert not path.exists(), "looking makes no file"
    with KeyStore(path, create=True) as key_store:
        key = key_store.add_key("alice", now_s=NOW_S)
    clock.now_s += LOOK_S
    assert key_watcher.key_table().find(key, NOW_S) is not None and not key_watcher.is_open
    key_watcher.close()


def test_a_missing_key_store_counts_for_a_while_and_then_requests_are_refused(path: Path) -> None:
    clock = Clock()
    with KeyStore(path, create=True) as key_store:
        key = key_store.add_key("alice", now_s=NOW_S)
    key_watcher = KeyWatcher(path, may_be_open=True, clock=clock)
    saved = path.read_bytes()
    path.unlink()
    clock.now_s += LOOK_S
    assert key_watcher.key_table().find(key, NOW_S) is not None
    clock.now_s += STALE_S - 2 * LOOK_S
    assert key_watcher.key_table().find(key, NOW_S) is not None and not key_watcher.is_open
    clock.now_s += 2 * LOOK_S
    with pytest.raises(KeyStoreMissing):
        key_watcher.key_table()
    path.touch(0o600)
    path.write_bytes(saved)
    clock.now_s += LOOK_S
    assert key_watcher.key_table().find(key, NOW_S) is not None, "it is back"
    key_watcher.close()


def test_a_replaced_key_store_takes_effect(path: Path, tmp_path: Path) -> None:
    clock = Clock()
    keys = []
    for name in (path, tmp_path / "new.db"):
        with KeyStore(name, create=True) as key_store:
            keys.append(key_store.add_key("alice", now_s=NOW_S))
    key_watcher = KeyWatcher(path, may_be_open=True, clock=clock)
    (tmp_path / "new.db").rename(path)
    clock.now_s += LOOK_S
    assert [key_watcher.key_table().find(key, NOW_S) is not None for key in keys] == [False, True]
    key_watcher.close()


def test_a_revocation_is_seen_though_the_side_files_were_deleted(path: Path) -> None:
    """SQLite goes on with the deleted ones, and would never see what others write into new ones."""
    clock = Clock()
    with KeyStore(path, create=True) as key_store:
        key = key_store.add_key("alice", now_s=NOW_S)
    key_watcher = KeyWatcher(path, may_be_open=False, clock=clock)
    assert key_watcher.key_table().find(key, NOW_S) is not None
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink()
    with KeyStore(path) as key_store:
        key_store.revoke("alice", now_s=NOW_S)
    clock.now_s += LOOK_S
    assert key_watcher.key_table().find(key, NOW_S) is None
    key_watcher.close()


def test_a_keyed_server_without_a_key_store_refuses_all(path: Path) -> None:
    """As seen by a gateway that is restarted while the key store is missing."""
    clock, learnt = Clock(), list[str]()
    key_watcher = KeyWatcher(path, may_be_open=False, on_keyed=lambda: learnt.append("keyed"), clock=clock)
    with pytest.raises(KeyStoreMissing):
        key_watcher.key_table()
    KeyStore(path, create=True).close()
    clock.now_s += LOOK_S
    with pytest.raises(KeyStoreError, match="no longer has keys"):
        key_watcher.key_table()
    with KeyStore(path) as key_store:
        key = key_store.add_key("alice", now_s=NOW_S)
    clock.now_s += LOOK_S
    assert key_watcher.key_table().find(key, NOW_S) is not None
    assert not learnt, "it was keyed from the start"
    key_watcher.close()


def test_an_open_server_that_cannot_note_its_first_key_refuses_all(path: Path) -> None:
    clock = Clock()

    def on_keyed() -> None:
        raise KeyStoreError("the mark cannot be removed")

    key_watcher = KeyWatcher(path, may_be_open=True, on_keyed=on_keyed, clock=clock)
    with KeyStore(path, create=True) as key_store:
        key_store.add_key("alice", now_s=NOW_S)
    clock.now_s += STALE_S
    with pytest.raises(KeyStoreError, match="mark"):
        key_watcher.key_table()
    key_watcher.close()


def test_a_damaged_key_store_refuses_all(path: Path) -> None:
    path.touch(0o600)
    path.write_text("x" * 5000)
    for may_be_open in (False, True):
        with pytest.raises(KeyStoreError, match="damaged"):
            KeyWatcher(path, may_be_open=may_be_open, clock=Clock()).key_table()
