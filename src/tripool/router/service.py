"""One model as its gateways see it: admission, placement and the ledger behind one another. Pure.

Requests of gateways, messages of workers and the time come in; messages to workers, tokens and failures for gateways
come out. Which gateway a request belongs to is not known here.

`submit`, `resume`, `cancel`, `receive`, `disconnected` and `tick` take the time and return outputs, in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tripool.config import AdmissionConfig, RouterConfig
from tripool.core import Request, ServingStats, Stages
from tripool.errors import ContextOverflow, InvalidRequest
from tripool.messages import AnyMessage, Hello, Role, WorkerId
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Admit, Arrival, Capacity, Decision
from tripool.router.answer_limits import answer_tokens, bounded, most_tokens
from tripool.router.coordinator import Coordinator
from tripool.router.held import Held
from tripool.router.outputs import Emit, Fail, Output
from tripool.router.placement_trace import PlacementTrace
from tripool.router.rate_limiter import RateLimiter
from tripool.router.replica import Replica, Trouble
from tripool.tenants import Tenant

CHARGE_TOKENS = 32
"""An answer's tokens are charged to its tenant's rate this many at a time, and the rest at its end."""
MAX_KEPT = 1000
"""Requests that are over of which the placement is still known."""

ERRORS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Told = dict[str, str | int | float | bool | list[dict[str, str | float]] | None]


@dataclass(slots=True, eq=False)
class _Open:
    """One open request."""

    request: Request
    tenant: Tenant
    arrived_s: float
    choices_left: int
    held: Held | None = None
    """What its client had when another coordinator was lost."""
    admitted: bool = False
    begun: bool = False
    num_tokens: int = 0
    """Generated since it was opened here."""
    told: _Told = field(default_factory=lambda: _Told())


@dataclass(slots=True, eq=False)
class _Told:
    """What `explain` knows, beyond the end of the request."""

    trace: PlacementTrace | None = None
    admission: Told = field(default_factory=dict)


class PredictionErrors:
    """Errors of predicted times to first token, counted by bucket (`ERRORS_S`)."""

    def __init__(self) -> None:
        self.counts = [0] * (len(ERRORS_S) + 1)
        self.sum = 0.0

    def count(self, error_s: float) -> None:
        self.counts[bisect_left(ERRORS_S, error_s)] += 1
        self.sum += error_s


class ModelService:
    """`rate_limiter` is shared by all models of one server: a tenant's limits hold over all of them together."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        epoch: int,
        rate_limiter: RateLimiter | None = None,
        admission: AdmissionConfig | None = None,
    ) -> None:
        self.coordinator = Coordinator(config, epoch=epoch)
        self.admission = AdmissionController(admission or AdmissionConfig(), rate_limiter)
        self.context_tokens = 0
        """The smallest of all workers that have joined; 0 before the first."""
        self.errors = PredictionErrors()
        self._open: dict[str, _Open] = {}
        self._troubles: dict[str, Trouble] = {}
        """Of requests that another coordinator had."""
        self._told: OrderedDict[str, _Told] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    # ---- gateways ---------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], tenant: Tenant, now_s: float) -> list[Output]:
        """The prompts of one HTTP request. All are refused together, or none at once."""
        out: list[Output] = []
        twice = [request.id for request in requests if request.id in self._open]
        if twice:
            error = InvalidRequest(f"request id '{twice[0]}' is in use", param="request_id")
            return [Fail(request.id, error) for request in requests if request.id not in twice]
        longest = max(len(request.prompt_ids) for request in requests)
        if 0 < self.context_tokens <= longest:
            hint = f"at most {self.context_tokens - 1} prompt tokens fit; shorten the prompt"
            overflow = ContextOverflow.of(self.context_tokens, f"the prompt has {longest} tokens", hint=hint)
            return [Fail(request.id, overflow) for request in requests]
        if requests[0].slo.background:  # it takes nothing from others, so it neither waits for them nor counts
            for request in requests:
                self._add(request, tenant, now_s)
                self._admit(request.id, now_s, out)
            return out
        tokens_left = self.admission.rate_limiter.tokens_left(tenant, now_s)
        shortened = bounded(requests, self.context_tokens, tokens_left)
        if self.admission.idle:
            self.admission.room = self.room()
        for request in shortened:
            self._add(request, tenant, now_s)
        first, *rest = self._arrivals(shortened, requests, tenant)
        decisions = self.admission.arrive(first, now_s, rest)
        if decisions and not isinstance(decisions[0], Admit) and decisions[0].id == first.id:
            for request in shortened:
                self._fail(Fail(request.id, decisions[0].error), now_s, out)
        else:
            self._decide(decisions, now_s, out)
        return out

    def resume(self, request: Request, tenant: Tenant, held: Held, now_s: float) -> list[Output]:
        """Take up a request that another coordinator had, with what its client has of it. It is not refused."""
        out: list[Output] = []
        if request.id in self._open:
            return out
        asked, longest = request, max(len(choice.tokens) for choice in held.choices)
        tokens_left = self.admission.rate_limiter.tokens_left(tenant, now_s)
        (request,) = bounded([asked], self.context_tokens, tokens_left)
        if request is not asked:  # as at its arrival, but never less than its client has
            most = max(request.params.max_tokens or 0, longest + 1)
            request = replace(asked, params=replace(asked.params, max_tokens=most))
        self._add(request, tenant, now_s, held)
        if request.slo.background:
            self._admit(request.id, now_s, out)
            return out
        if self.admission.idle:
            self.admission.room = self.room()
        (arrival,) = self._arrivals([request], [asked], tenant)
        self._decide(self.admission.resume(arrival, held.num_tokens, now_s), now_s, out)
        return out

    def cancel(self, request_id: str, now_s: float) -> list[Output]:
        """Its client has gone or needs no more. Unknown and finished requests are ignored."""
        out: list[Output] = []
        one = self._open.get(request_id)
        if one is not None:
            if one.admitted:
                out += self.coordinator.cancel(request_id, now_s)
            self._over(one, now_s, out)
        return self._carry(out, now_s)

    # ---- workers, supervisor, clock ---------------------------------------------------------------------------------

    def receive(self, message: AnyMessage, now_s: float) -> list[Output]:
        if isinstance(message, Hello):
            self.context_tokens = min(self.context_tokens or message.context_tokens, message.context_tokens)
        return self._carry(self.coordinator.receive(message, now_s), now_s)

    def disconnected(self, worker_id: WorkerId, now_s: float) -> list[Output]:
        return self._carry(self.coordinator.disconnected(worker_id, now_s), now_s)

    def tick(self, now_s: float) -> list[Output]:
        out = self._carry(self.coordinator.tick(now_s), now_s)
        if not self.admission.idle:
            self._decide(self.admission.tick(now_s, self.room()), now_s, out)
        return out

    def _carry(self, outputs: Iterable[Output], now_s: float) -> list[Output]:
        """What the coordinator decided, and what admission makes of it."""
        carried: list[Output] = []
        for output in outputs:
            if isinstance(output, Emit):
                self._emit(output, now_s, carried)
            elif isinstance(output, Fail):
                self._fail(output, now_s, carried)
            else:
                carried.append(output)
        return carried

    def _emit(self, output: Emit, now_s: float, out: list[Output]) -> None:
        event = output.event
        one = self._open[event.request_id]
        one.num_tokens += 1
        if event.index == 0:
            # The worker reports how long it computed; all the time before was spent waiting, here or there.
            stages = event.stages or Stages()
            waited_s = now_s - one.arrived_s - stages.lookup_s - stages.prefill_s
            output = Emit(replace(event, stages=replace(stages, queue_s=max(0.0, waited_s))))
        out.append(output)
        if one.num_tokens % CHARGE_TOKENS == 0:
            self.admission.answered(event.request_id, CHARGE_TOKENS, now_s)
        if not one.begun:
            one.begun = True
            uncached_tokens = len(one.request.prompt_ids) - event.num_cached_tokens
            self._decide(self.admission.first_token(event.request_id, uncached_tokens, now_s), now_s, out)
            for predicted_s, actual_s in self.admission.predictions:
                self.errors.count(abs(actual_s - predicted_s))
            self.admission.predictions.clear()
        if event.finish_reason is not None:
            one.choices_left -= 1
            if not one.choices_left:
                self._over(one, now_s, out)

    def _fail(self, output: Fail, now_s: float, out: list[Output]) -> None:
        out.append(output)
        one = self._open.get(output.request_id)
        if one is not None:
            if one.told.trace is not None:
                one.told.trace.failed(str(output.error))
            else:
                one.told.admission = {"refused by admission control": str(output.error)}
            self._over(one, now_s, out)

    def _decide(self, decisions: Sequence[Decision], now_s: float, out: list[Output]) -> None:
        waiting = deque(decisions)
        while waiting:
            decision = waiting.popleft()
            if isinstance(decision, Admit):
                self._admit(decision.id, now_s, out)
            else:
                self._fail(Fail(decision.id, decision.error), now_s, out)

    def _admit(self, request_id: str, now_s: float, out: list[Output]) -> None:
        one = self._open[request_id]
        one.admitted = True
        outputs = self.coordinator.submit(one.request, now_s, one.held)
        if request_id in self._troubles:
            self.coordinator.restore(self._troubles.pop(request_id))
        entry = self.coordinator.ledger.get(request_id)
        one.told.trace = entry.trace if entry is not None else PlacementTrace(now_s)  # it has failed already
        out += self._carry(outputs, now_s)

    # ---- standby ----------------------------------------------------------------------------------------------------

    def restore(self, replica: Replica, model: str) -> None:
        """Before the first request: what the log of an earlier coordinator said. Rate limits are not this model's."""
        self.admission.queue.restore(replica.given_by(model))
        self._troubles = {trouble.request_id: trouble for trouble in replica.state.troubles}

    # ---- open requests ----------------------------------------------------------------------------------------------

    def _add(self, request: Request, tenant: Tenant, now_s: float, held: Held | None = None) -> _Open:
        done = sum(choice.done for choice in held.choices) if held is not None else 0
        one = self._open[request.id] = _Open(request, tenant, now_s, request.params.n - done, held)
        self._told[request.id] = one.told
        while len(self._told) > max(MAX_KEPT, 2 * len(self._open)):
            oldest = next(iter(self._told))
            if oldest in self._open:  # it is still open, however many have come and gone since
                self._told.move_to_end(oldest)
            else:
                del self._told[oldest]
        return one

    def _over(self, one: _Open, now_s: float, out: list[Output]) -> None:
        """Nothing more is computed for it."""
        request_id = one.request.id
        if self._open.pop(request_id, None) is None or one.request.slo.background:
            return
        if not one.told.admission:
            one.told.admission = dict(self.admission.explain(request_id, now_s))
        uncharged = one.num_tokens % CHARGE_TOKENS
        self._decide(self.admission.finished(request_id, uncharged, now_s), now_s, out)

    def _arrivals(self, requests: Sequence[Request], asked: Sequence[Request], tenant: Tenant) -> list[Arrival]:
        """`asked`: the same requests as sent by the client, before lengths were bounded."""
        slo, context_tokens, arrivals = requests[0].slo, self.context_tokens, []
        for request, original in zip(requests, asked, strict=True):
            arrival = Arrival(
                id=request.id,
                prompt_tokens=len(request.prompt_ids),
                answer_tokens=most_tokens(request, context_tokens),
                usual_tokens=answer_tokens(original, context_tokens),
                tenant=tenant,
                choices=request.params.n,
                slo=slo,
            )
            arrivals.append(arrival)
            slo = replace(slo, ttft_ms=None)  # only the first prompt's first token counts for TTFT
        return arrivals

    # ---- facts ------------------------------------------------------------------------------------------------------

    def room(self) -> Capacity:
        """For admission control: prefill workers, and choices that the decode workers compute at the same time."""
        view = self.coordinator.view
        slots = sum(m.hello.max_running for m in view if m.hello.role == "decode" and m.ready)
        return Capacity(max(1, view.num_ready("prefill")), slots or None)

    def stats(self, now_s: float) -> ServingStats:
        members, stages = list(self.coordinator.view), self.stages()
        running = stages["prefilling"] + stages["transferring"] + stages["decoding"]
        working = [member for member in members if member.num_placed]
        kv_tokens = sum(member.hello.kv_tokens for member in members if member.hello.role == "decode")
        used_tokens = sum(member.placed_tokens for member in members if member.hello.role == "decode")
        waiting = stages["queued"] + stages["resting"] + stages["packed"]
        return ServingStats(
            running=running,
            waiting=waiting + sum(not one.admitted for one in self._open.values()),
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

    def explain(self, request_id: str, now_s: float) -> Told:
        told, one = self._told.get(request_id), self._open.get(request_id)
        if told is None:
            return {}
        if one is not None and not one.request.slo.background:
            told.admission = dict(self.admission.explain(request_id, now_s))
        facts: Told = {}
        if told.trace is not None:
            facts["mode"] = "split"
            facts.update(told.trace.facts())
        entry = self.coordinator.ledger.get(request_id)
        for choice in entry.choices if entry is not None else ():
            placement = entry.placements.get(choice.attempt) if entry is not None else None
            where = f" at {placement.worker_id.name}" if placement is not None else ""
            facts[f"choice {choice.index}"] = f"{choice.stage.value}{where}"
        return {**facts, **told.admission}

    def check(self, now_s: float) -> None:
        """The invariants, in full."""
        self.coordinator.check()
        self.admission.check(now_s)
        admitted = {request_id for request_id, one in self._open.items() if one.admitted}
        assert admitted == {entry.request.id for entry in self.coordinator.ledger}, "a request is in one place only"
        for request_id, one in self._open.items():
            assert one.choices_left > 0, f"{request_id}: over, and open"
