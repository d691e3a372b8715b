"""The gateway's connections to the workers of all models: each message goes to the backend of its worker's model.

Runs on the gateway's event loop. A worker names its model in its Hello; one coordinator per model decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import zmq
from fastapi import APIRouter

from tripool import messages
from tripool.cache.client import PoolClient
from tripool.cache.wire import Stats
from tripool.config import RouterConfig
from tripool.fabric.channel import Switchboard
from tripool.gateway.instances import Instances
from tripool.gateway.pool_backend import PoolBackend, facts_of
from tripool.messages import AnyMessage, Heartbeat, Hello, Left, Reaped, Suspect, WorkerId

_LOG = logging.getLogger("tripool.gateway")
_TICK_S = 0.05

_FROM_WORKERS = (
    Heartbeat, messages.Tokens, messages.TransferReady, messages.TransferDone, messages.Refused, Left
)  # fmt: skip


class _Route(NamedTuple):
    line: bytes
    """The connection on which the worker sent its last Hello."""
    backend: PoolBackend


@dataclass(slots=True)
class _Opened:
    """What exists only between `start` and `close`."""

    loop: asyncio.AbstractEventLoop
    context: zmq.Context[zmq.Socket[bytes]]
    switchboard: Switchboard
    timer: asyncio.TimerHandle | None = None
    routes: dict[WorkerId, _Route] = field(default_factory=dict)


class Pools:
    """One `PoolBackend` for each of `models`. `start` it on the event loop that serves HTTP.

    `suspect` sends the supervisor the worker that it shall end.
    """

    def __init__(
        self,
        models: Iterable[str],
        config: RouterConfig,
        *,
        addresses: Iterable[str],
        epoch: int,
        suspect: Callable[[Suspect], object],
    ) -> None:
        self.backends = {model: PoolBackend(config, epoch=epoch, connections=self) for model in models}
        self._addresses = tuple(addresses)
        self.suspect = suspect
        """Asks the supervisor to end a worker."""
        self._epoch, self._heartbeat_s = epoch, config.heartbeat_s
        self._opened: _Opened | None = None

    # ---- what the backends need -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Accept workers, on the running event loop; a second call changes nothing."""
        if self._opened is not None:
            return
        loop, context = asyncio.get_running_loop(), zmq.Context[zmq.Socket[bytes]]()
        self._opened = _Opened(loop, context, Switchboard(context, *self._addresses))
        loop.add_reader(self._opened.switchboard.fileno, self._receive)
        self._tick()

    @property
    def now_s(self) -> float | None:
        """The event loop's time; None before `start` and after the end."""
        return None if self._opened is None else self._opened.loop.time()

    def send(self, worker_id: WorkerId, message: AnyMessage) -> None:
        assert self._opened is not None
        route = self._opened.routes.get(worker_id)
        if route is not None and not self._opened.switchboard.send(route.line, message):
            self.soon(self._disconnected, worker_id, route)

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Call it from the event loop, after what runs now."""
        if self._opened is not None:
            self._opened.loop.call_soon(call, *args)

    def sent(self) -> None:
        """Sending may have consumed the signal that messages wait to be received."""
        if self._opened is not None and self._opened.switchboard.waiting:
            self._opened.loop.call_soon(self._receive)

    # ---- the supervisor, the clock, the workers ---------------------------------------------------------------------

    def close(self, why: str = "the gateway is shut down") -> None:
        """End every stream with an error and close the connections to all workers."""
        for backend in self.backends.values():
            backend.close(why)
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.loop.remove_reader(opened.switchboard.fileno)
            if opened.timer is not None:
                opened.timer.cancel()
            opened.switchboard.close()
            opened.context.term()

    def reaped(self, message: Reaped) -> None:
        """The supervisor has reaped a worker process, of whichever model."""
        if self._opened is not None:
            self._opened.routes.pop(message.worker_id, None)
            for backend in self.backends.values():
                backend.receive(message)

    def _tick(self) -> None:
        if self._opened is not None:
            self._look_for_quiet(self._opened)
            for backend in self.backends.values():
                backend.tick()
            self._opened.timer = self._opened.loop.call_later(_TICK_S, self._tick)

    def _look_for_quiet(self, opened: _Opened) -> None:
        """Whoever misses heartbeats may be slow or gone. If its connection has ended it is gone, and nobody waits."""
        quiet_since_s = opened.loop.time() - self._heartbeat_s
        for worker_id, route in list(opened.routes.items()):
            member = route.backend.coordinator.view.get(worker_id)
            if member is not None and member.heard_s < quiet_since_s and not opened.switchboard.send(route.line, None):
                self._disconnected(worker_id, route)

    def _disconnected(self, worker_id: WorkerId, route: _Route) -> None:
        if self._opened is not None and self._opened.routes.get(worker_id) == route:
            del self._opened.routes[worker_id]
            route.backend.disconnected(worker_id)

    def _receive(self) -> None:
        opened = self._opened
        if opened is None:
            return
        for line, message in opened.switchboard.receive():
            if isinstance(message, Hello):
                self._hello(opened, line, message)
                continue
            if not isinstance(message, _FROM_WORKERS):
                continue  # nothing that a worker sends
            route = opened.routes.get(message.worker_id)
            if route is None:
                continue  # of an earlier gateway's session: the worker will notice, and send Hello
            if route.line != line and not isinstance(message, Heartbeat):  # heartbeats have a connection of their own
                continue  # from a connection that was given up
            route.backend.receive(message)
            if isinstance(message, Left):
                del opened.routes[message.worker_id]

    def _hello(self, opened: _Opened, line: bytes, hello: Hello) -> None:
        backend, worker_id = self.backends.get(hello.model), hello.worker_id
        if backend is None:
            return  # its process refuses to start, too
        if opened.routes.get(worker_id) == (line, backend) and worker_id in backend.coordinator.view:
            return  # sent again before our Welcome came: a connection is one session, and this one has begun
        opened.routes[worker_id] = _Route(line, backend)
        backend.receive(hello)
        if worker_id in backend.coordinator.view:
            facts = {"role": hello.role, "worker_pid": hello.pid, "kv_tokens": hello.kv_tokens}
            _LOG.info("worker joined", extra=facts_of(worker_id) | facts)

    # ---- for operators ----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The pools as `tripool status` shows them."""
        coordinators = {model: backend.coordinator for model, backend in self.backends.items()}
        stages = sum((backend.stages() for backend in self.backends.values()), Counter[str]())
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
            "gateway_epoch": self._epoch,
            "serving": all(backend.alive for backend in self.backends.values()),
            "requests": sum(len(coordinator.ledger) for coordinator in coordinators.values()),
            "stages": dict(stages),
            "dropped_events": sum(coordinator.ledger.num_dropped for coordinator in coordinators.values()),
            "workers": sorted(workers, key=lambda worker: str(worker["worker"])),
        }


