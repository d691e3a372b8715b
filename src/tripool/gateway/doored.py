"""A backend with a door before it: drives the pure door with a clock, and carries what it decides.

Looks like any other backend to the application. A refused request never reaches the backend behind; one that waits is a
future here and nothing there. Whatever ends a stream, in whatever state, ends its visit at the door. Decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace

from prometheus_client.core import GaugeMetricFamily, Metric

from tripool.config import DoorConfig
from tripool.core import Request, ServingStats, TokenEvent
from tripool.errors import EngineStopped
from tripool.gateway.backend import Backend, Facts
from tripool.gateway.metrics import Histogram
from tripool.router.door import Door
from tripool.router.fairness import fairness
from tripool.router.guests import Admit, Arrival, Decision, Room
from tripool.router.rates import Rates
from tripool.tenants import ANONYMOUS, Tenant

_TICK_S = 0.02
_CHARGE_TOKENS = 32
"""An answer's tokens are charged to its tenant's rate so many at a time, and the rest at its end."""
_MAX_LABELS = 20
"""Tenants that metrics name; the others are counted together."""
_MAX_REFUSED = 256
_ERRORS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _Visit:
    """One stream's requests at the door, decided about together."""

    def __init__(self, requests: tuple[Request, ...], opened: asyncio.Future[None], now_s: float) -> None:
        self.id = requests[0].id
        self.requests = {request.id: request for request in requests}
        self.opened = opened
        """Done when it is let through, or fails with the refusal."""
        self.arrived_s = now_s
        self.waited_s = 0.0
        self.unbegun = {request.id for request in requests}
        self.uncached_tokens = 0
        self.num_tokens = 0


