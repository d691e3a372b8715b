"""The pools behind the gateway: drives the pure coordinator with the clock, workers' messages and clients' wishes.

Lives on the gateway's event loop and does nothing but carry: what a worker sends goes to the coordinator, what that
decides goes to workers, clients or the supervisor. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import zmq
from fastapi import APIRouter

from tripool.cache.client import PoolClient
from tripool.cache.wire import Told
from tripool.config import RouterConfig
from tripool.core import Request, ServingStats, Stages, TokenEvent
from tripool.errors import EngineStopped, TripoolError
from tripool.fabric.channel import Switchboard
from tripool.gateway.backend import Fact, Facts
from tripool.gateway.record import MAX_KEPT
from tripool.mailbox import Mailbox, Watcher
from tripool.messages import (
    Heartbeat,
    Hello,
    Left,
    Reaped,
    Refused,
    Role,
    Suspect,
    Tokens,
    TransferDone,
    TransferReady,
    WorkerId,
)
from tripool.router import Coordinator
from tripool.router.admission_types import Capacity
from tripool.router.outputs import Emit, Fail, Lost, Output, Send
from tripool.router.placement_trace import PlacementTrace

_LOG = logging.getLogger("tripool.gateway")
_TICK_S = 0.05

_FROM_WORKERS = (Heartbeat, Tokens, TransferReady, TransferDone, Refused, Left)


class _Stream(Mailbox):
    """One consumer."""

    def __init__(self, requests: tuple[Request, ...], watcher: Watcher | None, now_s: float) -> None:
        super().__init__(requests, watcher)
        self.added_s = now_s


@dataclass(slots=True)
class _Opened:
    """What exists only between `start` and `close`."""

    loop: asyncio.AbstractEventLoop
    context: zmq.Context[zmq.Socket[bytes]]
    switchboard: Switchboard
    timer: asyncio.TimerHandle | None = None
    routes: dict[WorkerId, bytes] = field(default_factory=dict)
    """The line that each life said Hello on last."""


class Pools:
    """A gateway's Backend over workers in other processes. `start` it on the event loop that serves HTTP.

    `suspect` is told which life the supervisor shall end.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        addresses: Iterable[str],
        epoch: int,
        suspect: Callable[[Suspect], object],
    ) -> None:
        self._coordinator = Coordinator(config, gateway_epoch=epoch)
        self._addresses = tuple(addresses)
        self._suspect = suspect
        self._epoch = epoch
        self._context_tokens = 0
        self._opened: _Opened | None = None
        self._streams: dict[str, _Stream] = {}
        self._traces: OrderedDict[str, PlacementTrace] = OrderedDict()
        """Of the last requests; those that are over are asked about too."""
        self._ended: str | None = None

    # ---- what the gateway needs of a backend ------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._ended is None

    @property
    def context_tokens(self) -> int:
        """What every worker that was seen can take; 0 before the first."""
        return self._context_tokens

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        """Events of one or several requests until all are over. Leaving early, in any way, cancels the rest."""
        if self._ended is not None:
            raise EngineStopped(self._ended)
        self.start()
        now_s = self._now_s
        stream = _Stream(requests, watcher, now_s)
        left = stream.choices_left
        try:
            for request in requests:
                outputs = self._coordinator.submit(request, now_s)
                self._streams[request.id] = stream
                self._remember(request.id)
                self._carry_out(outputs)
            while left:
                if stream.waiting:
                    # Neither get() nor a fast client's send() would give way: a backlog must not starve other tasks.
                    await asyncio.sleep(0)
                item = await stream.get()
                if isinstance(item, TripoolError):
                    raise item
                if item is None or item.request_id not in left:
                    continue  # the event was on its way when its request was cancelled
                if item.finish_reason is not None:
                    left[item.request_id] -= 1
                    if left[item.request_id] == 0:
                        del left[item.request_id]
                        self._streams.pop(item.request_id, None)
                yield item
        finally:
            for request_id in tuple(left):
                self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.cancelled(request_id)
            if self._opened is not None:
                self._carry_out(self._coordinator.cancel(request_id, self._now_s))

    def room(self) -> Capacity:
        """For the door: prefill workers, and choices that the decode workers answer at the same time."""
        view = self._coordinator.view
        slots = sum(m.hello.max_running for m in view if m.hello.role == "decode" and m.ready)
        return Capacity(max(1, view.num_ready("prefill")), slots or None)

    def stats(self) -> ServingStats:
        members, ledger = list(self._coordinator.view), self._coordinator.ledger
        stages = Counter(choice.stage.value for entry in ledger for choice in entry.choices)
        running = stages["prefilling"] + stages["transferring"] + stages["decoding"]
        now_s = self._now_s if self._opened is not None else 0.0
        working = [member for member in members if member.num_placed]
        kv_tokens = sum(member.hello.kv_tokens for member in members if member.hello.role == "decode")
        used_tokens = sum(member.placed_tokens for member in members if member.hello.role == "decode")
        return ServingStats(
            running=running,
            waiting=stages["queued"] + stages["resting"] + stages["packed"],
            kv_usage=min(1.0, used_tokens / kv_tokens) if kv_tokens else 0.0,
            num_steps=sum(member.num_steps for member in members),
            stalled_s=min((now_s - member.progress_s for member in working), default=0.0),
            missing=self._missing(),
        )

    def _missing(self) -> str:
        roles: tuple[Role, ...] = ("prefill", "decode")
        return next((f"there is no {role} worker" for role in roles if not self._coordinator.view.num_ready(role)), "")

    def explain(self, request_id: str) -> Facts:
        trace = self._traces.get(request_id)
        if trace is None:
            return {}
        facts: dict[str, Fact] = {"mode": "split"}
        facts.update(trace.facts())
        entry = self._coordinator.ledger.get(request_id)
        if entry is None:
            return facts
        for choice in entry.choices:
            placement = entry.placements.get(choice.attempt)
            where = f" at {placement.worker_id.name}" if placement is not None else ""
            facts[f"choice {choice.index}"] = f"{choice.stage.value}{where}"
        return facts

    def _remember(self, request_id: str) -> None:
        entry = self._coordinator.ledger.get(request_id)
        self._traces[request_id] = entry.trace if entry is not None else PlacementTrace(self._now_s)  # refused already
        while len(self._traces) > max(MAX_KEPT, 2 * len(self._streams)):
            oldest = next(iter(self._traces))
            if oldest in self._streams:  # it is still to be told, however many have come and gone since
                self._traces.move_to_end(oldest)
            else:
                del self._traces[oldest]

    # ---- its own life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take lines from workers. On the running event loop; a second time changes nothing."""
        if self._opened is not None:
            return
        loop, context = asyncio.get_running_loop(), zmq.Context[zmq.Socket[bytes]]()
        self._opened = _Opened(loop, context, Switchboard(context, *self._addresses))
        loop.add_reader(self._opened.switchboard.fileno, self._receive)
        self._tick()

    def close(self, why: str = "the gateway is shut down") -> None:
        """End every stream with an error and let go of all workers."""
        self._ended = self._ended or why
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            # The end overtakes what was not read yet: a slow reader must not delay it.
            stream.fail(EngineStopped(self._ended), at_once=True)
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.loop.remove_reader(opened.switchboard.fileno)
            if opened.timer is not None:
                opened.timer.cancel()
            opened.switchboard.close()
            opened.context.term()

    def reaped(self, message: Reaped) -> None:
        """The supervisor says that a life is over for certain."""
        if self._opened is not None:
            self._opened.routes.pop(message.worker_id, None)
            self._carry_out(self._coordinator.receive(message, self._now_s))

    @property
    def _now_s(self) -> float:
        assert self._opened is not None
        return self._opened.loop.time()

    def _tick(self) -> None:
        if self._opened is not None:
            self._carry_out(self._coordinator.tick(self._now_s))
            self._opened.timer = self._opened.loop.call_later(_TICK_S, self._tick)

    def _receive(self) -> None:
        opened = self._opened
        if opened is None:
            return
        for line, message in opened.switchboard.receive():
            if isinstance(message, Hello):
                if opened.routes.get(message.worker_id) == line and message.worker_id in self._coordinator.view:
                    continue  # said again before our Welcome came: a line is one session, and this one has begun
                opened.routes[message.worker_id] = line
                self._context_tokens = min(self._context_tokens or message.context_tokens, message.context_tokens)
            elif not isinstance(message, _FROM_WORKERS):
                continue  # nothing that a worker may say
            elif isinstance(message, Heartbeat):
                if message.worker_id not in opened.routes:
                    continue  # of a gateway before us; it will notice, and say Hello
            elif opened.routes.get(message.worker_id) != line:
                continue  # from a line that was given up
            self._carry_out(self._coordinator.receive(message, self._now_s))
            if isinstance(message, Left):
                del opened.routes[message.worker_id]
            elif isinstance(message, Hello) and message.worker_id in self._coordinator.view:
                facts = {"role": message.role, "worker_pid": message.pid, "kv_tokens": message.kv_tokens}
                _LOG.info("worker joined", extra=_of(message.worker_id) | facts)

    def _carry_out(self, outputs: list[Output]) -> None:
        opened = self._opened
        assert opened is not None
        for output in outputs:
            if isinstance(output, Emit):
                self._emit(output.event)
            elif isinstance(output, Send):
                route = opened.routes.get(output.worker_id)
                if route is not None:
                    opened.switchboard.send(route, output.message)
            elif isinstance(output, Fail):
                stream = self._streams.pop(output.request_id, None)
                if output.request_id in self._traces:
                    self._traces[output.request_id].failed(str(output.error))
                if stream is not None:
                    stream.choices_left.pop(output.request_id, None)
                    stream.fail(output.error)
            elif isinstance(output, Lost):
                level = logging.WARNING if output.num_requests else logging.INFO
                _LOG.log(level, "worker lost", extra=_of(output.worker_id) | {"placed_again": output.num_requests})
            else:
                _LOG.warning("worker suspected", extra=_of(output.message.worker_id))
                self._suspect(output.message)
        if outputs and opened.switchboard.waiting:  # sending may have used up the sign that something is there
            opened.loop.call_soon(self._receive)

    def _emit(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if event.index == 0:
            # The worker tells how long it computed; all the time before was spent waiting, here or there.
            stages = event.stages or Stages()
            waited_s = self._now_s - stream.added_s - stages.lookup_s - stages.prefill_s
            event = replace(event, stages=replace(stages, queue_s=max(0.0, waited_s)))
        if not stream.put(event) and self._opened is not None:
            self._opened.loop.call_soon(self._give_up, stream)  # this may be amid what another step of it decided

    def _give_up(self, stream: _Stream) -> None:
        """Compute nothing more for whoever does not read it; its stream says why when it is read."""
        for request_id in tuple(stream.choices_left):
            if self._streams.pop(request_id, None) is not None and self._opened is not None:
                self._carry_out(self._coordinator.cancel(request_id, self._now_s))

    # ---- for people -------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The pools as `tripool status` shows them."""
        coordinator = self._coordinator
        stages = Counter(choice.stage.value for entry in coordinator.ledger for choice in entry.choices)
        workers = [
            {
                "worker": member.worker_id.name,
                "epoch": member.worker_id.epoch,
                "pid": member.hello.pid,
                "role": member.hello.role,
                "instance": member.hello.instance_name,
                "draining": member.draining,
                "steps": member.num_steps,
                "placed": member.num_placed,
                "placed_tokens": member.placed_tokens,
                "waiting_tokens": member.reported_tokens,
                "running": member.running,
                "blocks_held": member.blocks_held,
                "kv_tokens": member.hello.kv_tokens,
            }
            for member in coordinator.view
        ]
        return {
            "join": self._addresses[0],
            "gateway_epoch": self._epoch,
            "serving": self.alive,
            "requests": len(coordinator.ledger),
            "stages": dict(stages),
            "dropped_events": coordinator.ledger.num_dropped,
            "workers": sorted(workers, key=lambda worker: str(worker["worker"])),
        }


def _of(worker_id: WorkerId) -> dict[str, Any]:
    return {"worker": worker_id.name, "epoch": worker_id.epoch}


def pools_routes(pools: Pools, cache: PoolClient) -> APIRouter:
    """`cache`: asked for its members' counters, never for blocks."""
    routes = APIRouter()
    asking = asyncio.Lock()

    @routes.get("/v1/pools")
    async def show() -> dict[str, Any]:
        """Workers, their load, requests by stage, and the cache pool's members."""
        async with asking:  # it answers within bounds, but one question at a time and not on the event loop
            told = await asyncio.to_thread(cache.stats)
        members = [_member(name, stats) for name, stats in told.items()]
        return pools.describe() | {"cache": members}

    return routes


def _member(name: str, stats: Told | None) -> dict[str, Any]:
    if stats is None:
        return {"member": name, "away": True}
    return {
        "member": name,
        "away": False,
        "slots": stats.num_slots,
        "committed": stats.committed,
        "reserved": stats.reserved,
        "leases": stats.leases,
        "hits": stats.hits,
        "misses": stats.misses,
        "evicted": stats.evicted,
        "bad": stats.bad,
        "disk": None if stats.disk is None else msgspec.structs.asdict(stats.disk),
    }
