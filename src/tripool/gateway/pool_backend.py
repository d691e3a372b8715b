"""One model's pools of workers as a Backend: drives its coordinator with clients' requests and workers' messages.

Runs on the gateway's event loop. What the coordinator decides goes to workers, clients or the supervisor; this module
decides nothing itself.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tripool.config import RouterConfig
from tripool.core import Request, ServingStats, Stages, TokenEvent
from tripool.errors import EngineStopped
from tripool.gateway.backend import Fact, Facts
from tripool.gateway.record import MAX_KEPT
from tripool.messages import AnyMessage, Hello, Role, WorkerId
from tripool.router import Coordinator
from tripool.router.admission_types import Capacity
from tripool.router.outputs import Emit, Fail, Lost, Output, Send
from tripool.router.placement_trace import PlacementTrace
from tripool.token_stream import TokenStream, Watcher

if TYPE_CHECKING:
    from tripool.gateway.pools import Pools

_LOG = logging.getLogger("tripool.gateway")


class PoolBackend:
    def __init__(self, config: RouterConfig, *, epoch: int, connections: Pools) -> None:
        self.coordinator = Coordinator(config, gateway_epoch=epoch)
        self._connections = connections
        self.context_tokens = 0
        """The smallest of all workers that have joined; 0 before the first."""
        self._streams: dict[str, TokenStream] = {}
        self._traces: OrderedDict[str, PlacementTrace] = OrderedDict()
        """Of the last requests, those that are over included."""
        self._ended: str | None = None

    # ---- what the gateway needs of a backend ------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._ended is None

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        """Events of one or several requests until all are over. Leaving early, in any way, cancels the rest."""
        if self._ended is not None:
            raise EngineStopped(self._ended)
        self._connections.start()
        now_s = self._now_s
        stream = TokenStream(requests, watcher, now_s)
        try:
            for request in requests:
                outputs = self.coordinator.submit(request, now_s)
                self._streams[request.id] = stream
                self._remember(request.id)
                self._carry_out(outputs)
            while (event := await stream.read()) is not None:
                if event.request_id not in stream.choices_left:
                    self._streams.pop(event.request_id, None)
                yield event
        finally:
            for request_id in tuple(stream.choices_left):
                self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.cancelled(request_id)
            self._cancel(request_id)

    def room(self) -> Capacity:
        """For admission control: prefill workers, and choices that the decode workers compute at the same time."""
        view = self.coordinator.view
        slots = sum(m.hello.max_running for m in view if m.hello.role == "decode" and m.ready)
        return Capacity(max(1, view.num_ready("prefill")), slots or None)

    def stats(self) -> ServingStats:
        members, stages = list(self.coordinator.view), self.stages()
        running = stages["prefilling"] + stages["transferring"] + stages["decoding"]
        now_s = self._connections.now_s or 0.0
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

    def stages(self) -> Counter[str]:
        """How many choices are in each stage."""
        return Counter(choice.stage.value for entry in self.coordinator.ledger for choice in entry.choices)

    def instances(self) -> set[str]:
        """Those whose workers are ranks."""
        return {member.hello.instance for member in self.coordinator.view if member.hello.instance}

    def _missing(self) -> str:
        roles: tuple[Role, ...] = ("prefill", "decode")
        return next((f"there is no {role} worker" for role in roles if not self.coordinator.view.num_ready(role)), "")

    def explain(self, request_id: str) -> Facts:
        trace = self._traces.get(request_id)
        if trace is None:
            return {}
        facts: dict[str, Fact] = {"mode": "split"}
        facts.update(trace.facts())
        entry = self.coordinator.ledger.get(request_id)
        if entry is None:
            return facts
        for choice in entry.choices:
            placement = entry.placements.get(choice.attempt)
            where = f" at {placement.worker_id.name}" if placement is not None else ""
            facts[f"choice {choice.index}"] = f"{choice.stage.value}{where}"
        return facts

    def _remember(self, request_id: str) -> None:
        entry = self.coordinator.ledger.get(request_id)
        self._traces[request_id] = entry.trace if entry is not None else PlacementTrace(self._now_s)  # refused already
        while len(self._traces) > max(MAX_KEPT, 2 * len(self._streams)):
            oldest = next(iter(self._traces))
            if oldest in self._streams:  # it is still open, however many have come and gone since
                self._traces.move_to_end(oldest)
            else:
                del self._traces[oldest]

    # ---- what the connections bring ---------------------------------------------------------------------------------

    def receive(self, message: AnyMessage) -> None:
        """From one of this model's workers, or from the supervisor."""
        if isinstance(message, Hello):
            self.context_tokens = min(self.context_tokens or message.context_tokens, message.context_tokens)
        self._carry_out(self.coordinator.receive(message, self._now_s))

    def disconnected(self, worker_id: WorkerId) -> None:
        self._carry_out(self.coordinator.disconnected(worker_id, self._now_s))

    def tick(self) -> None:
        self._carry_out(self.coordinator.tick(self._now_s))

    def close(self, why: str) -> None:
        """End every stream with an error."""
        self._ended = self._ended or why
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            # The end overtakes what was not read yet: a slow reader must not delay it.
            stream.fail(EngineStopped(self._ended), at_once=True)

    @property
    def _now_s(self) -> float:
        now_s = self._connections.now_s
        assert now_s is not None
        return now_s

    def _cancel(self, request_id: str) -> None:
        now_s = self._connections.now_s
        if now_s is not None:
            self._carry_out(self.coordinator.cancel(request_id, now_s))

    def _carry_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Emit):
                self._emit(output.event)
            elif isinstance(output, Send):
                self._connections.send(output.worker_id, output.message)
            elif isinstance(output, Fail):
                stream = self._streams.pop(output.request_id, None)
                if output.request_id in self._traces:
                    self._traces[output.request_id].failed(str(output.error))
                if stream is not None:
                    stream.fail(output.error)
            elif isinstance(output, Lost):
                level = logging.WARNING if output.num_requests else logging.INFO
                _LOG.log(level, "worker lost", extra=facts_of(output.worker_id) | {"placed_again": output.num_requests})
            else:
                _LOG.warning("worker suspected", extra=facts_of(output.message.worker_id))
                self._connections.suspect(output.message)
        if outputs:
            self._connections.sent()

    def _emit(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if event.index == 0:
            # The worker reports how long it computed; all the time before was spent waiting, here or there.
            stages = event.stages or Stages()
            waited_s = self._now_s - stream.added_s - stages.lookup_s - stages.prefill_s
            event = replace(event, stages=replace(stages, queue_s=max(0.0, waited_s)))
        if not stream.put(event):
            self._connections.soon(self._give_up, stream)  # this may be amid what another step of it decided

    def _give_up(self, stream: TokenStream) -> None:
        """Compute nothing more for a client that does not read; its stream raises the reason when it is read."""
        for request_id in tuple(stream.choices_left):
            if self._streams.pop(request_id, None) is not None:
                self._cancel(request_id)


def facts_of(worker_id: WorkerId) -> dict[str, Any]:
    """For the log."""
    return {"worker": worker_id.name, "epoch": worker_id.epoch}
