"""Admission control: predicts time to first token and admits, queues or refuses a request. Pure; time is an argument.

| event | effect |
|---|---|
| `enter` | a request came and is not read yet: refused, or counted against its tenant's rate limit |
| `arrive` | refused (rate limit, queue length, an SLO that cannot be kept), admitted, or queued |
| `first_token` | its cost is known: the tenant's account, the predictor and the window are corrected |
| `finished`, `cancelled` | what it held is free |
| `tick` | requests that waited too long are refused; called every few tens of milliseconds |

Each returns decisions. A request of several prompts is admitted one prompt at a time. Only a small window of prompts is
in the backend without a first token, so that the order is decided here; with one tenant and priority it is wide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from tripool.config import AdmissionConfig
from tripool.errors import Overloaded, TripoolError, TtftUnreachable
from tripool.router.admission_types import (
    Admit,
    Arrival,
    Capacity,
    Decision,
    PendingRequest,
    Refuse,
    Stage,
    check_account,
)
from tripool.router.fair_queue import Account, FairQueue
from tripool.router.rate_limiter import RateLimiter
from tripool.router.ttft_predictor import TtftPredictor
from tripool.tenants import Tenant

_FIRST_WINDOW_TOKENS = 512
"""Window while the backend's throughput is unknown."""
_LIGHT = 0.5
"""A tenant is light if it asks for less than this fraction of what another asks for: it need not wait for that one."""
_QUEUE_GREED = 4.0
"""A named tenant's queue may hold this many times the free room: a flooding tenant leaves a fifth to the others."""


