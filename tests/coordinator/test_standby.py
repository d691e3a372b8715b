"""Who leads: one process at a time, the next as soon as the last has ended, and with a higher epoch each time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from tripool.coordinator.standby import LeaderLock, Standby
from tripool.messages import Heartbeat, Welcome, WorkerId
from tripool.router.replica import Level, Replica

from ..split import faults
from .serving import DEADLINE_S, Coordinator, Worker
from .test_pools import HELLO, LIFE

LEADER = """
import asyncio, os, sys
from pathlib import Path
from tripool.config import RouterConfig
from tripool.coordinator.gateways import Gateways
from tripool.coordinator.pools import Pools
from tripool.coordinator.standby import LeaderLock
from tripool.tenants import Limits, Tenant

async def lead(folder):
    lock = LeaderLock(folder)
    assert lock.acquire(wait=False)
    epoch = lock.next_epoch()
    pools = Pools(["m"], RouterConfig(), addresses=[f"ipc://{folder}/workers"], epoch=epoch, suspect=print)
    gateways = Gateways(pools, f"ipc://{folder}/gateways")
    pools.start(gateways)
    gateways.start()
    tenant = Tenant(name="t", namespace="t", limits=Limits(requests_per_minute=60))
    pools.rate_limiter.take(tenant, 7, 0, pools.clock())
    print(epoch, flush=True)
    await asyncio.Event().wait()

asyncio.run(lead(Path(sys.argv[1])))
"""


@contextmanager
def leader(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", LEADER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "1\n"
            yield process
        finally:
            process.kill()


async def until(what) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("strike", [faults.kill, faults.stop], ids=["killed", "stopped"])
def test_the_standby_leads_with_what_the_log_said(tmp_path: Path, strike) -> None:
    """A leader that is stopped is killed: it never wakes up to decide."""

    async def follow(process: subprocess.Popen[str]) -> tuple[Replica, int]:
        lock = LeaderLock(tmp_path)
        assert not lock.acquire(wait=False), "two lead"
        standby = Standby(lock, f"ipc://{tmp_path}/gateways", WorkerId("coordinator-1", 9), time.monotonic)
        waiting = asyncio.ensure_future(standby.wait())
        await until(lambda: standby.knows)
        assert not waiting.done()
        strike(process.pid)
        replica = await asyncio.wait_for(waiting, DEADLINE_S)
        return replica, lock.next_epoch()

    with leader(tmp_path) as process:
        replica, epoch = asyncio.run(follow(process))
        assert process.wait(DEADLINE_S) == -9
    assert epoch == 2
    (level,) = replica.state.levels
    assert isinstance(level, Level) and (level.tenant, level.limit) == ("t", "requests")
    assert 53.0 <= level.level < 55.0


def test_a_leader_that_only_knows_a_little_goes_on(tmp_path: Path) -> None:
    """Nobody has to follow it; and a standby that ends is forgotten."""

    async def go() -> int:
        coordinator, lock = Coordinator(tmp_path), LeaderLock(tmp_path)
        assert lock.acquire(wait=False)
        other = LeaderLock(tmp_path)
        standby = Standby(other, f"ipc://{tmp_path}/gateways", WorkerId("c", 1), time.monotonic)
        waiting = asyncio.ensure_future(standby.wait())
        try:
            await until(lambda: standby.knows)
            assert coordinator.gateways.num_standbys == 1
            waiting.cancel()
            await until(lambda: not coordinator.gateways.num_standbys)
            return lock.next_epoch()
        finally:
            coordinator.close()

    assert asyncio.run(go()) == 1


def test_a_leader_that_another_one_has_replaced_decides_nothing_more(tmp_path: Path) -> None:
    """Whoever replaced it, and however it lived on: it reads the epoch before it decides."""

    async def go() -> list[str]:
        lock, leads = LeaderLock(tmp_path), True
        assert lock.acquire(wait=False)
        epoch = lock.next_epoch()
        coordinator = Coordinator(tmp_path, epoch)
        coordinator.pools.may_decide = lambda: leads and lock.epoch == epoch
        context = zmq.asyncio.Context()
        worker = Worker(coordinator.address, HELLO)
        try:
            await worker.send(HELLO)
            assert isinstance(await worker.hear(), Welcome)
            (tmp_path / "leader").write_text(str(epoch + 1))
            await worker.send(msgspec.structs.replace(HELLO, worker_id=LIFE, kv_tokens=1))
            await worker.send(Heartbeat(LIFE, 1, 0, 0, 0))
            assert not await worker.line.poll(300), "an old leader answers"
            return [one["worker"] for one in coordinator.pools.describe()["workers"]]
        finally:
            worker.close()
            context.term()
            coordinator.close()

    assert asyncio.run(go()) == ["prefill-0"]
