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
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tripool.config import GatewayConfig
from tripool.control.run_manifest import read_manifest
from tripool.errors import EngineStopped
from tripool.fabric.duty import Duty
from tripool.fabric.folder import gateways_address
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.gateway.app import create_models_app
from tripool.gateway.auth import Access
from tripool.gateway.batches import SharedBatches
from tripool.gateway.cache_quotas import CacheQuotas, cache_routes
from tripool.gateway.coordinator_link import CoordinatorLink
from tripool.gateway.group import Group
from tripool.gateway.idempotency import RemoteKeeper
from tripool.gateway.instances import Instances
from tripool.gateway.models import Models, Served
from tripool.gateway.peers import Peers
from tripool.gateway.pools import pools_routes
from tripool.gateway.remote_backend import RemoteBackend
from tripool.gateway.remote_keys import RemoteKeys, RemoteUsage, offer_keys
from tripool.gateway.server import Server
from tripool.hosts.cache import all_members
from tripool.hosts.directory import DirectoryFile, read_own
from tripool.messages import Drain, Ready, WorkerId
from tripool.router.kept_types import Count
from tripool.serving.versions import follow_started
from tripool.tenants.key_store import KeyStoreError
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
        access: Access | None,
        config: GatewayConfig | None = None,
        *,
        grpc_address: str | None = None,
        batch_lock: int | None = None,
    ) -> None:
        """`access`: None where the key store is on another host. `batch_lock`: of the batches' folder, which the
        supervisor has locked."""
        manifest, own = read_manifest(folder), read_own(folder)
        self._worker_id, self._supervisor_channel = worker_id, supervisor_channel
        if own is not None and own.join:  # its name is one of the whole server
            worker_id = WorkerId(f"{worker_id.name}-{own.name}", worker_id.epoch)
        self._link = CoordinatorLink(gateways_address(folder), worker_id, on_count=self._counted)
        peers, self._duty = Peers(self._link), Duty(folder, "gateway")
        # Two clients, because each is for one thread at a time.
        quotas = WorkerId(f"{worker_id.name}-quotas", worker_id.epoch)
        self._cache = all_members(folder, manifest.cache, worker_id)
        self._keeping: list[Coroutine[Any, Any, None]] = []
        """Runs as long as the server."""
        if access is not None:
            offer_keys(peers, access, self._duty.holds)
            self._quotas = CacheQuotas(all_members(folder, manifest.cache, quotas), access)
            self._keeping.append(self._quotas.keep(self._duty.holds))
        else:
            keys, usage = RemoteKeys(peers, time.monotonic), RemoteUsage(peers, str(worker_id))
            access = Access(keys, usage)
            self._quotas = CacheQuotas(all_members(folder, manifest.cache, quotas), access)
            self._keeping += [keys.keep(), usage.keep()]
        self._access = access
        instances = Instances(folder)
        self._backends = {
            one.name: RemoteBackend(one.name, self._link, access.tenant_named, more=instances.families)
            for one in manifest.models
        }
        served = [
            Served(one.name, self._backends[one.name], Tokenizer(one.text), worker_id.name) for one in manifest.models
        ]
        models = Models(served)
        self._keeping += [
            follow_started(models, one.name, one.follows).keep() for one in manifest.models if one.follows
        ]
        group = Group(
            peers=peers,
            keeper=RemoteKeeper(self._link),
            batches=SharedBatches(batch_lock, self._duty.holds) if batch_lock is not None else None,
        )
        app = create_models_app(models, config or GatewayConfig(), access=access, group=group)
        self._on_count = app.state.on_count
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
            self._duty.close()

    def _on_ready(self) -> None:
        loop = asyncio.get_running_loop()
        self._link.start()
        loop.add_reader(self._supervisor_channel.fileno(), self._listen, loop)
        self._say_ready(loop)
        self._tasks = [loop.create_task(one) for one in self._keeping]
        with suppress(KeyStoreError):  # of another host, and not there yet
            _LOG.info("ready", extra={"epoch": self._worker_id.epoch, "keys": self._access.keys})

    def _counted(self, count: Count, done: Callable[[], object]) -> None:
        self._on_count(count, done)

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
