"""A backend behind admission control: drives the pure `AdmissionController` with a clock and executes its decisions.

It has the interface of any other backend. A refused request never reaches the backend behind it; a waiting one is a
future here and unknown there. However a stream ends, its request is removed from admission. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from prometheus_client.core import GaugeMetricFamily, Metric

from tripool.config import AdmissionConfig
from tripool.core import Request, ServingStats, Stages, TokenEvent
from tripool.errors import AboveRateLimit, ContextOverflow, EngineStopped
from tripool.gateway.backend import Backend, Facts
from tripool.gateway.metrics import Histogram
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Admit, Arrival, Capacity, Decision
from tripool.router.answer_limits import answer_tokens, bounded, check_answers, most_tokens
from tripool.router.fair_queue import MAX_LABELS, fairness, waiting_by_tenant
from tripool.router.rate_limiter import RateLimiter
from tripool.router.service import CHARGE_TOKENS, ERRORS_S
from tripool.tenants import ANONYMOUS, Tenant
from tripool.token_stream import Watcher

_TICK_S = 0.02
_MAX_REFUSED = 256
_MERGED_AHEAD = 64
"""Buffered events of several prompts."""


class _OpenRequest(Watcher):
    """One open request; a stream of several prompts has one for each. Watches its tokens as they are generated."""

    def __init__(
        self, admission: AdmissionBackend, request: Request, opened: asyncio.Future[None], now_s: float
    ) -> None:
        self._admission = admission
        self.watcher, self.share = Watcher(), 1.0
        """The reader's watcher, and this request's share of the reader's buffer."""
        self.id = request.id
        self.request = request
        self.opened = opened
        """Done when it is admitted, or fails with the refusal."""
        self.arrived_s = now_s
        self.waited_s = 0.0
        self.begun = False
        self.cancelled = False
        """Before it was admitted."""
        self.left = False
        self.done = False
        """Generation has ended and admission has released it; the client may still read."""
        self.explained: Facts = {}
        """What admission had to explain of it then."""
        self.num_tokens = 0

    @property
    def max_unread(self) -> float:  # type: ignore[override]
        return self.watcher.max_unread * self.share

    def made(self, event: TokenEvent) -> None:
        self._admission.made(self, event)
        self.watcher.made(event)

    def over(self, request_id: str) -> None:
        self._admission.over(self)
        self.watcher.over(request_id)


@dataclass(frozen=True, slots=True)
class _End:
    """End of one of several merged streams."""

    error: Exception | None


