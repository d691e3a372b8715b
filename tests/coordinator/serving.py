"""A coordinator and a gateway's link to it on one event loop, over real sockets; workers are sockets of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq.asyncio

from tripool.config import RouterConfig
from tripool.coordinator.gateways import Gateways
from tripool.coordinator.pools import Pools
from tripool.gateway.coordinator_link import CoordinatorLink, NoCoordinator
from tripool.gateway.remote_backend import RemoteBackend
from tripool.messages import AnyMessage, Hello, StartPrefill, WorkerId, decode, encode
from tripool.router.service import ModelService
from tripool.tenants import ANONYMOUS, Tenant

PATIENT = RouterConfig(heartbeat_s=60.0, silence_s=600.0, stall_s=600.0)
"""Workers here say nothing between what the tests make them say."""
DEADLINE_S = 60.0


class Coordinator:
    """One run of the coordinator of model `m`."""

    def __init__(self, folder: Path, epoch: int = 1, config: RouterConfig = PATIENT) -> None:
        self.address = f"ipc://{folder}/workers"
        self.pools = Pools(["m"], config, addresses=[self.address], epoch=epoch, suspect=lambda message: None)
        self.gateways = Gateways(self.pools, f"ipc://{folder}/gateways")
        self.pools.start(self.gateways)
        self.gateways.start()

    @property
    def service(self) -> ModelService:
        return self.pools.services["m"]

    def close(self) -> None:
        self.gateways.close()
        self.pools.close()


@dataclass
class Serving:
    folder: Path
    coordinator: Coordinator
    link: CoordinatorLink
    backend: RemoteBackend
    tenants: dict[str, Tenant]
    workers: list[Worker] = field(default_factory=list)

    def replace(self, epoch: int, config: RouterConfig = PATIENT) -> None:
        """The coordinator is gone, and another is there."""
        self.coordinator.close()
        self.coordinator = Coordinator(self.folder, epoch, config)

    async def worker(self, hello: Hello) -> Worker:
        worker = Worker(self.coordinator.address, hello)
        self.workers.append(worker)
        await worker.send(hello)
        return worker

    async def until_there(self, request_id: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while request_id not in self.coordinator.service:
                await asyncio.sleep(0.005)


class Worker:
    def __init__(self, address: str, hello: Hello) -> None:
        self.hello, self._context = hello, zmq.asyncio.Context()
        self.line = self._context.socket(zmq.DEALER)
        self.line.setsockopt(zmq.ROUTING_ID, f"{hello.worker_id}.1".encode())
        self.line.connect(address)

    async def send(self, message: AnyMessage) -> None:
        await self.line.send(encode(message))

    async def hear(self) -> AnyMessage:
        return decode(await asyncio.wait_for(self.line.recv(), DEADLINE_S))

    async def begun(self) -> StartPrefill:
        while not isinstance(message := await self.hear(), StartPrefill):
            pass
        return message

    def close(self) -> None:
        self.line.close(0)
        self._context.term()


@asynccontextmanager
async def serving(folder: Path, config: RouterConfig = PATIENT, **tenants: Tenant) -> AsyncIterator[Serving]:
    coordinator = Coordinator(folder, 1, config)
    welcome = asyncio.Event()
    link = CoordinatorLink(f"ipc://{folder}/gateways", WorkerId("gateway", 1), on_welcome=welcome.set)
    known = {"": ANONYMOUS, **tenants}
    one = Serving(folder, coordinator, link, RemoteBackend("m", link, known.__getitem__), known)
    link.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await welcome.wait()
        yield one
    finally:
        link.close(NoCoordinator())
        for worker in one.workers:
            worker.close()
        one.coordinator.close()
