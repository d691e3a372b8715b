"""The gateway as a process of its own: HTTP in front, the pools behind, a leash to the supervisor.

| the supervisor | the gateway |
|---|---|
| says Drain | takes no more, gives open answers a few seconds, ends |
| is gone | takes no more, lets open answers end, ends |
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from tripool.cache.client import PoolClient
from tripool.config import GatewayConfig, RouterConfig
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.gateway.admission import AdmissionBackend
from tripool.gateway.app import create_app
from tripool.gateway.auth import Access
from tripool.gateway.cache_quotas import CacheQuotas, cache_routes
from tripool.gateway.pools import Pools, pools_routes
from tripool.gateway.server import Server
from tripool.messages import Drain, Ready, Reaped, WorkerId
from tripool.text import TextFiles, Tokenizer

_LOG = logging.getLogger("tripool.gateway")
_READY_S = 0.5
"""How often the supervisor hears that all is well."""
_ORPHAN_S = 300.0
"""How long open answers may go on when nobody watches over the workers any more."""
_LOOK_S = 0.1


class GatewayProcess:
    def __init__(
        self,
        text: TextFiles,
        name: str,
        config: GatewayConfig,
        *,
        router: RouterConfig,
        addresses: Sequence[str],
        worker_id: WorkerId,
        supervisor_channel: SupervisorChannel,
        cache: PoolClient,
        cache_client: PoolClient,
        access: Access,
    ) -> None:
        self._worker_id, self._supervisor_channel = worker_id, supervisor_channel
        self._pools = Pools(router, addresses=addresses, epoch=worker_id.epoch, suspect=supervisor_channel.send)
        self._access = access
        self._quotas = CacheQuotas(cache_client, access)
        self._admission = admission = AdmissionBackend(
            self._pools, room=self._pools.room, tenant_of=access.tenant_named
        )
        app = create_app(admission, Tokenizer(text), name, config, access=access)
        app.include_router(pools_routes(self._pools, cache))
        app.include_router(cache_routes(self._quotas))
        self._server = Server(app, on_ready=self._on_ready, end_answers=self._pools.close)

    def run(self, listener: socket.socket) -> None:
        """Until it is told to end, or is an orphan without work."""
        try:
            self._server.run([listener])
        finally:
            self._supervisor_channel.close()
            self._quotas.close()
            self._access.close()

    def _on_ready(self) -> None:
        loop = asyncio.get_running_loop()
        self._pools.start()
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
            if isinstance(message, Reaped):
                self._pools.reaped(message)
            elif isinstance(message, Drain):
                self._admission.refuse("the server is shutting down")
                self._server.should_exit = True
        if self._supervisor_channel.ended:
            loop.remove_reader(self._supervisor_channel.fileno())
            _LOG.warning("supervisor lost", extra={"open": self._admission.num_open})
            self._admission.refuse("the server has lost its supervisor and is shutting down")
            self._leave(loop, loop.time() + _ORPHAN_S)

    def _leave(self, loop: asyncio.AbstractEventLoop, deadline_s: float) -> None:
        """Once nothing is open."""
        if self._admission.num_open == 0 or loop.time() >= deadline_s:
            self._server.should_exit = True
        else:
            loop.call_later(_LOOK_S, self._leave, loop, deadline_s)
