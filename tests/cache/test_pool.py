"""Members and peers as real processes: sharing, isolation, limits, and damage that is never served."""

from __future__ import annotations

import socket
import subprocess
import time

import numpy as np

from tripool.cache import block_key, namespace_tag, root_key
from tripool.cache.arena import Arena
from tripool.cache.client import PoolClient
from tripool.cache.copying import checksum
from tripool.cache.ring import SEGMENT_BLOCKS

from .conftest import BLOCK_BYTES, WITHIN_S, Pool, buffers, chain, content, told, until

NUM_TURNS = 150


def fetched(client: PoolClient, keys: list[bytes], *, namespace: str = "a", first: int = 0) -> int:
    """How many blocks came; each must be its key's."""
    into = buffers(len(keys) - first)
    count = client.fetch(keys, into, namespace=namespace, first=first)
    for key, block in zip(keys[first : first + count], into, strict=False):
        assert np.array_equal(block, content(key)), "another block's bytes"
    return count


def test_what_one_process_stores_another_finds(pool: Pool) -> None:
    pool.start()
    writer, reader = pool.client("p-0"), pool.client("d-0")
    keys = chain(1, 5)
    assert fetched(reader, keys) == 0
    assert writer.store(keys, [content(key) for key in keys[:3]], namespace="a", form=1) == 3
    assert writer.store(keys, [content(key) for key in keys[:4]], namespace="a", form=2) == 1, "three are there"
    with reader.find(keys, namespace="a", first=1) as prefix:
        assert prefix.num_blocks == 3 and [block.form for block in prefix.blocks] == [1, 1, 2]
        until(lambda: told(writer).leases == 1)
    assert fetched(reader, keys, first=1) == 3
    said = told(reader)
    assert (said.leases, said.reserved, said.committed, said.free) == (0, 0, 4, 4)
    assert said.held == {namespace_tag("a"): 4}


def test_what_is_not_what_its_checksum_says_is_not_stored(pool: Pool) -> None:
    pool.start()
    client, keys = pool.client(), chain(1, 4)
    blocks = [content(key) for key in keys]
    sums = [checksum(block.data) for block in blocks]
    blocks[2] = content(keys[3])
    assert client.store(keys, blocks, namespace="a", checksums=sums) == 2
    assert fetched(client, keys) == 2 and told(client).reserved == 0
    blocks[2] = content(keys[2])
    assert client.store(keys, blocks[1:], namespace="a", first=1, checksums=sums[1:]) == 2
    assert fetched(client, keys) == 4