class Doored:
    """`room` says how much the backend works on at a time; `tenant_of` finds a tenant by its name.

    `rates` is shared by the doors of one server: a tenant's rates hold over all its models. `clock` is not the event
    loop's: uvloop's counts whole milliseconds, in which short prompts take no time and a pace cannot be learned.
    """

    def __init__(
        self,
        backend: Backend,
        config: DoorConfig | None = None,
        *,
        rates: Rates | None = None,
        room: Callable[[], Room] = Room,
        tenant_of: Callable[[str], Tenant] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._door = Door(config or DoorConfig(), rates)
        self._room = room
        self._tenant_of = tenant_of or _unlimited
        self._clock = clock
        self._visits: dict[str, _Visit] = {}
        """By the id of each of their requests."""
        self._refused: OrderedDict[str, Facts] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._errors = Histogram(_ERRORS_S)
        self._refusing: str | None = None

    # ---- what the gateway needs of a backend ------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._backend.alive and self._refusing is None

    @property
    def context_tokens(self) -> int:
        return self._backend.context_tokens

    async def stream(self, *requests: Request) -> AsyncGenerator[TokenEvent, None]:
        if self._refusing is not None:
            raise EngineStopped(self._refusing)
        loop = asyncio.get_running_loop()
        visit = _Visit(requests, loop.create_future(), self._clock())
        self._visits |= dict.fromkeys(visit.requests, visit)
        try:
            if self._door.idle:
                self._door.room = self._room()
            self._do(self._door.arrive(self._arrival(visit), self._clock()), loop)
            if not visit.opened.done():
                await visit.opened
                visit.waited_s = self._clock() - visit.arrived_s
            visit.opened.result()
            left = tuple(visit.requests.values())
            if left:
                async with aclosing(self._backend.stream(*left)) as events:
                    async for event in events:
                        visit.num_tokens += 1
                        if visit.num_tokens % _CHARGE_TOKENS == 0:
                            self._door.answered(visit.id, _CHARGE_TOKENS, self._clock())
                        yield self._noted(visit, event) if visit.unbegun else event
        finally:
            for request in requests:
                self._visits.pop(request.id, None)
            uncharged = visit.num_tokens % _CHARGE_TOKENS
            self._do(self._door.finished(visit.id, uncharged, self._clock()), loop)

    @property
    def num_open(self) -> int:
        """Requests that are inside, those included that wait to be let through."""
        return len(self._visits)

    def refuse(self, why: str) -> None:
        """Take no new request; those that are inside go on."""
        self._refusing = self._refusing or why

    def cancel(self, request_id: str) -> None:
        visit = self._visits.get(request_id)
        if visit is not None and not visit.opened.done():
            visit.requests.pop(request_id, None)
            visit.unbegun.discard(request_id)
            if not visit.requests:
                visit.opened.set_result(None)  # nothing is left to be let through; the stream ends
            return
        self._backend.cancel(request_id)
        if visit is not None and request_id in visit.unbegun:
            visit.unbegun.remove(request_id)
            if visit.num_tokens:
                self._maybe_begun(visit)

    def stats(self) -> ServingStats:
        stats = self._backend.stats()
        waiting = sum(not visit.opened.done() for visit in self._visits.values())
        return replace(stats, waiting=stats.waiting + waiting)

    def explain(self, request_id: str) -> Facts:
        visit = self._visits.get(request_id)
        if visit is None:
            return self._refused.get(request_id) or self._backend.explain(request_id)
        door = self._door.explain(visit.id, self._clock())
        return {**self._backend.explain(request_id), **door} if visit.opened.done() else door

    # ---- the door ---------------------------------------------------------------------------------------------------

    def _arrival(self, visit: _Visit) -> Arrival:
        requests = visit.requests.values()
        promise = next(iter(requests)).promise
        return Arrival(
            id=visit.id,
            prompt_tokens=sum(len(request.prompt_ids) for request in requests),
            tenant=self._tenant_of(promise.tenant),
            choices=sum(request.params.n for request in requests),
            promise=promise,
        )

    def _do(self, decisions: list[Decision], loop: asyncio.AbstractEventLoop) -> None:
        for decision in decisions:
            visit = self._visits.get(decision.id)
            if visit is None or visit.opened.done():
                continue
            if isinstance(decision, Admit):
                visit.opened.set_result(None)
            else:
                facts = {"refused by the door": str(decision.error)}
                for request_id in visit.requests:
                    self._refused[request_id] = facts
                while len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
                visit.opened.set_exception(decision.error)
        if self._timer is None and not self._door.idle:
            self._timer = loop.call_later(_TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._do(self._door.tick(self._clock(), self._room()), loop)

    def _noted(self, visit: _Visit, event: TokenEvent) -> TokenEvent:
        """An event of a visit whose requests have not all begun; a request's first tells how much was cached."""
        if event.request_id in visit.unbegun:
            visit.unbegun.remove(event.request_id)
            visit.uncached_tokens += len(visit.requests[event.request_id].prompt_ids) - event.num_cached_tokens
            self._maybe_begun(visit)
        if event.stages is not None:
            stages = replace(event.stages, queue_s=event.stages.queue_s + visit.waited_s)
            event = replace(event, stages=stages)
        return event

    def _maybe_begun(self, visit: _Visit) -> None:
        """Once all requests of a visit have a token."""
        if visit.unbegun:
            return
        loop = asyncio.get_running_loop()
        self._do(self._door.first_token(visit.id, visit.uncached_tokens, self._clock()), loop)
        for predicted_s, actual_s in self._door.predictions:
            self._errors.observe(abs(actual_s - predicted_s))
        self._door.predictions.clear()

    # ---- for people -------------------------------------------------------------------------------------------------

    def families(self, labels: dict[str, str]) -> Iterator[Metric]:
        """What the door knows, for Prometheus."""
        waiting = GaugeMetricFamily("tripool_door_waiting", "Requests at the door.", labels=[*labels, "tenant"])
        ranked = sorted(((a.total_waiting, a.name) for a in self._door.shares if a.num_waiting), reverse=True)
        shown = ranked[:_MAX_LABELS]
        for number, name in shown:
            waiting.add_metric([*labels.values(), name], number)
        rest = sum(number for number, _ in ranked[_MAX_LABELS:])
        if rest or not shown:
            waiting.add_metric([*labels.values(), "(others)"], rest)
        yield waiting
        index = GaugeMetricFamily("tripool_fairness_index", "Jain's, over the last minute.", labels=list(labels))
        index.add_metric(list(labels.values()), self._fairness())
        yield index
        about = "How far predicted times to first tokens were off."
        yield self._errors.family("tripool_ttft_prediction_error_seconds", about, labels)

    def _fairness(self) -> float:
        return fairness(self._door.shares, self._clock())


def _unlimited(name: str) -> Tenant:
    return replace(ANONYMOUS, name=name)