def pools_routes(
    pools: Pools,
    cache: PoolClient,
    instances: Instances,
    hosts: Callable[[], list[dict[str, Any]]] = list,
    places: Sequence[object] = (),
) -> APIRouter:
    """`cache`: asked for its members' counters, never for blocks. `hosts`: the machines of this server, if several.
    `places`: where its own workers run, and why."""
    routes = APIRouter()
    asking, placed = asyncio.Lock(), msgspec.to_builtins(places)

    @routes.get("/v1/pools")
    async def show() -> dict[str, Any]:
        """Workers, their load, requests by stage, and the cache pool's members."""
        async with asking:  # it answers within bounds, but one question at a time and not on the event loop
            counters = await asyncio.to_thread(cache.stats)
            ranks = await asyncio.to_thread(instances.describe)
        members = [_member(name, stats) for name, stats in counters.items()]
        return pools.describe() | {"cache": members, "instances": ranks, "hosts": hosts(), "places": placed}

    return routes


def _member(name: str, stats: Stats | None) -> dict[str, Any]:
    if stats is None:
        return {"member": name, "away": True}
    counts = ("committed", "reserved", "leases", "hits", "misses", "evicted", "bad")
    return {
        "member": name,
        "away": False,
        "slots": stats.num_slots,
        **{count: getattr(stats, count) for count in counts},
        "disk": None if stats.disk is None else msgspec.structs.asdict(stats.disk),
    }
