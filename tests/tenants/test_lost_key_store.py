"""A key store that is lost while the server runs: whatever happens to the file, no caller gains access."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from split import faults
from split.serving import DEADLINE_S, split_server
from tripool.cli.main import main
from tripool.gateway.auth import KeyRefused
from tripool.tenants.key_store import KeyStore, KeyStoreError
from tripool.tenants.key_watcher import LOOK_S, STALE_S

from .serving import Clock, Guarded, bearer, guarded_server, make_keys

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def _empty_store(path: Path) -> None:
    path.unlink()
    KeyStore(path, create=True).close()


def _unkeyed(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM keys")
        db.execute("UPDATE book SET generation = generation + 1")
    db.close()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


def _link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "folder deleted": lambda path: shutil.rmtree(path.parent),
    "truncated": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, 5000),
    "garbage": lambda path: path.write_bytes(b"x" * 20_000),
    "another, without keys": _empty_store,
    "all keys removed from it": _unkeyed,
    "a folder in its place": _folder,
    "a link to nothing": _link_to_nothing,
    "a pipe in its place": _pipe,
    "readable for all": lambda path: path.chmod(0o644),
}


def statuses(server: Guarded, key: str | None) -> tuple[int, int]:
    """Of a chat, and of an admin's call."""
    headers = {} if key is None else bearer(key)
    chat = server.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    return chat.status_code, server.http.get("/metrics", headers=headers).status_code


def test_no_loss_opens_the_server(tmp_path: Path) -> None:
    path, key_watcher = tmp_path / "state" / "keys.db", Clock()
    keys = make_keys(path, "admin")
    saved = shutil.copytree(path.parent, tmp_path / "saved")
    with guarded_server(path, watch_clock=key_watcher) as server:
        for name, lose in LOSSES.items():
            assert statuses(server, keys["admin"]) == (200, 200), f"before: {name}"
            lose(path)
            assert statuses(server, keys["admin"])[0] == 200, name  # one valid request, whose usage is to be written
            with suppress(KeyStoreError):
                server.usage_log.flush()
            with pytest.raises(SystemExit):
                main(["keys", "list", "--keys", str(path)])
            for _ in range(3):
                key_watcher.now_s += LOOK_S
                assert statuses(server, None) == (401, 401), name
                assert statuses(server, keys["admin"]) == (200, 200), f"{name}: the last reading counts for a while"
            key_watcher.now_s += STALE_S
            assert statuses(server, None) == statuses(server, keys["admin"]) == (503, 503), name
            said = server.http.get("/metrics").json()["error"]
            assert said["code"] in ("bad_key_book", "no_key_book")
            assert server.http.get("/health").status_code == 200
            shutil.rmtree(path.parent, ignore_errors=True)
            shutil.copytree(saved, path.parent)
            key_watcher.now_s += LOOK_S


def test_an_open_server_that_had_a_key_does_not_become_open_again(tmp_path: Path) -> None:
    path, key_watcher = tmp_path / "keys.db", Clock()
    with guarded_server(path, watch_clock=key_watcher) as server:
        assert statuses(server, None) == (200, 200)
        key = make_keys(path, "admin")["admin"]
        key_watcher.now_s += LOOK_S
        assert statuses(server, None) == (401, 401) and statuses(server, key) == (200, 200)
        path.unlink()
        key_watcher.now_s += LOOK_S
        assert statuses(server, None) == (401, 401)
        key_watcher.now_s += STALE_S
        assert statuses(server, None) == (503, 503)
        other = make_keys(path, "admin")["admin"]
        key_watcher.now_s += LOOK_S
        assert statuses(server, key) == (401, 401) and statuses(server, other) == (200, 200), "a new one counts"


def test_a_removed_tenant_is_refused(tmp_path: Path) -> None:
    path, key_watcher = tmp_path / "keys.db", Clock()
    make_keys(path, "alice", settings={"rpm": 5})
    with guarded_server(path, watch_clock=key_watcher) as server:
        assert server.access.tenant_named("alice").limits.requests_per_minute == 5
        path.unlink()
        make_keys(path, "bob")
        key_watcher.now_s += LOOK_S
        with pytest.raises(KeyRefused):
            server.access.tenant_named("alice")


@pytest.mark.prove
def test_a_gateway_that_starts_again_knows_that_there_were_keys(tmp_path: Path) -> None:
    """Of a server that was started open, got a key, lost its key store, and then its gateway."""
    path = tmp_path / "keys.db"
    with split_server("fake", options=("--keys", str(path), "--open", "--cache-gb", "0")) as server:

        def status(key: str = "tp-unknown") -> int:
            return httpx.get(f"{server.url}/v1/pools", headers=bearer(key), timeout=DEADLINE_S).status_code

        def until(condition: Callable[[], bool]) -> None:
            deadline_s = time.monotonic() + DEADLINE_S
            while not condition():
                assert time.monotonic() < deadline_s, server.fell
                threading.Event().wait(0.05)

        assert status() == 200
        make_keys(path, "alice")
        until(lambda: status() == 401)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        gateway = server.child("gateway")
        faults.kill(gateway)
        until(lambda: server.find("gateway") not in (None, gateway))
        assert status() == 503
        key = make_keys(path, "alice")["alice"]
        until(lambda: status(key) != 503)
        assert status(key) == 403 and status() == 401
