"""Quotas of cache bytes: no namespace gets more slots than its quota, whoever writes and whenever quotas change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache.conftest import BLOCK_BYTES, WITHIN_S, Pool, chain, content, told
from tripool.cache import PUBLIC_NAMESPACE, PoolIndex, namespace_tag
from tripool.cache.records import State, Written
from tripool.core import SALT_MARK
from tripool.messages import WorkerId
from tripool.tenants import Limits, Tenant
from tripool.tenants.key_table import PUBLIC_SHARE, spread, tables

NAMES = ("a", "b", "c")
TAGS = {name: namespace_tag(name) for name in NAMES}
LIVES = (WorkerId("p-0", 1), WorkerId("p-1", 1))
NUM_SLOTS = 12


@given(st.integers(0, 10**12), st.integers(1, 10**8), st.integers(1, 9))
def test_all_members_together_never_hold_more_than_given(cache_bytes: int, slot_bytes: int, num_members: int) -> None:
    shares = spread(cache_bytes, slot_bytes, num_members)
    assert len(shares) == num_members
    assert sum(shares) == cache_bytes // slot_bytes
    assert max(shares) - min(shares) <= 1


def test_tables_hold_who_has_a_quota_and_the_public() -> None:
    tenants = [
        Tenant(name="a", namespace="a", limits=Limits(cache_bytes=50)),
        Tenant(name="b", namespace="b", limits=Limits(cache_bytes=0)),
        Tenant(name="c", namespace="c"),
    ]
    found = tables(tenants, ["m0", "m1"], 10, {"m0": 100})
    public = namespace_tag(PUBLIC_NAMESPACE)
    assert found == {
        "m0": {public: int(100 * PUBLIC_SHARE), TAGS["a"]: 3, TAGS["b"]: 0},
        "m1": {public: 0, TAGS["a"]: 2, TAGS["b"]: 0},
    }


def test_salts_of_one_tenant_have_one_quota_together() -> None:
    assert namespace_tag(f"t-1{SALT_MARK}x") == namespace_tag("t-1") != namespace_tag("t-2")
    assert namespace_tag(f"{SALT_MARK}t-1") == namespace_tag("")


class QuotaMachine(RuleBasedStateMachine):
    """Writers, readers and an operator who changes his mind, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PoolIndex(NUM_SLOTS, lease_s=1.0, write_s=1.0)
        self.quotas: dict[bytes, int] = {}
        self.now_s, self.key = 0.0, 0
        self.tickets: list[tuple[int, WorkerId, tuple[int, ...]]] = []
        self.stored: list[tuple[str, list[bytes]]] = []

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 6), worker_id=st.sampled_from(LIVES))
    def reserve(self, name: str, count: int, worker_id: WorkerId) -> None:
        tag = TAGS[name]
        before = self.index.held.get(tag, 0)
        keys = [(self.key + i).to_bytes(16, "big") for i in range(count)]
        self.key += count
        grant = self.index.reserve(keys, worker_id, tag, self.now_s)
        held = self.index.held.get(tag, 0)
        if grant.slots:
            assert held <= self.quotas.get(tag, NUM_SLOTS), "more than its quota"
            self.tickets.append((grant.ticket, worker_id, grant.slots))
            self.stored.append((name, keys))
        assert held <= max(before, self.quotas.get(tag, NUM_SLOTS))

    @rule(written=st.booleans())
    def commit(self, written: bool) -> None:
        if self.tickets:
            ticket, worker_id, slots = self.tickets.pop(0)
            self.index.commit(ticket, worker_id, [Written(slot, 1, 1) for slot in slots] if written else [])

    @rule(which=st.integers(0, 50), worker_id=st.sampled_from(LIVES))
    def read(self, which: int, worker_id: WorkerId) -> None:
        if self.stored:
            name, keys = self.stored[which % len(self.stored)]
            self.index.lookup(keys, worker_id, TAGS[name], self.now_s)

    @rule(name=st.sampled_from(NAMES), slots=st.none() | st.integers(0, NUM_SLOTS))
    def change(self, name: str, slots: int | None) -> None:
        self.quotas.pop(TAGS[name], None)
        if slots is not None:
            self.quotas[TAGS[name]] = slots
        before = self.index.num_committed
        assert self.index.set_quotas(self.quotas) == before - self.index.num_committed
        for tag, quota in self.quotas.items():
            records = [record for record in self.index._slots.records if record.namespace == tag]
            idle = [
                slot
                for slot, record in enumerate(self.index._slots.records)
                if record.namespace == tag and record.state is State.COMMITTED and slot in self.index._slots.idle
            ]
            assert len(records) <= quota or not idle, "an unused excess stayed"

    @rule(wait_s=st.floats(0, 2))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.index.expire(self.now_s)

    @invariant()
    def quotas_hold(self) -> None:
        self.index.check()


