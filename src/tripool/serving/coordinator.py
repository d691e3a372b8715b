"""Assembles a coordinator process of a split server: admission, placement and ledger of all models, and connections.

The first of a run leads, another one is its standby (`coordinator/standby.py`).

| the supervisor | the coordinator |
|---|---|
| sends SIGTERM | ends |
| is gone | ends once no gateway is connected any more |

It ends, too, when the run folder says that another coordinator leads.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import time
from pathlib import Path

from tripool.config import RouterConfig
from tripool.control.run_manifest import read_manifest
from tripool.coordinator.gateways import Gateways
from tripool.coordinator.pools import Pools
from tripool.coordinator.standby import LeaderLock, Standby
from tripool.fabric.folder import coordinator_address, gateways_address
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import Drain, Ready, Reaped, WorkerId
from tripool.router.replica import Replica

_LOG = logging.getLogger("tripool.coordinator")
_READY_S = 0.5
"""Between two reports to the supervisor that this process is ready."""
_ORPHAN_S = 5.0
"""How long it waits for gateways after the supervisor is lost."""


class CoordinatorProcess:
    """`run` blocks until `stop`, a Drain, or until supervisor and gateways are gone."""

    def __init__(
        self,
        folder: Path,
        worker_id: WorkerId,
        supervisor_channel: SupervisorChannel,
        router: RouterConfig | None = None,
    ) -> None:
        self._models = [model.name for model in read_manifest(folder).models]
        self._folder, self._worker_id, self._supervisor_channel = folder, worker_id, supervisor_channel
        self._router = router or RouterConfig()
        self._lock = LeaderLock(folder)
        self._pools: Pools | None = None
        """Once it leads."""
        self._gateways: Gateways | None = None
        self._stopped: asyncio.Event | None = None

    def run(self) -> None:
        with asyncio.Runner(loop_factory=_new_loop()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, self._stopped.set)
            except (RuntimeError, ValueError):  # not the main thread: a test's process in a thread
                break
        loop.add_reader(self._supervisor_channel.fileno(), self._listen, loop)
        leading = None
        if self._lock.acquire(wait=False):
            self._lead(Replica())
        else:
            leading = loop.create_task(self._follow())
            leading.add_done_callback(self._followed)
        self._say_ready(loop)
        try:
            await self._stopped.wait()
        finally:
            if leading is not None and not leading.done():
                leading.cancel()
                await asyncio.wait([leading])
            if self._gateways is not None and self._pools is not None:
                self._gateways.close()
                self._pools.close()
            if self._supervisor_channel.ended and self._pools is not None:  # the last process that knows the folder
                shutil.rmtree(self._folder, ignore_errors=True)
            else:
                loop.remove_reader(self._supervisor_channel.fileno())
            self._supervisor_channel.close()
            _LOG.info("stopped")
        if leading is not None and not leading.cancelled():
            leading.result()

    async def _follow(self) -> None:
        standby = Standby(self._lock, gateways_address(self._folder), self._worker_id, time.monotonic)
        replica = await standby.wait()
        if self._folder.exists():  # else the server has ended
            self._lead(replica)
        elif self._stopped is not None:
            self._stopped.set()

    def _followed(self, leading: asyncio.Task[None]) -> None:
        """One that cannot lead must not keep the lock."""
        if not leading.cancelled() and leading.exception() is not None and self._stopped is not None:
            self._stopped.set()

    def _lead(self, replica: Replica) -> None:
        epoch = self._lock.next_epoch()
        self._pools = Pools(
            self._models,
            self._router,
            addresses=[coordinator_address(self._folder)],
            epoch=epoch,
            suspect=self._supervisor_channel.send,
            may_decide=lambda: self._leads(epoch),
        )
        self._pools.restore(replica)
        self._gateways = Gateways(self._pools, gateways_address(self._folder), on_change=self._consider_leaving)
        self._pools.start(self._gateways)
        self._gateways.start()
        _LOG.info("leading", extra={"epoch": epoch})
        if self._supervisor_channel.ended:
            asyncio.get_running_loop().call_later(_ORPHAN_S, self._consider_leaving)

    def _leads(self, epoch: int) -> bool:
        if self._lock.epoch == epoch:
            return True
        if self._stopped is not None and not self._stopped.is_set():
            _LOG.error("another coordinator leads", extra={"epoch": epoch, "their_epoch": self._lock.epoch})
            self._stopped.set()
        return False

    def _say_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._supervisor_channel.ended:
            self._supervisor_channel.send(Ready(self._worker_id))
            loop.call_later(_READY_S, self._say_ready, loop)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for message in self._supervisor_channel.receive():
            if isinstance(message, Reaped) and self._pools is not None:
                self._pools.reaped(message)
            elif isinstance(message, Drain) and self._stopped is not None:
                self._stopped.set()
        if self._supervisor_channel.ended:
            loop.remove_reader(self._supervisor_channel.fileno())
            _LOG.warning("supervisor lost", extra={"leads": self._pools is not None})
            loop.call_later(_ORPHAN_S, self._consider_leaving)

    def _consider_leaving(self) -> None:
        """Gateways end after their last answer."""
        gateways = self._gateways
        if self._supervisor_channel.ended and gateways is not None and not len(gateways) and self._stopped is not None:
            self._stopped.set()


def _new_loop() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
