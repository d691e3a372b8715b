"""A disk behind real members: blocks come back from it, whole or not at all, whatever happens to disk and process."""

from __future__ import annotations

import resource
import shutil
import signal
from itertools import chain as chain_of
from pathlib import Path
from random import Random

import pytest

from tripool.cache import namespace_tag
from tripool.cache.client import PoolClient
from tripool.cache.wire import Disk

from .conftest import WITHIN_S, Pool, chain, content, told, until
from .test_pool import fetched

MB = 2**20


def disk(client: PoolClient) -> Disk:
    said = told(client).disk
    assert said is not None
    return said


@pytest.fixture
def tiered(pool: Pool, tmp_path: Path) -> Pool:
    pool.config["disk"] = {"folder": str(tmp_path / "disk"), "num_bytes": 8 * MB, "write_bytes_per_s": 1e12}
    return pool


def stored(pool: Pool, client: PoolClient, keys: list[bytes], namespace: str = "a") -> None:
    """In memory, and on disk for good."""
    before = disk(client).written
    assert client.store(keys, [content(key) for key in keys], namespace=namespace) == len(keys)
    until(lambda: disk(client).written >= before + len(keys))


def test_what_memory_forgot_comes_back_from_disk(tiered: Pool) -> None:
    tiered.start()
    client = tiered.client()
    until(lambda: disk(client).state == "on")
    first, second = chain(1, 8), chain(2, 8)
    stored(tiered, client, first)
    stored(tiered, client, second)
    assert told(client).evicted == 8 and disk(client).blocks == 16
    assert fetched(client, first) == 8, "all of them, and each its own"
    assert disk(client).promoted == 8
    assert fetched(client, second) == 8
    assert told(client).bad == 0 and disk(client).bad == 0
    said = told(client)
    assert (said.reserved, said.leases, said.hits) == (0, 0, 16)


def test_whoever_finds_blocks_is_told_which_came_from_disk(tiered: Pool) -> None:
    tiered.start()
    client = tiered.client()
    first, second = chain(1, 8), chain(2, 8)
    stored(tiered, client, first)
    stored(tiered, client, second)
    for num_asked, expected in ((4, [True] * 4), (8, [False] * 4 + [True] * 4), (8, [False] * 8)):
        with client.find(first[:num_asked], namespace="a") as prefix:
            assert prefix.from_disk == expected


def test_blocks_outlive_an_orderly_end_and_a_new_memory(tiered: Pool) -> None:
    tiered.start()
    client = tiered.client()
    keys = chain(1, 8)
    stored(tiered, client, keys)
    tiered.signal(signal.SIGTERM)
    assert tiered.processes["cache-0"].wait(WITHIN_S) == 0
    tiered.start()
    assert client.wait(WITHIN_S) == []
    until(lambda: disk(client).state == "on")
    assert told(client).committed == 0 and disk(client).blocks == 8
    assert fetched(client, keys) == 8


def test_a_block_damaged_on_disk_is_a_miss_and_is_counted(tiered: Pool, tmp_path: Path) -> None:
    tiered.start()
    client = tiered.client()
    keys = chain(1, 3)
    stored(tiered, client, keys)
    tiered.kill()
    (tiered.folder / "cache-0.arena").unlink()
    path = tmp_path / "disk" / "cache-0" / "segment-0000.blocks"
    data = bytearray(path.read_bytes())
    at = data.index(content(keys[1]).tobytes()[:64])
    data[at + 50_000] ^= 1
    path.write_bytes(data)
    tiered.start()
    assert client.wait(WITHIN_S) == []
    until(lambda: disk(client).state == "on")
    assert fetched(client, keys) == 1 and disk(client).bad == 1
    assert client.store(keys, [content(key) for key in keys], namespace="a") == 1, "the one that was damaged"
    assert fetched(client, keys) == 3


def test_tenants_and_purges_reach_the_disk(tiered: Pool) -> None:
    tiered.start()
    client = tiered.client()
    mine, theirs = chain(1, 8), chain(2, 8)
    stored(tiered, client, mine, "mine")
    stored(tiered, client, theirs, "theirs")
    assert fetched(client, mine, namespace="theirs") == 0, "not even by a stolen key"
    assert client.purge([namespace_tag("mine")]) == 8, "all of them only on disk"
    tiered.kill()
    (tiered.folder / "cache-0.arena").unlink()
    tiered.start()
    assert client.wait(WITHIN_S) == []
    until(lambda: disk(client).state == "on")
    assert fetched(client, mine, namespace="mine") == 0 and fetched(client, theirs, namespace="theirs") == 8
    assert client.purge([namespace_tag("theirs")]) == 8


