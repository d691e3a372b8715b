"""A backend with a door before it: drives the pure door with a clock, and carries what it decides.

Looks like any other backend to the application. A refused request never reaches the backend behind; one that waits is a
future here and nothing there. Whatever ends a stream, in whatever state, ends its visit at the door. Decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from prometheus_client.core import GaugeMetricFamily, Metric

from tripool.config import DoorConfig
from tripool.core import Request, ServingStats, Stages, TokenEvent
from tripool.errors import AboveRateLimit, ContextOverflow, EngineStopped
from tripool.gateway.answer_limits import answer_tokens, bounded, check_answers, most_tokens
from tripool.gateway.backend import Backend, Facts
from tripool.gateway.metrics import Histogram
from tripool.mailbox import Watcher
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
_MERGED_AHEAD = 64
"""Events of several prompts that wait for their reader."""
_ERRORS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _Visit(Watcher):
    """One request at the door; a stream of several has one for each. Sees its tokens as they are made."""

    def __init__(self, doored: Doored, request: Request, opened: asyncio.Future[None], now_s: float) -> None:
        self._doored = doored
        self.watcher, self.share = Watcher(), 1.0
        """Of whoever reads it, and which part this is of what that reads."""
        self.id = request.id
        self.request = request
        self.opened = opened
        """Done when it is let through, or fails with the refusal."""
        self.arrived_s = now_s
        self.waited_s = 0.0
        self.begun = False
        self.cancelled = False
        """Before it was let through."""
        self.left = False
        self.done = False
        """At the door: nothing is computed for it any more, whoever still reads it."""
        self.told: Facts = {}
        """What the door had to say of it then."""
        self.num_tokens = 0

    @property
    def max_unread(self) -> float:  # type: ignore[override]
        return self.watcher.max_unread * self.share

    def made(self, event: TokenEvent) -> None:
        self._doored.made(self, event)
        self.watcher.made(event)

    def over(self, request_id: str) -> None:
        self._doored.over(self)
        self.watcher.over(request_id)


@dataclass(frozen=True, slots=True)
class _End:
    """Of one of several merged streams."""

    error: Exception | None


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

    def enter(self, tenant: Tenant) -> None:
        """Count a request before anything of it is read. Raises RateLimited."""
        error = self._door.enter(self._tenant_of(tenant.name), self._clock())
        if error is not None:
            raise error

    def read(self, tenant: Tenant, num_bytes: int) -> None:
        """A request's body was read."""
        self._door.rates.read(self._tenant_of(tenant.name), num_bytes, self._clock())

    def check(self, requests: Sequence[Request]) -> None:
        """Raises what can be known of requests before anything is prepared for them."""
        self._check_lengths(requests)
        context_tokens, tenant = self.context_tokens, self._tenant_of(requests[0].promise.tenant)
        check_answers(requests, context_tokens)
        amount = sum(len(request.prompt_ids) + answer_tokens(request, context_tokens) for request in requests)
        error = self._door.rates.refusal(tenant, 0, amount, self._clock())
        if isinstance(error, AboveRateLimit):
            raise error

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        if self._refusing is not None:
            raise EngineStopped(self._refusing)
        self._check_lengths(requests)
        loop, now_s = asyncio.get_running_loop(), self._clock()
        tenant = self._tenant_of(requests[0].promise.tenant)
        tokens_left = self._door.rates.tokens_left(tenant, now_s)
        asked, requests = requests, bounded(requests, self.context_tokens, tokens_left)
        visits = [_Visit(self, request, loop.create_future(), now_s) for request in requests]
        for visit in visits:
            visit.watcher, visit.share = watcher or visit.watcher, 1.0 / len(visits)
        self._visits |= {visit.id: visit for visit in visits}
        try:
            if self._door.idle:
                self._door.room = self._room()
            first, *rest = self._arrivals(requests, asked, tenant)
            self._do(self._door.arrive(first, now_s, rest), loop)
            if visits[0].opened.done():
                visits[0].opened.result()  # refused at once, as a whole
            events = self._one(visits[0]) if len(visits) == 1 else self._merged(visits)
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            for visit in visits:
                self._leave(visit)

    async def _one(self, visit: _Visit) -> AsyncGenerator[TokenEvent, None]:
        """Once it is let through; leaves when it is over."""
        try:
            if not visit.opened.done():
                await visit.opened
                visit.waited_s = self._clock() - visit.arrived_s
            visit.opened.result()
            if visit.cancelled:
                return
            async with aclosing(self._backend.stream(visit.request, watcher=visit)) as events:
                async for event in events:
                    yield event if event.stages is None else _staged(event, visit.waited_s)
        finally:
            self._leave(visit)

    async def _merged(self, visits: Sequence[_Visit]) -> AsyncGenerator[TokenEvent, None]:
        """Several in one: each begins when it is let through, and the first that fails ends all."""
        events: asyncio.Queue[TokenEvent | _End] = asyncio.Queue(_MERGED_AHEAD)

        async def pump(visit: _Visit) -> None:
            error: Exception | None = None
            try:
                async with aclosing(self._one(visit)) as own:
                    async for event in own:
                        await events.put(event)
            except Exception as raised:  # noqa: BLE001 (not swallowed: raised again where the events are read)
                error = raised
            await events.put(_End(error))

        tasks = [asyncio.ensure_future(pump(visit)) for visit in visits]
        try:
            num_open = len(tasks)
            while num_open:
                item = await events.get()
                if not isinstance(item, _End):
                    yield item
                elif item.error is not None:
                    raise item.error
                else:
                    num_open -= 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self, visit: _Visit) -> None:
        if not visit.left:
            visit.left = True
            del self._visits[visit.id]
            self.over(visit)

    def made(self, visit: _Visit, event: TokenEvent) -> None:
        """A token came for it, which may never be read. Its first tells how much was cached."""
        visit.num_tokens += 1
        if visit.num_tokens % _CHARGE_TOKENS == 0:
            self._door.answered(visit.id, _CHARGE_TOKENS, self._clock())
        if not visit.begun:
            visit.begun = True
            uncached_tokens = len(visit.request.prompt_ids) - event.num_cached_tokens
            decisions = self._door.first_token(visit.id, uncached_tokens, self._clock())
            self._do(decisions, visit.opened.get_loop())
            for predicted_s, actual_s in self._door.predictions:
                self._errors.observe(abs(actual_s - predicted_s))
            self._door.predictions.clear()

    def over(self, visit: _Visit) -> None:
        """Nothing more is computed for it: what it holds at the door is free, whoever still reads its answer."""
        if not visit.done:
            visit.done = True
            now_s, uncharged = self._clock(), visit.num_tokens % _CHARGE_TOKENS
            visit.told = self._door.explain(visit.id, now_s)
            self._do(self._door.finished(visit.id, uncharged, now_s), visit.opened.get_loop())

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
            visit.cancelled = True
            visit.opened.set_result(None)  # nothing is left to be let through; its stream ends
            return
        self._backend.cancel(request_id)

    def stats(self) -> ServingStats:
        stats = self._backend.stats()
        waiting = sum(not visit.opened.done() for visit in self._visits.values())
        return replace(stats, waiting=stats.waiting + waiting)

    def explain(self, request_id: str) -> Facts:
        visit = self._visits.get(request_id)
        if visit is None:
            return self._refused.get(request_id) or self._backend.explain(request_id)
        door = visit.told if visit.done else self._door.explain(visit.id, self._clock())
        return {**self._backend.explain(request_id), **door} if visit.opened.done() else door

    # ---- the door ---------------------------------------------------------------------------------------------------

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        """All of them before the first begins: a prompt that cannot be answered fails the request as a whole."""
        longest = max(len(request.prompt_ids) for request in requests)
        if 0 < self.context_tokens <= longest:
            hint = f"at most {self.context_tokens - 1} prompt tokens fit; shorten the prompt or give more KV memory"
            raise ContextOverflow(f"the prompt has {longest} tokens", hint=hint, param="prompt")

    def _arrivals(self, requests: Sequence[Request], asked: Sequence[Request], tenant: Tenant) -> Iterator[Arrival]:
        """`asked`: the same as their client sent them."""
        promise, context_tokens = requests[0].promise, self.context_tokens
        for request, original in zip(requests, asked, strict=True):
            yield Arrival(
                id=request.id,
                prompt_tokens=len(request.prompt_ids),
                answer_tokens=most_tokens(request, context_tokens),
                usual_tokens=answer_tokens(original, context_tokens),
                tenant=tenant,
                choices=request.params.n,
                promise=promise,
            )
            promise = replace(promise, ttft_ms=None)  # the first prompt's first token is the request's

    def _do(self, decisions: list[Decision], loop: asyncio.AbstractEventLoop) -> None:
        for decision in decisions:
            visit = self._visits.get(decision.id)
            if visit is None or visit.opened.done():
                continue
            if isinstance(decision, Admit):
                visit.opened.set_result(None)
            else:
                facts = {"refused by the door": str(decision.error)}
                self._refused[visit.id] = facts
                while len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
                visit.opened.set_exception(decision.error)
        if self._timer is None and not self._door.idle:
            self._timer = loop.call_later(_TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._do(self._door.tick(self._clock(), self._room()), loop)

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


def _staged(event: TokenEvent, waited_s: float) -> TokenEvent:
    """The first event of a choice tells how long it took; the time at the door belongs to it."""
    stages = event.stages or Stages()
    return replace(event, stages=replace(stages, queue_s=stages.queue_s + waited_s))


def _unlimited(name: str) -> Tenant:
    return replace(ANONYMOUS, name=name)