TestQuotas = QuotaMachine.TestCase


WRITER = """
import sys
from pathlib import Path
from random import Random
from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.messages import WorkerId
from cache.conftest import BLOCK_BYTES, WITHIN_S, chain, content

seed = int(sys.argv[2])
client = PoolClient(LocalHost(Path(sys.argv[1])), ["cache-0", "cache-1"], WorkerId(f"w-{seed}", 1), retry_s=0.01)
assert client.wait(WITHIN_S) == []
random, stored = Random(seed), 0
for turn in range(60):
    keys = chain(seed * 1000 + turn, random.randint(1, 4))
    name = random.choice(["a", "b", "a\\x1fsalt-%d" % turn])
    stored += client.store(keys, [content(key) for key in keys], namespace=name)
print(stored, flush=True)
client.close()
"""


def run_writer(folder: Path, seed: int) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", WRITER, str(folder), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def held(client, name: str) -> int:  # type: ignore[no-untyped-def]  # a client of the pool
    return sum(said.held.get(namespace_tag(name), 0) for said in client.stats().values() if said is not None)


def test_quotas_hold_while_processes_write_at_once_and_change_live(pool: Pool) -> None:
    pool.members = ["cache-0", "cache-1"]
    pool.config["num_slots"] = 24
    for member in pool.members:
        pool.start(member)
    client = pool.client("keeper")
    tenants = [Tenant(name="a", namespace="a", limits=Limits(cache_bytes=7 * BLOCK_BYTES + 5))]
    assert client.limit(tables(tenants, pool.members, BLOCK_BYTES, {})) == []
    writers = [run_writer(pool.folder, seed) for seed in range(3)]
    seen = []
    while any(writer.poll() is None for writer in writers):
        seen.append(held(client, "a"))
    for writer in writers:
        output, _ = writer.communicate(timeout=WITHIN_S)
        assert writer.returncode == 0 and int(output) > 20
    assert max(seen) <= 7, "the quota was passed while processes wrote"
    assert held(client, "a") == 7, "and used up"
    assert held(client, "b") > 7, "others are not held to it"
    smaller = [Tenant(name="a", namespace="a", limits=Limits(cache_bytes=3 * BLOCK_BYTES))]
    assert client.limit(tables(smaller, pool.members, BLOCK_BYTES, {})) == []
    assert held(client, "a") == 3
    client.purge([namespace_tag("a")])
    assert held(client, "a") == 0
    assert held(client, "b") > 7
    assert client.limit(tables([], pool.members, BLOCK_BYTES, {})) == []
    keys = chain(77, 10)
    client.store(keys, [content(key) for key in keys], namespace="a")
    assert held(client, "a") == 10, "without a quota there is none"


@pytest.mark.parametrize("cache_bytes", [0, BLOCK_BYTES - 1])
def test_a_quota_below_one_block_keeps_nothing(pool: Pool, cache_bytes: int) -> None:
    pool.start()
    client = pool.client()
    tenants = [Tenant(name="a", namespace="a", limits=Limits(cache_bytes=cache_bytes))]
    client.limit(tables(tenants, pool.members, BLOCK_BYTES, {}))
    keys = chain(1, 3)
    assert client.store(keys, [content(key) for key in keys], namespace="a") == 0
    assert told(client).held == {}