class AdmissionController:
    def __init__(
        self, config: AdmissionConfig, rate_limiter: RateLimiter | None = None, room: Capacity | None = None
    ) -> None:
        self._config = config
        self.rate_limiter = rate_limiter or RateLimiter()
        self.room = room or Capacity()
        self.queue = FairQueue()
        self.predictor = TtftPredictor()
        self._pending: dict[str, PendingRequest] = {}
        self._deadlines: list[tuple[float, str, float]] = []
        """(when, id, its arrival) of waiting requests; may hold stale entries."""
        self._later: dict[str, deque[Arrival]] = {}
        """Prompts that have not arrived yet, by id: those behind another prompt of the same request."""
        self._later_tokens = 0
        self._prefilling: dict[str, PendingRequest] = {}
        """Admitted, without a first token."""
        self._prefilling_tokens = 0.0
        self._slots_held = 0
        self._last_kind: tuple[str, int] | None = None
        self._compete_until_s = float("-inf")
        self.predictions: list[tuple[float, float]] = []
        """Predicted and actual seconds to first tokens; the reader clears it."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def idle(self) -> bool:
        """No request is waiting or admitted."""
        return not self._pending

    # ---- facts ------------------------------------------------------------------------------------------------------

    def enter(self, tenant: Tenant, now_s: float) -> TripoolError | None:
        """Before anything of a request is read. The charge is never refunded."""
        refusal = self.rate_limiter.refusal(tenant, 1, 0, now_s)
        if refusal is None:
            self.rate_limiter.take(tenant, 1, 0, now_s)
        return refusal

    def arrive(self, arrival: Arrival, now_s: float, rest: Sequence[Arrival] = ()) -> list[Decision]:
        """`rest`: further prompts of the same request. All are refused together or none."""
        assert arrival.id not in self._pending and arrival.id not in self._later, "duplicate id"
        tenant = arrival.tenant
        self._notice((tenant.name, arrival.slo.priority), now_s)
        amount, asked = arrival.tokens, arrival.asked_tokens
        for one in rest:
            assert one.id not in self._pending and one.id not in self._later, "duplicate id"
            amount, asked = amount + one.tokens, asked + one.asked_tokens
        pending = self._new_pending(arrival, deque(rest), now_s)
        error = self.rate_limiter.refusal(tenant, 0, amount, now_s) or self._full(pending) or self._too_slow(pending)
        if error is not None:
            return [Refuse(arrival.id, error)]
        self.rate_limiter.take(tenant, 0, amount, now_s)
        pending.account.open_tokens += asked
        for one in rest:
            self._later[one.id] = pending.rest
            self._later_tokens += one.prompt_tokens
        self._queue_up(pending)
        decisions = self._settle(now_s)
        if pending.stage is Stage.WAITING:
            pending.why = self._why(pending, now_s)
        return decisions

    def resume(self, arrival: Arrival, num_tokens: int, now_s: float) -> list[Decision]:
        """An earlier coordinator had admitted it, and its client has so many tokens. It is charged already: nothing
        refuses it, but it waits for its turn."""
        assert arrival.id not in self._pending and arrival.id not in self._later, "duplicate id"
        account = self.queue.account(arrival.tenant)
        cost, reserved = account.cost_of(arrival.prompt_tokens) + num_tokens, max(0, arrival.answer_tokens - num_tokens)
        pending = PendingRequest(arrival, account, cost, reserved, deque(), now_s, 0.0, None, settled=num_tokens > 0)
        account.open_tokens += arrival.asked_tokens
        self._pending[arrival.id] = pending
        self.queue.push(arrival.id, account, arrival.slo.priority, cost)
        heappush(self._deadlines, (inf, arrival.id, now_s))
        return self._settle(now_s)

    def _new_pending(self, arrival: Arrival, rest: deque[Arrival], now_s: float) -> PendingRequest:
        account = self.queue.account(arrival.tenant)
        cost = account.cost_of(arrival.prompt_tokens)
        account.count(now_s, asked=cost)
        ahead = self.queue.ahead(account, arrival.slo.priority)
        light = self._is_light(account, arrival.asked_tokens + sum(one.asked_tokens for one in rest))
        predicted_s = self._predict_s(ahead, cost, now_s, light=light)
        return PendingRequest(arrival, account, cost, arrival.answer_tokens, rest, now_s, ahead[1], predicted_s)

    def _queue_up(self, pending: PendingRequest) -> None:
        arrival = pending.arrival
        self._pending[arrival.id] = pending
        self.queue.push(arrival.id, pending.account, arrival.slo.priority, pending.cost)
        heappush(self._deadlines, (self._latest_start_s(pending), arrival.id, pending.arrived_s))

    def _next_prompt(self, pending: PendingRequest, now_s: float) -> None:
        """The next prompt of the same request arrives now."""
        if pending.rest:
            arrival, rest = pending.rest.popleft(), pending.rest
            del self._later[arrival.id]
            self._later_tokens -= arrival.prompt_tokens
            pending.rest = deque()
            self._queue_up(self._new_pending(arrival, rest, now_s))

    def first_token(self, request_id: str, uncached_tokens: int, now_s: float) -> list[Decision]:
        """Of any of its choices; only the first call counts."""
        pending = self._pending.get(request_id)
        if pending is None or pending.stage is not Stage.PREFILLING:
            return []
        pending.stage = Stage.ANSWERING
        self._begun(pending)
        account = pending.account
        self.queue.correct(account, uncached_tokens - pending.cost)
        if not pending.settled:
            self.rate_limiter.take(pending.arrival.tenant, 0, uncached_tokens - pending.arrival.prompt_tokens, now_s)
        account.learn_hits(pending.arrival.prompt_tokens, uncached_tokens)
        account.count(now_s, served=uncached_tokens)
        self.predictor.first_token(uncached_tokens, now_s - pending.admitted_s, now_s, unhindered=pending.unhindered)
        if pending.predicted_s is not None:
            self.predictor.trust.learn(pending.predicted_s, now_s - pending.arrived_s)
            self.predictions.append((pending.predicted_s, now_s - pending.arrived_s))
        return self._settle(now_s)

    def answered(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """More tokens were generated for it: they count against its tenant's rate."""
        pending = self._pending.get(request_id)
        if pending is not None and num_tokens:
            reserved = min(pending.reserved_tokens, num_tokens)
            pending.reserved_tokens -= reserved
            self.rate_limiter.take(pending.arrival.tenant, 0, num_tokens - reserved, now_s)

    def finished(self, request_id: str, num_tokens: int, now_s: float) -> list[Decision]:
        """`num_tokens`: those not yet reported by `answered`."""
        self.answered(request_id, num_tokens, now_s)
        return self.cancelled(request_id, now_s)

    def cancelled(self, request_id: str, now_s: float) -> list[Decision]:
        """It has ended, in whatever way. Unknown ids are ignored."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            self._drop(request_id, pending, now_s)
        elif request_id in self._later:
            self._drop_later(request_id, now_s)
        return self._settle(now_s)

    def tick(self, now_s: float, room: Capacity | None = None) -> list[Decision]:
        self.room = room or self.room
        decisions: list[Decision] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id, arrived_s = heappop(self._deadlines)
            pending = self._pending.get(request_id)
            if pending is not None and pending.stage is Stage.WAITING and pending.arrived_s == arrived_s:
                del self._pending[request_id]
                self._drop(request_id, pending, now_s)
                decisions.append(Refuse(request_id, self._waited_too_long(pending, now_s)))
        return decisions + self._settle(now_s)

    # ---- admitting --------------------------------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[Decision]:
        decisions: list[Decision] = []
        queue = self.queue
        while waiting := len(queue):
            request_id = queue.pop(self._is_allowed(now_s))
            if request_id is None:
                break
            pending = self._pending[request_id]
            pending.account.num_prefilling += 1
            pending.unhindered = len(self._prefilling) < self.room.lanes
            pending.stage, pending.admitted_s = Stage.PREFILLING, now_s
            self._prefilling[request_id] = pending
            self._prefilling_tokens += pending.cost
            self._slots_held += pending.arrival.choices
            pending.account.slots_held += pending.arrival.choices
            decisions.append(Admit(request_id))
            self._next_prompt(pending, now_s)
        if not self._prefilling and not waiting:
            queue.rest()
        queue.credit_tokens = (self.predictor.tokens_per_s() or 0.0) * self._config.credit_s
        self.predictor.full(len(self._prefilling) >= self.room.lanes or waiting > 0, now_s)
        if len(self._deadlines) > 64 + 4 * waiting:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in queue]
            heapify(self._deadlines)
        return decisions

    def _has_room(self, now_s: float) -> bool:
        return len(self._prefilling) < self.room.lanes or self._prefilling_tokens < self.window_tokens(now_s)

    def window_tokens(self, now_s: float) -> float:
        if not self._competes(now_s):
            return self._config.wide_tokens * self.room.lanes
        tokens_per_s = self.predictor.tokens_per_s()
        if tokens_per_s is None:
            return min(_FIRST_WINDOW_TOKENS, self._config.wide_tokens) * self.room.lanes
        return tokens_per_s * self._config.window_s

    def _is_allowed(self, now_s: float) -> Callable[[Account], bool]:
        """Which tenants' next request may be admitted, by the window and by the decode slots.

        A tenant that asks for much less than another admitted one may have a prompt in the backend even if the window
        is full: the backend computes it between the chunks of longer prompts. The last slots are kept for tenants below
        their share, present or not. Without keys all requests are of one tenant, and the backend shares its slots.
        """
        slots, room, weight = self.room.slots, self._has_room(now_s), self.queue.present_weight
        plenty = slots is None or not self._competes(now_s) or slots - self._slots_held > slots * self._config.reserve
        slots_each = (slots or 0) / (weight + 1.0)

        def allowed(account: Account) -> bool:
            if not account.name:
                return room
            fair = plenty or account.slots_held < max(1.0, slots_each * account.weight)
            return fair and (room or self._is_light(account))

        return allowed

    def _is_light(self, account: Account, more_tokens: int = 0) -> bool:
        """Whether it asks for much less than another admitted tenant, and has no prompt without a first token."""
        if not account.name or account.num_prefilling:
            return False
        asks = account.asks + more_tokens / account.weight
        return any(asks < _LIGHT * pending.account.asks for pending in self._prefilling.values())

    def _notice(self, kind: tuple[str, int], now_s: float) -> None:
        if self._last_kind not in (None, kind):
            self._compete_until_s = now_s + self._config.compete_s
        self._last_kind = kind

    def _competes(self, now_s: float) -> bool:
        return now_s < self._compete_until_s

    # ---- refusing ---------------------------------------------------------------------------------------------------

    def _predict_s(self, ahead: tuple[float, float], cost: float, now_s: float, *, light: bool = False) -> float | None:
        """`light`: it is admitted at once, and is next after the prompts under way."""
        lanes, requests, tokens = self.room.lanes, len(self._prefilling) + ahead[0], self._prefilling_tokens + ahead[1]
        if light and self._prefilling:
            requests, tokens = lanes, self._prefilling_tokens * min(1.0, lanes / len(self._prefilling))
        requests, tokens = (requests, tokens) if requests >= lanes else (0.0, 0.0)
        return self.predictor.predict_s(requests, tokens, cost, now_s)

    def _full(self, pending: PendingRequest) -> TripoolError | None:
        there = self.queue.waiting_tokens + self._prefilling_tokens
        free, cost = self._config.queue_tokens - there, pending.cost
        if pending.rest:
            # Prompts behind an earlier one of the same request delay no other request, but take memory.
            cost += sum(one.prompt_tokens for one in pending.rest)
            free -= self._later_tokens
            there += self._later_tokens
        if pending.arrival.tenant.name:
            own = sum(pending.account.waiting_tokens.values())
            free = min(free, _QUEUE_GREED * max(0.0, free) * max(1.0, pending.account.weight) - own)
        if not there or cost <= free:
            return None
        wait_s = self.predictor.queue.seconds_for(1, cost - free) or 1.0
        return Overloaded(f"{there:.0f} tokens are already waiting", retry_after_s=wait_s)

    def _too_slow(self, pending: PendingRequest) -> TripoolError | None:
        """An idle backend admits anything: it may be faster than remembered."""
        predicted_s, ttft_ms = pending.predicted_s, pending.arrival.slo.ttft_ms
        if predicted_s is None or (not self._prefilling and not len(self.queue)):
            return None
        if ttft_ms is None:
            # Nothing was promised: it is refused if it probably waits for nothing, not if it possibly does.
            wait_s = predicted_s - self._config.max_wait_s
            message = f"the first token would take about {predicted_s:.0f} s"
            return Overloaded(message, retry_after_s=wait_s) if wait_s > 0 else None
        safe_s = self.predictor.safe_s(predicted_s)
        wait_s = safe_s - ttft_ms / 1e3
        message = f"the first token would take up to {safe_s * 1e3:.0f} ms, and the limit is {ttft_ms:g} ms"
        return TtftUnreachable(message, retry_after_s=wait_s) if wait_s > 0 else None

    def _latest_start_s(self, pending: PendingRequest) -> float:
        """The last moment at which prefill can begin in time."""
        ttft_ms = pending.arrival.slo.ttft_ms
        if ttft_ms is None:
            return pending.arrived_s + self._config.max_wait_s
        return pending.arrived_s + max(0.0, ttft_ms / 1e3 - self.predictor.own_s(pending.cost))

    def _waited_too_long(self, pending: PendingRequest, now_s: float) -> TripoolError:
        waited = f"waited {now_s - pending.arrived_s:.2f} s without being admitted"
        ahead = self.queue.ahead(pending.account, pending.arrival.slo.priority)
        wait_s = self._predict_s(ahead, pending.cost, now_s) or 1.0
        kind = Overloaded if pending.arrival.slo.ttft_ms is None else TtftUnreachable
        return kind(waited, retry_after_s=wait_s)

    # ---- releasing --------------------------------------------------------------------------------------------------

    def _drop(self, request_id: str, pending: PendingRequest, now_s: float) -> None:
        self.rate_limiter.take(pending.arrival.tenant, 0, -pending.reserved_tokens, now_s)
        pending.account.open_tokens -= pending.arrival.asked_tokens
        if pending.stage is Stage.WAITING:
            self.queue.remove(request_id)
            if not pending.settled:
                self.rate_limiter.take(pending.arrival.tenant, 0, -pending.arrival.prompt_tokens, now_s)
            self._next_prompt(pending, now_s)
            return
        if pending.stage is Stage.PREFILLING:
            self._begun(pending)
        self._slots_held -= pending.arrival.choices
        pending.account.slots_held -= pending.arrival.choices
        self.queue.left(pending.account)

    def _drop_later(self, request_id: str, now_s: float) -> None:
        rest = self._later.pop(request_id)
        arrival = next(one for one in rest if one.id == request_id)
        rest.remove(arrival)
        self._later_tokens -= arrival.prompt_tokens
        self.rate_limiter.take(arrival.tenant, 0, -arrival.tokens, now_s)
        self.queue.account(arrival.tenant).open_tokens -= arrival.asked_tokens

    def _begun(self, pending: PendingRequest) -> None:
        pending.account.num_prefilling -= 1
        del self._prefilling[pending.arrival.id]
        self._prefilling_tokens = self._prefilling_tokens - pending.cost if self._prefilling else 0.0

    # ---- explaining -------------------------------------------------------------------------------------------------

    def _why(self, pending: PendingRequest, now_s: float) -> str:
        slots, account = self.room.slots, pending.account
        if slots is not None and not self._is_allowed(now_s)(account):
            return f"its tenant had {account.slots_held} of {slots} decode slots; the rest is reserved for others"
        window = self.window_tokens(now_s)
        why = f"{self._prefilling_tokens:.0f} admitted tokens had no first token yet (limit {window:.0f}), "
        return why + f"and {pending.ahead_tokens:.0f} tokens were queued before it"

    def explain(self, request_id: str, now_s: float) -> dict[str, str | int | float | bool | None]:
        pending = self._pending.get(request_id)
        if request_id in self._later:
            return {"waited for admission": "waits behind earlier prompts of the same request"}
        return {} if pending is None else pending.explain(now_s)

    def check(self, now_s: float) -> None:
        """The invariants, in full."""
        self.queue.check()
        self.rate_limiter.check(now_s)
        by_stage = {stage: [g for g in self._pending.values() if g.stage is stage] for stage in Stage}
        waiting, prefilling = by_stage[Stage.WAITING], by_stage[Stage.PREFILLING]
        assert all((i in self.queue) == (g.stage is Stage.WAITING) for i, g in self._pending.items())
        assert len(self.queue) == len(waiting), "a waiting request is unknown"
        assert len(self._prefilling) == len(prefilling), "admitted requests are miscounted"
        assert abs(self._prefilling_tokens - sum(g.cost for g in prefilling)) <= 1e-3, "admitted tokens are miscounted"
        held = prefilling + by_stage[Stage.ANSWERING]
        assert self._slots_held == sum(g.arrival.choices for g in held), "slots are miscounted"
        for account in self.queue:
            check_account(account, [g for g in self._pending.values() if g.account is account])
        later = {one.id: one for pending in waiting for one in pending.rest}
        assert self._later.keys() == later.keys(), "a later prompt is lost"
        assert self._later_tokens == sum(one.prompt_tokens for one in later.values())
        watched = {(i, arrived_s) for _, i, arrived_s in self._deadlines}
        assert all((g.arrival.id, g.arrived_s) in watched for g in waiting), "a request waits without a deadline"
        assert held or not waiting, "requests wait although the backend is idle"
