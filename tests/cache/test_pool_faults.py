"""Stop, kill and restart at the worst moment: a miss at most, never a wrong byte, and nothing kept for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tripool.cache import namespace_tag
from tripool.cache.wire import Granted
from tripool.messages import SUPERVISOR, Reaped, Suspect, WorkerId

from .conftest import WITHIN_S, Pool, chain, content, told, until
from .test_pool import fetched

HALF = """
import os, signal, sys
from tests.cache.conftest import LocalHost, Path, PoolClient, WorkerId, WITHIN_S, chain, content

client = PoolClient(LocalHost(Path(sys.argv[1])), ["cache-0"], WorkerId("w-0", 1), wait_s=WITHIN_S)
assert client.wait(WITHIN_S) == []
arena = client._links["cache-0"].arena
whole = type(arena).write

def half(slot, block):
    arena.view(slot, 1000)[:] = block[:1000]
    print("half", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return whole(arena, slot, block)

arena.write = half
keys = chain(1, 1)
print(client.store(keys, [content(key) for key in keys], namespace="a"), flush=True)
sys.stdin.read()
"""
"""Stops itself in the middle of a block."""

KEYS = chain(1, 1)
OTHERS = chain(2, 8)


@pytest.fixture
def stopped(pool: Pool) -> subprocess.Popen[str]:
    pool.config |= {"num_slots": 3, "write_s": 2.0}
    pool.start()
    writer = pool.run(HALF)
    assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    return writer


def test_a_writer_that_wakes_up_late_harms_nobody(pool: Pool, stopped: subprocess.Popen[str]) -> None:
    client = pool.client()
    assert fetched(client, KEYS) == 0, "half a block was served"
    until(lambda: told(client).fenced == 1)
    assert client.store(KEYS, [content(key) for key in KEYS], namespace="a") == 1, "others may write it elsewhere"
    assert fetched(client, KEYS) == 1
    # Everything that may be reused is reused, while the writer sleeps.
    assert client.store(OTHERS, [content(key) for key in OTHERS], namespace="a") == 2
    assert told(client).fenced == 1 and fetched(client, OTHERS) == 2
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.stdout is not None and stopped.stdout.readline() == "1\n"
    until(lambda: told(client).fenced == 0)
    assert fetched(client, OTHERS) == 2 and fetched(client, KEYS) == 1, "it was done, and it said so"
    assert told(client).bad == 0


def test_a_dead_writers_slot_is_free_when_it_is_reaped_and_not_before(
    pool: Pool, stopped: subprocess.Popen[str]
) -> None:
    client = pool.client(SUPERVISOR)
    assert client.report(Suspect(WorkerId("w-0", 1))) == []
    until(lambda: told(client).fenced == 1)
    stopped.kill()
    stopped.wait(WITHIN_S)
    assert client.store(OTHERS, [content(key) for key in OTHERS], namespace="a") == 2
    assert client.report(Reaped(WorkerId("w-0", 2))) == [] and told(client).fenced == 1, "another life of that worker"
    assert client.report(Reaped(WorkerId("w-0", 1))) == [] and told(client).fenced == 0
    assert client.store(KEYS, [content(key) for key in KEYS], namespace="a") == 1


def test_a_killed_writers_line_ends_its_reservation(pool: Pool) -> None:
    pool.config |= {"num_slots": 3, "write_s": 1000.0}
    pool.start()
    writer = pool.run(HALF)
    assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    client = pool.client()
    writer.kill()
    until(lambda: told(client).fenced == 1)


def test_fences_stand_when_the_member_restarts(pool: Pool, stopped: subprocess.Popen[str]) -> None:
    client = pool.client(SUPERVISOR)
    pool.kill()
    pool.start()
    assert client.wait(WITHIN_S) == []
    assert told(client).fenced == 1
    assert client.store(OTHERS, [content(key) for key in OTHERS], namespace="a") == 2
    assert client.report(Reaped(WorkerId("w-0", 1))) == [] and told(client).fenced == 0


def test_a_reservation_whose_answer_was_lost_is_free_when_its_writer_is_heard_of_again(pool: Pool) -> None:
    pool.start()
    client, link = (writer := pool.client()), writer._links["cache-0"]
    assert link.answer(link.reserve(namespace_tag("a"), tuple(OTHERS[:3])), Granted) is not None
    assert told(client).reserved == 3
    pool.kill()
    pool.start()
    assert client.wait(WITHIN_S) == []
    assert told(client).reserved == 0 and told(client).free == 8


def test_a_killed_member_is_a_miss_and_comes_back_with_its_blocks(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    keys = chain(1, 6)
    client.store(keys, [content(key) for key in keys], namespace="a", form=3)
    with client.find(keys, namespace="a") as prefix:
        pool.kill()
        assert fetched(client, keys) == 0
        assert client.store(keys, [content(key) for key in keys], namespace="a") == 0
        assert client.stats() == {"cache-0": None} and client.report(Reaped(WorkerId("x", 1))) == ["cache-0"]
        pool.start()
        assert client.wait(WITHIN_S) == []
        assert [block.form for block in prefix.blocks] == [3] * 6
    assert fetched(client, keys) == 6
    assert told(client).leases == 0 and told(client).committed == 6


def test_a_stopped_member_costs_one_bounded_wait(pool: Pool) -> None:
    pool.start()
    client = pool.client(wait_s=0.3)
    client.store(KEYS, [content(key) for key in KEYS], namespace="a")
    until(lambda: fetched(client, KEYS) == 1)  # a machine this busy may miss the first bound
    pool.signal(signal.SIGSTOP)
    assert fetched(client, KEYS) == 1, "nobody needs to be asked for what can be seen"
    began_s = time.monotonic()
    assert fetched(client, OTHERS) == 0
    for _ in range(1000):
        assert client.find(KEYS, namespace="a").num_blocks == 0
    assert time.monotonic() - began_s < 100.0, "waited again and again: a thousand times 0.3 s"
    pool.signal(signal.SIGCONT)
    assert client.wait(WITHIN_S) == []
    until(lambda: fetched(client, KEYS) == 1)
    until(lambda: told(client).leases == 0)


def test_a_killed_readers_leases_end_at_once(pool: Pool) -> None:
    pool.config["lease_s"] = 1000.0
    pool.start()
    client, reader = pool.client("p-0"), pool.client("d-0")
    client.store(KEYS, [content(key) for key in KEYS], namespace="a")
    prefix = reader.find([*KEYS, *OTHERS], namespace="a")  # not all of them are there: it asks
    assert prefix.num_blocks == 1
    until(lambda: told(client).leases == 1)
    reader.close()  # what the end of its process would do to its line
    until(lambda: told(client).leases == 0)


def test_a_reader_that_is_too_slow_notices(pool: Pool) -> None:
    pool.config |= {"num_slots": 1, "lease_s": 0.05}
    pool.start()
    client = pool.client()
    client.store(KEYS, [content(key) for key in KEYS], namespace="a")
    with client.find(KEYS, namespace="a") as prefix:
        until(lambda: client.store(OTHERS[:1], [content(OTHERS[0])], namespace="a") == 1)
        assert prefix.read([bytearray(len(content(KEYS[0])))]) == 0
    assert told(client).bad == 0, "the slot's new block is not at fault"
    assert fetched(client, OTHERS[:1]) == 1


def test_an_orderly_end_leaves_nothing_behind_and_a_new_arena_is_noticed(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    client.store(KEYS, [content(key) for key in KEYS], namespace="a")
    pool.signal(signal.SIGTERM)
    assert pool.processes["cache-0"].wait(WITHIN_S) == 0
    assert list(pool.folder.iterdir()) == []
    pool.start()
    assert client.wait(WITHIN_S) == []
    assert fetched(client, KEYS) == 0
    assert client.store(KEYS, [content(key) for key in KEYS], namespace="a") == 1
    assert fetched(client, KEYS) == 1
    assert told(client).bad == 0


def test_a_second_member_of_the_same_name_does_not_start(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    first = pool.processes["cache-0"]
    pool.start()
    assert pool.processes["cache-0"].wait(WITHIN_S) != 0
    pool.processes["first"] = first
    client.store(KEYS, [content(key) for key in KEYS], namespace="a")
    assert fetched(client, KEYS) == 1
