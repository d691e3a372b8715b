"""Assembles a gateway process of a split server: HTTP, access control, and the link to the coordinator.

| the supervisor | the gateway |
|---|---|
| sends Drain | refuses new requests, gives open answers a few seconds, ends |
| is gone | refuses new requests, lets open answers end, ends |
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from tripool.config import GatewayConfig
from tripool.control.run_manifest import read_manifest
from tripool.errors import EngineStopped
from tripool.fabric.folder import gateways_address
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.gateway.app import create_models_app
from tripool.gateway.auth import Access
from tripool.gateway.cache_quotas import CacheQuotas, cache_routes
from tripool.gateway.coordinator_link import CoordinatorLink
from tripool.gateway.instances import Instances
from tripool.gateway.models import Models, Served
from tripool.gateway.pools import pools_routes
from tripool.gateway.remote_backend import RemoteBackend
from tripool.gateway.server import Server
from tripool.hosts.cache import all_members
from tripool.hosts.directory import DirectoryFile
from tripool.messages import Drain, Ready, WorkerId
from tripool.text import Tokenizer

_LOG = logging.getLogger("tripool.gateway")
_READY_S = 0.5
"""Between two reports to the supervisor that this process is ready."""
_ORPHAN_S = 300.0
"""How long open answers may go on after the supervisor is lost."""
_LOOK_S = 0.1


class GatewayProcess:
    """`run` blocks until a Drain, or until no answer is open after the supervisor is lost."""

    def __init__(
        self,
        folder: Path,
        worker_id: WorkerId,
        supervisor_channel: SupervisorChannel,
        access: Access,
        config: GatewayConfig | None = None,
        *,
        grpc_address: str | None = None,
    ) -> None:
        manifest = read_manifest(folder)
        self._worker_id, self._supervisor_channel, self._access = worker_id, supervisor_channel, access
        self._link = CoordinatorLink(gateways_address(folder), worker_id)
        # Two clients, because each is for one thread at a time.
        quotas = WorkerId(f"{worker_id.name}-quotas", worker_id.epoch)
        self._cache = all_members(folder, manifest.cache, worker_id)
        self._quotas = CacheQuotas(all_members(folder, manifest.cache, quotas), access)
        instances = Instances(folder)
        self._backends = {
            one.name: RemoteBackend(one.name, self._link, access.tenant_named, more=instances.families)
            for one in manifest.models
        }
        served = [Served(one.name, self._backends[one.name], Tokenizer(one.text)) for one in manifest.models]
        app = create_models_app(Models(served), config or GatewayConfig(), access=access)
        hosts = DirectoryFile(folder).describe
        app.include_router(pools_routes(self._link, self._cache, instances, hosts, manifest.places))
        app.include_router(cache_routes(self._quotas))
        self._server = Server(app, on_ready=self._on_ready, end_answers=self._end_answers, grpc_address=grpc_address)

    def run(self, listener: socket.socket) -> None:
        try:
            self._server.run([listener])
        finally:
            self._supervisor_channel.close()
            self._cache.close()
            self._quotas.close()
            self._access.close()

    def _on_ready(self) -> None:
        loop = asyncio.get_running_loop()
        self._link.start()
        loop.add_reader(self._supervisor_channel.fileno(), self._listen, loop)
        self._say_ready(loop)
        self._keeping = loop.create_task(self._quotas.keep())
        _LOG.info("ready", extra={"epoch": self._worker_id.epoch, "keys": self._access.keys})

    def _say_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._supervisor_channel.ended:
            self._supervisor_channel.send(Ready(self._worker_id))
            loop.call_later(_READY_S, self._say_ready, loop)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for message in self._supervisor_channel.receive():
            if isinstance(message, Drain):
                self._refuse("the server is shutting down")
                self._server.should_exit = True
        if self._supervisor_channel.ended:
            loop.remove_reader(self._supervisor_channel.fileno())
            _LOG.warning("supervisor lost", extra={"open": self._link.num_open})
            self._refuse("the server has lost its supervisor and is shutting down")
            self._leave(loop, loop.time() + _ORPHAN_S)

    def _end_answers(self) -> None:
        self._link.close(EngineStopped("the gateway is shut down"))

    def _refuse(self, why: str) -> None:
        for backend in self._backends.values():
            backend.refuse(why)

    def _leave(self, loop: asyncio.AbstractEventLoop, deadline_s: float) -> None:
        """End once no answer is open."""
        if self._link.num_open == 0 or loop.time() >= deadline_s:
            self._server.should_exit = True
        else:
            loop.call_later(_LOOK_S, self._leave, loop, deadline_s)