def test_tenants_never_share(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    tokens = list(range(64))
    mine, theirs = (block_key(root_key("model", tenant), tokens) for tenant in ("mine", "theirs"))
    assert mine != theirs
    client.store([mine], [content(mine)], namespace="mine")
    assert fetched(client, [mine], namespace="mine") == 1
    assert fetched(client, [theirs], namespace="theirs") == 0
    assert fetched(client, [mine], namespace="theirs") == 0, "not even by a stolen key"
    assert client.purge([namespace_tag("theirs")]) == 0 and client.purge([namespace_tag("mine")]) == 1
    assert fetched(client, [mine], namespace="mine") == 0


def test_a_full_pool_forgets_the_oldest_and_keeps_what_is_read(pool: Pool) -> None:
    pool.config |= {"num_slots": 4, "lease_s": 1000.0}
    pool.start()
    client = pool.client()
    old, new, more = chain(1, 3), chain(2, 3), chain(3, 6)
    client.store(old, [content(key) for key in old], namespace="a")
    with client.find(old[:1], namespace="a"):
        assert client.store(new, [content(key) for key in new], namespace="a") == 3
        assert fetched(client, old) == 1 and fetched(client, new) == 3
        assert client.store(more, [content(key) for key in more], namespace="a") == 3
        assert fetched(client, old) == 1 and fetched(client, more) == 3
    assert told(client).evicted == 5


def test_a_damaged_block_is_a_miss_counted_and_forgotten(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    keys = chain(1, 3)
    client.store(keys, [content(key) for key in keys], namespace="a")
    with client.find(keys, namespace="a") as prefix:
        slot = prefix.blocks[1].slot
    arena = Arena.attach(pool.folder / "cache-0.arena")
    arena.write(slot, content(keys[0]))
    assert fetched(client, keys) == 1
    assert told(client).bad == 1 and told(client).committed == 2
    assert client.store(keys, [content(key) for key in keys], namespace="a") == 1
    assert fetched(client, keys) == 3


def test_buffers_of_another_size_are_not_filled(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    keys = chain(1, 1)
    assert client.store(keys, [bytes(BLOCK_BYTES + 1)], namespace="a") == 0
    assert client.store(keys, [bytes(10)], namespace="a") == 1
    assert client.fetch(keys, [bytearray(11)], namespace="a") == 0
    assert client.fetch(keys, [bytearray(10)], namespace="a") == 1
    assert told(client).reserved == 0 and told(client).bad == 0


def test_strange_messages_are_dropped_and_counted(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(pool.folder / "cache-0.sock"))
        for data in (b"\xff" * 300, b"\x93\xa6Lookup\x01", b"{}"):
            stranger.send(data)
        until(lambda: told(client).strange_messages == 3)


def test_segments_are_spread_over_members_and_survive_the_loss_of_others(pool: Pool) -> None:
    pool.members = ["cache-0", "cache-1"]
    pool.config["num_slots"] = 6 * SEGMENT_BLOCKS
    for member in pool.members:
        pool.start(member)
    client = pool.client(wait_s=5.0)
    # A chain that begins with one member and goes on with the other.
    seeds = ((seed, client._ring.member_ranges(chain(seed, 3 * SEGMENT_BLOCKS))) for seed in range(1000))
    seed, stretches = next(found for found in seeds if len(found[1]) > 1)
    keys = chain(seed, 3 * SEGMENT_BLOCKS)
    blocks = [content(key) for key in keys]
    assert client.store(keys, blocks, namespace="a") == len(keys)
    assert fetched(client, keys) == len(keys)
    assert all(said is not None and said.committed for said in client.stats().values())
    pool.kill(stretches[1].member)
    assert fetched(client, keys) == stretches[0].stop
    assert client.store(keys, blocks, namespace="a") == 0


BUSY = """
import sys
from random import Random
import numpy as np
from tests.cache.conftest import LocalHost, Path, PoolClient, WorkerId, WITHIN_S, buffers, chain, content

seed, num_turns = int(sys.argv[2]), int(sys.argv[3])
client = PoolClient(LocalHost(Path(sys.argv[1])), ["cache-0"], WorkerId(f"w-{seed}", 1), retry_s=0.01)
assert client.wait(WITHIN_S) == []
random, hits, stored = Random(seed), 0, 0
for _ in range(num_turns):
    keys = chain(random.randrange(6), random.randint(1, 4))
    into = buffers(len(keys))
    count = client.fetch(keys, into, namespace="a")
    for key, block in zip(keys[:count], into):
        assert np.array_equal(block, content(key)), "torn"
    hits += count
    stored += client.store(keys, [content(key) for key in keys[count:]], namespace="a", first=count)
client.close()
print(hits, stored)
"""


def finished(process: subprocess.Popen[str]) -> tuple[int, int]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    hits, stored = map(int, output.split())
    return hits, stored


def test_three_busy_processes_in_a_pool_that_is_too_small(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    done = [finished(process) for process in [pool.run(BUSY, str(n), str(NUM_TURNS)) for n in range(3)]]
    assert all(hits and stored for hits, stored in done), "nothing was shared"
    until(lambda: told(client).leases == 0)  # the member may hear us before it sees that they have gone
    said = told(client)
    assert said.evicted and not said.bad
    assert (said.leases, said.reserved, said.free + said.committed) == (0, 0, said.num_slots)


def test_busy_processes_outlive_a_member_that_is_killed_again_and_again(pool: Pool) -> None:
    pool.start()
    client = pool.client()
    workers = [pool.run(BUSY, str(n), str(NUM_TURNS)) for n in range(2)]
    until(lambda: told(client).hits > 0)
    num_kills, deadline_s = 0, time.monotonic() + WITHIN_S
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline_s:
        pool.kill()
        num_kills += 1
        pool.start()
        assert client.wait(WITHIN_S) == []
        until(lambda: told(client).hits > 0 or all(worker.poll() == 0 for worker in workers))
    assert num_kills
    for worker in workers:
        finished(worker)
    until(lambda: told(client).leases == 0)
    said = told(client)
    assert said.free + said.committed + said.fenced == said.num_slots
