"""The usage log: nothing is lost or counted twice, with concurrent writers and failing disks."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tripool.core import Usage
from tripool.tenants import Caller, Tenant
from tripool.tenants.key_store import KeyStore, KeyStoreError, KeyStoreMissing
from tripool.tenants.usage_log import UsageLog, read_usage

from .serving import NOW_S, Clock

HOUR_S = 3600


@pytest.fixture
def path(tmp_path: Path) -> Path:
    KeyStore(tmp_path / "keys.db", create=True).close()
    return tmp_path / "keys.db"


def caller(name: str, key: str = "") -> Caller:
    return Caller(tenant=Tenant(name=name, namespace=name), key=key or f"tp-{name}")


def sums(path: Path, **how: str) -> list[dict[str, object]]:
    with KeyStore(path) as key_store:
        return read_usage(key_store, **how)  # type: ignore[arg-type]  # names of groups, spelled by the tests


def test_sums_are_exact_while_many_add_and_batches_are_written(path: Path) -> None:
    usage_log, rng, lock = UsageLog(path, clock=lambda: NOW_S), random.Random(1), threading.Lock()
    expected: dict[tuple[str, str], list[int]] = {}

    def add() -> None:
        for _ in range(200):
            with lock:
                name, model = rng.choice("abc"), rng.choice(["m1", "m2"])
                usages = [Usage(rng.randrange(100), rng.randrange(50), rng.randrange(20)) for _ in range(2)]
                total = expected.setdefault((name, model), [0, 0, 0, 0])
                total[0] += 1
                for usage in usages:
                    total[1] += usage.prompt_tokens
                    total[2] += usage.cached_tokens
                    total[3] += usage.completion_tokens
            usage_log.add(caller(name), model, usages)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        usage_log.flush()
    for thread in threads:
        thread.join()
    usage_log.close()
    found = {(row["tenant"], row["model"]): list(row.values())[2:] for row in sums(path, by="model")}
    assert found == expected


def test_what_cannot_be_written_is_kept_and_written_later(path: Path) -> None:
    clock = Clock(NOW_S)
    usage_log = UsageLog(path, clock=clock)
    path.chmod(0o644)  # which makes the key store refuse it
    usage_log.add(caller("a"), "m", [Usage(10, 5, 2)])
    with pytest.raises(KeyStoreError):
        usage_log.flush()
    usage_log.add(caller("a"), "m", [Usage(1, 1, 1)])
    path.chmod(0o600)
    usage_log.flush()
    row = {"tenant": "a", "requests": 2, "prompt_tokens": 11, "cached_tokens": 3, "completion_tokens": 6}
    assert sums(path, by="tenant") == [row]
    usage_log.close()


def test_a_missing_key_store_is_not_created(path: Path) -> None:
    usage_log = UsageLog(path, clock=lambda: NOW_S)
    saved = path.rename(path.parent / "saved.db")
    usage_log.add(caller("a"), "m", [Usage(10, 5, 2)])
    with pytest.raises(KeyStoreMissing):
        usage_log.flush()
    assert not path.exists()
    saved.rename(path)
    usage_log.close()
    assert [row["requests"] for row in sums(path, by="tenant")] == [1]


def test_a_batch_that_waits_for_years_stays_small_and_exact(path: Path) -> None:
    clock = Clock(NOW_S)
    usage_log = UsageLog(path, clock=clock)
    path.chmod(0o644)
    for hour in range(25_000):
        clock.now_s = NOW_S + hour * HOUR_S
        usage_log.add(caller("ab"[hour % 2]), "m", [Usage(3, 2, 1)])
        assert len(usage_log._waiting) <= 10_000
    path.chmod(0o600)
    usage_log.close()
    found = [(row["tenant"], row["requests"], row["prompt_tokens"]) for row in sums(path, by="tenant")]
    assert found == [("a", 12_500, 37_500), ("b", 12_500, 37_500)]


def test_the_end_writes_the_rest(path: Path) -> None:
    usage_log = UsageLog(path, clock=lambda: NOW_S)
    usage_log.add(caller("a"), "m", [Usage(10, 5, 2)])
    usage_log.close()
    assert [row["requests"] for row in sums(path, by="tenant")] == [1]


def test_a_batch_is_written_without_anyone_asking(path: Path) -> None:
    usage_log = UsageLog(path, clock=lambda: NOW_S)
    written = threading.Event()
    write = usage_log._write

    def tell(*batch: object) -> None:
        write(*batch)  # type: ignore[arg-type]
        written.set()

    usage_log._write = tell  # type: ignore[method-assign]
    usage_log.add(caller("a"), "m", [Usage(10, 5, 2)])
    assert written.wait(60.0)
    assert [row["requests"] for row in sums(path, by="tenant")] == [1]
    usage_log.close()


def test_groups_and_bounds(path: Path) -> None:
    clock = Clock(NOW_S // 86400 * 86400)
    usage_log = UsageLog(path, clock=clock)
    for hours, name, model in ((0, "a", "m1"), (1, "a", "m2"), (25, "a", "m1"), (25, "b", "m1")):
        clock.now_s = NOW_S // 86400 * 86400 + hours * HOUR_S + 5
        usage_log.add(caller(name, f"tp-{name}{hours}"), model, [Usage(100, 10, 1)])
    usage_log.close()
    day = NOW_S // 86400 * 86400
    with KeyStore(path) as key_store:
        by_day = [(r["tenant"], r["day"], r["requests"]) for r in read_usage(key_store, by="day")]
        assert by_day == [("a", day, 2), ("a", day + 86400, 1), ("b", day + 86400, 1)]
        assert [r["hour"] for r in read_usage(key_store, tenant="a", by="hour")] == [day, day + 3600, day + 90000]
        assert [(r["model"], r["requests"]) for r in read_usage(key_store, tenant="a", by="model")] == [
            ("m1", 2),
            ("m2", 1),
        ]
        assert [r["key"] for r in read_usage(key_store, by="key")] == ["tp-a0", "tp-a1", "tp-a25", "tp-b25"]
        since = read_usage(key_store, since_s=day + HOUR_S + 1800, by="tenant")
        assert [(r["tenant"], r["requests"]) for r in since] == [("a", 2), ("b", 1)], "whole hours"


def test_the_last_use_of_a_key_is_shown(path: Path) -> None:
    with KeyStore(path) as key_store:
        key = key_store.add_key("a", now_s=NOW_S)
        usage_log = UsageLog(path, clock=lambda: NOW_S + 9)
        usage_log.add(caller("a", key[:11]), "m", [Usage(1, 1)])
        usage_log.close()
        assert [one.last_used_s for one in key_store.key_table().keys] == [NOW_S + 9]