@pytest.mark.parametrize("what", ["a folder that cannot be made", "too small", "in use"])
def test_without_its_disk_a_member_serves_from_memory_and_says_why(
    tiered: Pool, tmp_path: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if what == "a folder that cannot be made":
        (tmp_path / "file").write_text("")
        tiered.config["disk"]["folder"] = str(tmp_path / "file")
    elif what == "too small":
        tiered.config["disk"]["num_bytes"] = 100_000
    else:
        (tmp_path / "elsewhere").mkdir()
        tiered.start()
        first = tiered.client()
        until(lambda: disk(first).state == "on")
        tiered.processes["first"] = tiered.processes.pop("cache-0")
        tiered.folder = tmp_path / "elsewhere"
    tiered.start()
    client = tiered.client()
    until(lambda: disk(client).state.startswith("off: "))
    keys = chain(1, 4)
    assert client.store(keys, [content(key) for key in keys], namespace="a") == 4 and fetched(client, keys) == 4
    assert "the disk tier is off" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["no more can be written", "files are deleted"])
def test_a_disk_that_fails_later_switches_off_and_memory_goes_on(tiered: Pool, tmp_path: Path, what: str) -> None:
    tiered.start()
    client = tiered.client()
    first, second = chain(1, 8), chain(2, 8)
    stored(tiered, client, first)
    if what == "files are deleted":
        shutil.rmtree(tmp_path / "disk")
    else:
        resource.prlimit(tiered.processes["cache-0"].pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    assert client.store(second, [content(key) for key in second], namespace="a") == 8
    until(lambda: disk(client).state.startswith("off: "))
    assert fetched(client, second) == 8 and fetched(client, first) == 0
    assert told(client).reserved == 0
    assert client.purge([namespace_tag("a")]) == 8
    if what != "files are deleted":
        assert not list((tmp_path / "disk" / "cache-0").glob("segment-*")), "the purge could not be written down"


def test_more_than_may_be_written_is_not_copied_and_counted(tiered: Pool) -> None:
    tiered.config["disk"]["write_bytes_per_s"] = 1.0
    tiered.start()
    client = tiered.client()
    keys = chain(1, 8)
    assert client.store(keys, [content(key) for key in keys], namespace="a") == 8
    until(lambda: disk(client).written == 1)
    assert disk(client).pending == 7, "in debt for a long time"
    others = chain(2, 8)
    assert client.store(others, [content(key) for key in others], namespace="a") == 8
    assert disk(client).lost == 7 and fetched(client, keys) == 1


# ---- kill -9 -----------------------------------------------------------------------------------------------------


def killed_while_writing(tiered: Pool, num_tries: int) -> int:
    """Again and again. Returns how many blocks were acknowledged and read again by a later life.

    The arena goes with each life, so that every block comes from disk. Told to be written means acknowledged.
    """
    random = Random(5)
    tiered.config["num_slots"] = 64
    tiered.config["disk"]["num_bytes"] = 32 * MB  # what four lives write is far from being overwritten
    tiered.start()
    client = tiered.client()
    acknowledged: list[list[bytes]] = []
    num_read = 0
    for number in range(num_tries):
        until(lambda: disk(client).state == "on")
        for key in chain_of.from_iterable(acknowledged[-4:]):
            assert fetched(client, [key]) == 1, f"try {number}: a committed block is gone"
            num_read += 1
        until(lambda: disk(client).pending == 0)
        before = disk(client).written
        keys = chain(1000 + number, 12)
        for start in (0, 6):
            part = keys[start : start + 6]
            assert client.store(keys[: start + 6], [content(key) for key in part], namespace="a", first=start) == 6
        at_least = before + random.randrange(12)
        until(lambda enough=at_least: disk(client).written >= enough)  # type: ignore[misc]
        written = disk(client).written - before
        tiered.kill()
        acknowledged.append(keys[:written])
        (tiered.folder / "cache-0.arena").unlink()
        tiered.start()
        assert client.wait(WITHIN_S) == []
        for key in keys[written:]:
            fetched(client, [key])  # there or not; what is there must be whole
    assert told(client).bad == 0
    return num_read


def test_killed_in_the_middle_of_writes_nothing_committed_is_lost(tiered: Pool) -> None:
    assert killed_while_writing(tiered, 20) > 200


@pytest.mark.prove
def test_five_hundred_kills(tiered: Pool) -> None:
    assert killed_while_writing(tiered, 500) > 5000