class AdmissionBackend:
    """`room` returns the backend's capacity; `tenant_of` finds a tenant by its name.

    `rate_limiter` is shared by all models of one server: a tenant's limits apply to all of them together. `clock` is
    not the event loop's: uvloop's has a resolution of one millisecond, too coarse for the times of short prompts.
    """

    def __init__(
        self,
        backend: Backend,
        config: AdmissionConfig | None = None,
        *,
        rate_limiter: RateLimiter | None = None,
        room: Callable[[], Capacity] = Capacity,
        tenant_of: Callable[[str], Tenant] | None = None,
        more: Callable[[dict[str, str]], Iterable[Metric]] = lambda labels: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`more`: metrics of the backend, under labels."""
        self._backend = backend
        self._admission = AdmissionController(config or AdmissionConfig(), rate_limiter)
        self._room = room
        self._tenant_of = tenant_of or (lambda name: replace(ANONYMOUS, name=name))
        self._clock, self._more = clock, more
        self._open: dict[str, _OpenRequest] = {}
        """By request id."""
        self._refused: OrderedDict[str, Facts] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._errors = Histogram(ERRORS_S)
        self._refusing: str | None = None

    # ---- Backend ----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._backend.alive and self._refusing is None

    @property
    def context_tokens(self) -> int:
        return self._backend.context_tokens

    @property
    def slots(self) -> int | None:
        """Choices that the backend computes at the same time, if it is known."""
        return self._room().slots

    def enter(self, tenant: Tenant) -> None:
        """Count a request before anything of it is read. Raises RateLimited."""
        error = self._admission.enter(self._tenant_of(tenant.name), self._clock())
        if error is not None:
            raise error

    def read(self, tenant: Tenant, num_bytes: int) -> None:
        """A request's body was read."""
        self._admission.rate_limiter.read(self._tenant_of(tenant.name), num_bytes, self._clock())

    def check(self, requests: Sequence[Request]) -> None:
        """Raises the errors that can be found before anything is prepared for the requests."""
        self._check_lengths(requests)
        context_tokens, tenant = self.context_tokens, self._tenant_of(requests[0].slo.tenant)
        check_answers(requests, context_tokens)
        if requests[0].slo.background:
            return
        amount = sum(len(request.prompt_ids) + answer_tokens(request, context_tokens) for request in requests)
        error = self._admission.rate_limiter.refusal(tenant, 0, amount, self._clock())
        if isinstance(error, AboveRateLimit):
            raise error

    async def stream(self, *requests: Request, watcher: Watcher | None = None) -> AsyncGenerator[TokenEvent, None]:
        if self._refusing is not None:
            raise EngineStopped(self._refusing)
        self._check_lengths(requests)
        if requests[0].slo.background:  # it takes nothing from others, so it neither waits for them nor counts
            async with aclosing(self._backend.stream(*requests, watcher=watcher)) as own:
                async for event in own:
                    yield event
            return
        loop, now_s = asyncio.get_running_loop(), self._clock()
        tenant = self._tenant_of(requests[0].slo.tenant)
        tokens_left = self._admission.rate_limiter.tokens_left(tenant, now_s)
        asked, requests = requests, bounded(requests, self.context_tokens, tokens_left)
        open_requests = [_OpenRequest(self, request, loop.create_future(), now_s) for request in requests]
        for open_request in open_requests:
            open_request.watcher, open_request.share = watcher or open_request.watcher, 1.0 / len(open_requests)
        self._open |= {open_request.id: open_request for open_request in open_requests}
        try:
            if self._admission.idle:
                self._admission.room = self._room()
            first, *rest = self._arrivals(requests, asked, tenant)
            self._do(self._admission.arrive(first, now_s, rest), loop)
            if open_requests[0].opened.done():
                open_requests[0].opened.result()  # refused at once, as a whole
            events = self._one(open_requests[0]) if len(open_requests) == 1 else self._merged(open_requests)
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            for open_request in open_requests:
                self._leave(open_request)

    async def _one(self, open_request: _OpenRequest) -> AsyncGenerator[TokenEvent, None]:
        """Starts once it is admitted; leaves admission when it ends."""
        try:
            if not open_request.opened.done():
                await open_request.opened
                open_request.waited_s = self._clock() - open_request.arrived_s
            open_request.opened.result()
            if open_request.cancelled:
                return
            async with aclosing(self._backend.stream(open_request.request, watcher=open_request)) as events:
                async for event in events:
                    yield event if event.stages is None else _staged(event, open_request.waited_s)
        finally:
            self._leave(open_request)

    async def _merged(self, open_requests: Sequence[_OpenRequest]) -> AsyncGenerator[TokenEvent, None]:
        """Several streams in one: each starts when it is admitted, and the first error ends all."""
        events: asyncio.Queue[TokenEvent | _End] = asyncio.Queue(_MERGED_AHEAD)

        async def pump(open_request: _OpenRequest) -> None:
            error: Exception | None = None
            try:
                async with aclosing(self._one(open_request)) as own:
                    async for event in own:
                        await events.put(event)
            except Exception as raised:  # noqa: BLE001 (not swallowed: raised again where the events are read)
                error = raised
            await events.put(_End(error))

        tasks = [asyncio.ensure_future(pump(open_request)) for open_request in open_requests]
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

    def _leave(self, open_request: _OpenRequest) -> None:
        if not open_request.left:
            open_request.left = True
            del self._open[open_request.id]
            self.over(open_request)

    def made(self, open_request: _OpenRequest, event: TokenEvent) -> None:
        """A token was generated, read or not. The first one reports the cached tokens."""
        open_request.num_tokens += 1
        if open_request.num_tokens % CHARGE_TOKENS == 0:
            self._admission.answered(open_request.id, CHARGE_TOKENS, self._clock())
        if not open_request.begun:
            open_request.begun = True
            uncached_tokens = len(open_request.request.prompt_ids) - event.num_cached_tokens
            decisions = self._admission.first_token(open_request.id, uncached_tokens, self._clock())
            self._do(decisions, open_request.opened.get_loop())
            for predicted_s, actual_s in self._admission.predictions:
                self._errors.observe(abs(actual_s - predicted_s))
            self._admission.predictions.clear()

    def over(self, open_request: _OpenRequest) -> None:
        """Generation has ended: admission releases what the request holds, even if its answer is not read yet."""
        if not open_request.done:
            open_request.done = True
            now_s, uncharged = self._clock(), open_request.num_tokens % CHARGE_TOKENS
            open_request.explained = self._admission.explain(open_request.id, now_s)
            self._do(self._admission.finished(open_request.id, uncharged, now_s), open_request.opened.get_loop())

    @property
    def num_open(self) -> int:
        """Open requests, including those that wait for admission."""
        return len(self._open)

    def refuse(self, why: str) -> None:
        """Accept no new request; open ones go on."""
        self._refusing = self._refusing or why

    def cancel(self, request_id: str) -> None:
        open_request = self._open.get(request_id)
        if open_request is not None and not open_request.opened.done():
            open_request.cancelled = True
            open_request.opened.set_result(None)  # wakes its stream, which ends
            return
        self._backend.cancel(request_id)

    def stats(self) -> ServingStats:
        stats = self._backend.stats()
        waiting = sum(not open_request.opened.done() for open_request in self._open.values())
        return replace(stats, waiting=stats.waiting + waiting)

    def explain(self, request_id: str) -> Facts:
        open_request = self._open.get(request_id)
        if open_request is None:
            return self._refused.get(request_id) or self._backend.explain(request_id)
        admission = (
            open_request.explained if open_request.done else self._admission.explain(open_request.id, self._clock())
        )
        return {**self._backend.explain(request_id), **admission} if open_request.opened.done() else admission

    # ---- admission --------------------------------------------------------------------------------------------------

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        """Checks all prompts before the first begins: one that is too long fails the whole request."""
        longest = max(len(request.prompt_ids) for request in requests)
        if 0 < self.context_tokens <= longest:
            hint = f"at most {self.context_tokens - 1} prompt tokens fit; shorten the prompt or give more KV memory"
            raise ContextOverflow.of(self.context_tokens, f"the prompt has {longest} tokens", hint=hint)

    def _arrivals(self, requests: Sequence[Request], asked: Sequence[Request], tenant: Tenant) -> Iterator[Arrival]:
        """`asked`: the same requests as sent by the client, before lengths were bounded."""
        slo, context_tokens = requests[0].slo, self.context_tokens
        for request, original in zip(requests, asked, strict=True):
            yield Arrival(
                id=request.id,
                prompt_tokens=len(request.prompt_ids),
                answer_tokens=most_tokens(request, context_tokens),
                usual_tokens=answer_tokens(original, context_tokens),
                tenant=tenant,
                choices=request.params.n,
                slo=slo,
            )
            slo = replace(slo, ttft_ms=None)  # only the first prompt's first token counts for TTFT

    def _do(self, decisions: list[Decision], loop: asyncio.AbstractEventLoop) -> None:
        for decision in decisions:
            open_request = self._open.get(decision.id)
            if open_request is None or open_request.opened.done():
                continue
            if isinstance(decision, Admit):
                open_request.opened.set_result(None)
            else:
                facts = {"refused by admission control": str(decision.error)}
                self._refused[open_request.id] = facts
                while len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
                open_request.opened.set_exception(decision.error)
        if self._timer is None and not self._admission.idle:
            self._timer = loop.call_later(_TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._do(self._admission.tick(self._clock(), self._room()), loop)

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def families(self, labels: dict[str, str]) -> Iterator[Metric]:
        """Prometheus metrics of admission."""
        waiting = GaugeMetricFamily("tripool_admission_waiting", "Waiting requests.", labels=[*labels, "tenant"])
        for name, number in waiting_by_tenant(self._admission.queue, MAX_LABELS).items():
            waiting.add_metric([*labels.values(), name], number)
        yield waiting
        index = GaugeMetricFamily("tripool_fairness_index", "Jain's index of the last minute.", labels=list(labels))
        index.add_metric(list(labels.values()), fairness(self._admission.queue, self._clock()))
        yield index
        about = "Error of predicted times to first token."
        yield self._errors.family("tripool_ttft_prediction_error_seconds", about, labels)
        yield from self._more(labels)


def _staged(event: TokenEvent, waited_s: float) -> TokenEvent:
    """Adds the time spent waiting for admission to the stages of a choice's first event."""
    stages = event.stages or Stages()
    return replace(event, stages=replace(stages, queue_s=stages.queue_s + waited_s))
