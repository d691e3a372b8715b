"""The coordinator's connections to the workers of all models: each message goes to the service of its worker's model.

Runs on the coordinator's event loop. A worker names its model in its Hello. What the services decide is carried out
here: messages to workers, tokens and failures to the gateways, reports to the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import zmq

from tripool import messages
from tripool.config import RouterConfig
from tripool.core import TokenEvent
from tripool.errors import TripoolError
from tripool.fabric.channel import Switchboard, read_from_worker
from tripool.messages import FromWorker, Heartbeat, Hello, Left, Reaped, Suspect, WorkerId
from tripool.router.kept_log import news, restore
from tripool.router.outputs import Emit, Fail, Lost, Output, Send
from tripool.router.rate_limiter import RateLimiter
from tripool.router.replica import Given, Record, Replica, Trouble
from tripool.router.service import ModelService
from tripool.router.sessions import Sessions

_LOG = logging.getLogger("tripool.coordinator")
_TICK_S = 0.02

_FROM_WORKERS = (
    Heartbeat, messages.Tokens, messages.TransferReady, messages.TransferDone, messages.Refused, Left
)  # fmt: skip


class Clients(Protocol):
    """Where tokens and failures go."""

    def emit(self, event: TokenEvent) -> None: ...

    def fail(self, request_id: str, error: TripoolError) -> None: ...


class _Route(NamedTuple):
    line: bytes
    """The connection on which the worker sent its last Hello."""
    service: ModelService


@dataclass(slots=True)
class _Opened:
    """What exists only between `start` and `close`."""

    loop: asyncio.AbstractEventLoop
    context: zmq.Context[zmq.Socket[bytes]]
    switchboard: Switchboard[FromWorker]
    clients: Clients
    timer: asyncio.TimerHandle | None = None
    routes: dict[WorkerId, _Route] = field(default_factory=dict)


class Pools:
    """One `ModelService` for each of `models`. `suspect` sends the supervisor the worker that it shall end."""

    def __init__(
        self,
        models: Iterable[str],
        config: RouterConfig,
        *,
        addresses: Iterable[str],
        epoch: int,
        suspect: Callable[[Suspect], object],
        may_decide: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`may_decide`: asked before anything is decided; False: another coordinator leads. `clock` is not the event
        loop's: uvloop's has a resolution of one millisecond, too coarse for admission."""
        self.rate_limiter = RateLimiter()  # a tenant's limits hold over all models
        self.services = {model: ModelService(config, epoch=epoch, rate_limiter=self.rate_limiter) for model in models}
        self.sessions = Sessions(self.services)
        self.epoch, self.clock, self.may_decide = epoch, clock, may_decide
        self.draining = False
        """Whether new requests are refused, by all gateways."""
        self._logged_draining = False
        self._addresses, self._suspect = tuple(addresses), suspect
        self._heartbeat_s = config.heartbeat_s
        self._opened: _Opened | None = None

    def start(self, clients: Clients) -> None:
        """Accept workers, on the running event loop."""
        loop, context = asyncio.get_running_loop(), zmq.Context[zmq.Socket[bytes]]()
        switchboard = Switchboard(context, read_from_worker, *self._addresses)
        self._opened = _Opened(loop, context, switchboard, clients)
        loop.add_reader(switchboard.fileno, self._receive)
        self._tick()

    def close(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.loop.remove_reader(opened.switchboard.fileno)
            if opened.timer is not None:
                opened.timer.cancel()
            opened.switchboard.close()
            opened.context.term()

    def restore(self, replica: Replica) -> None:
        """Before `start`: what the log of an earlier coordinator said."""
        self.rate_limiter.restore(replica.state.levels)
        for model, service in self.services.items():
            service.restore(replica, model)
        restore(self.sessions.kept, replica.state.kept, self.clock())
        self.sessions.counts = {count.id: (count, None) for count in replica.state.counts}
        self.draining = self._logged_draining = bool(replica.state.draining)

    def record(self, *, everything: bool = False) -> Record:
        """For a standby: what has changed since the last call, or everything."""
        given: list[Given] = []
        troubles: list[Trouble] = []
        for model, service in self.services.items():
            given += service.admission.queue.changes(model, everything=everything)
            troubles += service.coordinator.troubles(everything=everything)
        levels = self.rate_limiter.changes(self.clock(), everything=everything)
        kept = news(self.sessions.kept, everything=everything)
        counts, counted, removed = self.sessions.count_news(everything=everything)
        draining = self.draining if everything or self.draining != self._logged_draining else None
        self._logged_draining = self.draining
        return Record(levels, tuple(given), tuple(troubles), kept, removed, counts, counted, draining)

    def carry_out(self, outputs: Iterable[Output]) -> None:
        """What a service decided."""
        opened, sent = self._opened, False
        if opened is None:
            return
        for output in outputs:
            if isinstance(output, Emit):
                opened.clients.emit(output.event)
            elif isinstance(output, Send):
                self._send(opened, output)
                sent = True
            elif isinstance(output, Fail):
                opened.clients.fail(output.request_id, output.error)
            elif isinstance(output, Lost):
                level = logging.WARNING if output.num_requests else logging.INFO
                _LOG.log(level, "worker lost", extra=facts_of(output.worker_id) | {"placed_again": output.num_requests})
            else:
                _LOG.warning("worker suspected", extra=facts_of(output.message.worker_id))
                self._suspect(output.message)
        if sent and opened.switchboard.waiting:  # sending may have used up the sign that there is something to receive
            opened.loop.call_soon(self._receive)

    def _send(self, opened: _Opened, output: Send) -> None:
        route = opened.routes.get(output.worker_id)
        if route is not None and not opened.switchboard.send(route.line, output.message):
            # Later: this may be amid what another message made it decide.
            opened.loop.call_soon(self._disconnected, output.worker_id, route)

    # ---- the supervisor, the clock, the workers ---------------------------------------------------------------------

    def reaped(self, message: Reaped) -> None:
        """The supervisor has reaped a worker process, of whichever model."""
        if self._opened is not None:
            self._opened.routes.pop(message.worker_id, None)
            for service in self.services.values():
                self.carry_out(service.receive(message, self.clock()))

    def _tick(self) -> None:
        if self._opened is not None and self.may_decide():
            self._look_for_quiet(self._opened)
            for service in self.services.values():
                self.carry_out(service.tick(self.clock()))
            self._opened.timer = self._opened.loop.call_later(_TICK_S, self._tick)

    def _look_for_quiet(self, opened: _Opened) -> None:
        """Whoever misses heartbeats may be slow or gone. If its connection has ended it is gone, and nobody waits."""
        quiet_since_s = self.clock() - self._heartbeat_s
        for worker_id, route in list(opened.routes.items()):
            member = route.service.coordinator.view.get(worker_id)
            if member is not None and member.heard_s < quiet_since_s and not opened.switchboard.send(route.line, None):
                self._disconnected(worker_id, route)

    def _disconnected(self, worker_id: WorkerId, route: _Route) -> None:
        if self._opened is not None and self._opened.routes.get(worker_id) == route:
            del self._opened.routes[worker_id]
            self.carry_out(route.service.disconnected(worker_id, self.clock()))

    def _receive(self) -> None:
        opened = self._opened
        if opened is None:
            return
        if not self.may_decide():
            return
        for line, message in opened.switchboard.receive():
            if isinstance(message, Hello):
                self._hello(opened, line, message)
                continue
            if not isinstance(message, _FROM_WORKERS):
                continue  # nothing that a worker sends
            route = opened.routes.get(message.worker_id)
            if route is None:
                continue  # of an earlier coordinator's session: the worker will notice, and send Hello
            if route.line != line and not isinstance(message, Heartbeat):  # heartbeats have a connection of their own
                continue  # from a connection that was given up
            self.carry_out(route.service.receive(message, self.clock()))
            if isinstance(message, Left):
                del opened.routes[message.worker_id]

    def _hello(self, opened: _Opened, line: bytes, hello: Hello) -> None:
        service, worker_id = self.services.get(hello.model), hello.worker_id
        if service is None:
            return  # its process refuses to start, too
        if opened.routes.get(worker_id) == (line, service) and worker_id in service.coordinator.view:
            return  # sent again before our Welcome came: a connection is one session, and this one has begun
        opened.routes[worker_id] = _Route(line, service)
        self.carry_out(service.receive(hello, self.clock()))
        if worker_id in service.coordinator.view:
            facts = {"role": hello.role, "worker_pid": hello.pid, "kv_tokens": hello.kv_tokens}
            _LOG.info("worker joined", extra=facts_of(worker_id) | facts)

    # ---- for operators ----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The pools as `tripool status` shows them."""
        coordinators = {model: service.coordinator for model, service in self.services.items()}
        stages = sum((service.stages() for service in self.services.values()), Counter[str]())
        workers = [
            {
                "worker": member.worker_id.name,
                "model": model,
                "epoch": member.worker_id.epoch,
                "pid": member.hello.pid,
                "role": member.hello.role,
                "instance": member.hello.instance_name,
                "draining": member.draining,
                "reserved_for": member.hello.reserved_for,
                "steps": member.num_steps,
                "placed": member.num_placed,
                "placed_tokens": member.placed_tokens,
                "waiting_tokens": member.reported_tokens,
                "running": member.running,
                "blocks_held": member.blocks_held,
                "kv_tokens": member.hello.kv_tokens,
            }
            for model, coordinator in coordinators.items()
            for member in coordinator.view
        ]
        return {
            "join": self._addresses[0],
            "coordinator_epoch": self.epoch,
            "coordinator_pid": os.getpid(),
            "serving": self._opened is not None,
            "requests": sum(len(coordinator.ledger) for coordinator in coordinators.values()),
            "stages": dict(stages),
            "dropped_events": sum(coordinator.ledger.num_dropped for coordinator in coordinators.values()),
            "workers": sorted(workers, key=lambda worker: str(worker["worker"])),
        }


def facts_of(worker_id: WorkerId) -> dict[str, Any]:
    """For the log."""
    return {"worker": worker_id.name, "epoch": worker_id.epoch}
