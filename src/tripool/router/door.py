"""The door before a backend: who is refused, who waits, who goes next. Pure; the clock is an argument.

| fact | what follows |
|---|---|
| `arrive` | refused at once (rate, queue, a promise that cannot be kept), let through, or kept waiting |
| `first_token` | its work is known now: its tenant's account, the pace and the window are corrected |
| `finished`, `cancelled` | whatever it held is free |
| `tick` | whoever has waited too long is refused; call it every few tens of milliseconds |

Each returns what is to be done. Only a small window of prompts is inside the backend without a first token: enough to
keep it busy, so little that the order is decided here. While all requests are alike (one tenant, one priority) there is
no order to decide, and the window is wide. Knows nothing of workers, blocks or text; the same object stands before an
engine of this process, before pools, and in the simulation.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from tripool.config import DoorConfig
from tripool.errors import Overloaded, RateLimited, TripoolError, TtftUnreachable
from tripool.router.fair import Account, Shares
from tripool.router.guests import Admit, Arrival, Decision, Guest, Refuse, Room, Stage
from tripool.router.pace import Pace
from tripool.router.rates import Rates

_FIRST_WINDOW_TOKENS = 512
"""Before the backend's pace is known."""
_QUEUE_GREED = 4.0
"""A named tenant's queue may be so many times what is free: one that floods leaves a fifth to the others."""


class Door:
    def __init__(self, config: DoorConfig, rates: Rates | None = None, room: Room | None = None) -> None:
        self._config = config
        self.rates = rates or Rates()
        self.room = room or Room()
        self.shares = Shares()
        self.pace = Pace()
        self._guests: dict[str, Guest] = {}
        self._deadlines: list[tuple[float, str, float]] = []
        """(when, id, its arrival): of those who wait, and of some who do not any more."""
        self._inside_tokens = 0.0
        self._num_inside = 0
        self._slots_held = 0
        self._last_kind: tuple[str, int] | None = None
        self._compete_until_s = float("-inf")
        self.predictions: list[tuple[float, float]] = []
        """Predicted and actual seconds to first tokens since someone took them away."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._guests

    @property
    def num_waiting(self) -> int:
        return len(self.shares)

    @property
    def idle(self) -> bool:
        """Nobody waits and nobody is inside."""
        return not self._guests

    # ---- facts ------------------------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival, now_s: float) -> list[Decision]:
        assert arrival.id not in self._guests, f"{arrival.id} is at the door already"
        tenant, promise = arrival.tenant, arrival.promise
        account = self.shares.account(tenant)
        cost = account.cost_of(arrival.prompt_tokens)
        account.count(now_s, asked=cost)
        self._notice((tenant.name, promise.priority), now_s)
        wait_s, limit = self.rates.wait_s(tenant, cost, now_s)
        if wait_s > 0:
            per_minute = tenant.limits.requests_per_minute if limit == "requests" else tenant.limits.tokens_per_minute
            message = f"'{tenant.name}' may use {per_minute:g} {limit} per minute"
            return [Refuse(arrival.id, RateLimited(message, hint=_again(wait_s), retry_after_s=wait_s))]
        ahead = self.shares.ahead(account, promise.priority)
        guest = Guest(arrival, account, cost, now_s, ahead[1], self._predict_s(ahead, cost, now_s))
        error = self._full(guest) or self._too_slow(guest)
        if error is not None:
            return [Refuse(arrival.id, error)]
        self.rates.take(tenant, 1, cost, now_s)
        self._guests[arrival.id] = guest
        self.shares.push(arrival.id, account, promise.priority, cost)
        decisions = self._settle(now_s)
        if guest.stage is Stage.WAITING:
            guest.why = self._why(guest, now_s)
            heappush(self._deadlines, (self._latest_start_s(guest), arrival.id, now_s))
        return decisions

    def first_token(self, request_id: str, uncached_tokens: int, now_s: float) -> list[Decision]:
        """Of any of its choices; a second one changes nothing."""
        guest = self._guests.get(request_id)
        if guest is None or guest.stage is not Stage.INSIDE:
            return []
        guest.stage = Stage.ANSWERING
        self._begun(guest)
        account, more = guest.account, uncached_tokens - guest.cost
        self.shares.correct(account, more)
        self.rates.take(guest.arrival.tenant, 0, more, now_s)
        account.learn_hits(guest.arrival.prompt_tokens, uncached_tokens)
        account.count(now_s, served=uncached_tokens)
        inside_s = now_s - guest.admitted_s
        self.pace.first_token(uncached_tokens, inside_s, now_s, unhindered=guest.unhindered)
        if guest.predicted_s is not None:
            self.pace.trust.learn(guest.predicted_s, now_s - guest.arrived_s)
            self.predictions.append((guest.predicted_s, now_s - guest.arrived_s))
        return self._settle(now_s)

    def answered(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """So many tokens more have been made for it: they count against its tenant's rate."""
        guest = self._guests.get(request_id)
        if guest is not None and num_tokens:
            self.rates.take(guest.arrival.tenant, 0, num_tokens, now_s)

    def finished(self, request_id: str, num_tokens: int, now_s: float) -> list[Decision]:
        """`num_tokens`: those that `answered` was not told of."""
        self.answered(request_id, num_tokens, now_s)
        return self.cancelled(request_id, now_s)

    def cancelled(self, request_id: str, now_s: float) -> list[Decision]:
        """It is over, in whatever way. Unknown ones are fine."""
        guest = self._guests.pop(request_id, None)
        if guest is not None:
            self._drop(request_id, guest, now_s)
        return self._settle(now_s)

    def tick(self, now_s: float, room: Room | None = None) -> list[Decision]:
        self.room = room or self.room
        decisions: list[Decision] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id, arrived_s = heappop(self._deadlines)
            guest = self._guests.get(request_id)
            if guest is not None and guest.stage is Stage.WAITING and guest.arrived_s == arrived_s:
                del self._guests[request_id]
                self._drop(request_id, guest, now_s)
                decisions.append(Refuse(request_id, self._waited_too_long(guest, now_s)))
        return decisions + self._settle(now_s)

    # ---- letting through --------------------------------------------------------------------------------------------

    def _settle(self, now_s: float) -> list[Decision]:
        decisions: list[Decision] = []
        shares = self.shares
        while (waiting := len(shares)) and self._has_room(now_s):
            request_id = shares.pop(self._is_allowed(now_s))
            if request_id is None:
                break
            guest = self._guests[request_id]
            guest.unhindered = self._num_inside < self.room.lanes
            guest.stage, guest.admitted_s = Stage.INSIDE, now_s
            self._num_inside += 1
            self._inside_tokens += guest.cost
            self._slots_held += guest.arrival.choices
            guest.account.slots_held += guest.arrival.choices
            decisions.append(Admit(request_id))
        if not self._num_inside and not waiting:
            shares.rest()
        shares.credit_tokens = (self.pace.tokens_per_s() or 0.0) * self._config.credit_s
        self.pace.full(self._num_inside >= self.room.lanes or waiting > 0, now_s)
        if len(self._deadlines) > 64 + 4 * waiting:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in shares]
            heapify(self._deadlines)
        return decisions

    def _has_room(self, now_s: float) -> bool:
        slots = self.room.slots
        if self._competes(now_s) and slots is not None and 0 < self._slots_held >= slots:
            return False
        return self._num_inside < self.room.lanes or self._inside_tokens < self.window_tokens(now_s)

    def window_tokens(self, now_s: float) -> float:
        if not self._competes(now_s):
            return self._config.wide_tokens * self.room.lanes
        pace = self.pace.tokens_per_s()
        if pace is None:  # nothing is known yet
            return min(_FIRST_WINDOW_TOKENS, self._config.wide_tokens) * self.room.lanes
        return pace * self._config.window_s

    def _is_allowed(self, now_s: float) -> Callable[[Account], bool]:
        """The last slots are kept for tenants that have less than their share of them, present or still to come."""
        slots = self.room.slots
        if slots is None or not self._competes(now_s) or slots - self._slots_held > slots * self._config.reserve:
            return lambda account: True
        per_weight = slots / (self.shares.present_weight + 1.0)
        return lambda account: account.slots_held < max(1.0, per_weight * account.weight)

    def _notice(self, kind: tuple[str, int], now_s: float) -> None:
        if self._last_kind not in (None, kind):
            self._compete_until_s = now_s + self._config.compete_s
        self._last_kind = kind

    def _competes(self, now_s: float) -> bool:
        return now_s < self._compete_until_s

    # ---- refusing ---------------------------------------------------------------------------------------------------

    def _predict_s(self, ahead: tuple[float, float], cost: float, now_s: float) -> float | None:
        requests, tokens = ahead
        if self._num_inside + requests < self.room.lanes:
            return self.pace.predict_s(0, 0, cost, now_s)
        return self.pace.predict_s(self._num_inside + requests, self._inside_tokens + tokens, cost, now_s)

    def _full(self, guest: Guest) -> TripoolError | None:
        there = self.shares.waiting_tokens + self._inside_tokens
        free = self._config.queue_tokens - there
        if guest.arrival.tenant.name:
            own = sum(guest.account.waiting_tokens.values())
            free = min(free, _QUEUE_GREED * max(0.0, free) * max(1.0, guest.account.weight) - own)
        if not there or guest.cost <= free:
            return None
        wait_s = self.pace.turn.seconds_for(1, guest.cost - free) or 1.0
        return Overloaded(f"{there:.0f} tokens are waiting already", hint=_again(wait_s), retry_after_s=wait_s)

    def _too_slow(self, guest: Guest) -> TripoolError | None:
        """An idle backend takes anything: it may be faster than is remembered."""
        predicted_s, ttft_ms = guest.predicted_s, guest.arrival.promise.ttft_ms
        if predicted_s is None or (not self._num_inside and not len(self.shares)):
            return None
        safe_s = self.pace.safe_s(predicted_s)
        bound_s = self._config.max_wait_s if ttft_ms is None else ttft_ms / 1e3
        if safe_s <= bound_s:
            return None
        wait_s = safe_s - bound_s
        if ttft_ms is None:
            message = f"the first token would take about {safe_s:.0f} s"
            return Overloaded(message, hint=_again(wait_s), retry_after_s=wait_s)
        message = f"the first token would take up to {safe_s * 1e3:.0f} ms, and may take {ttft_ms:g}"
        return TtftUnreachable(message, hint=_again(wait_s), retry_after_s=wait_s)

    def _latest_start_s(self, guest: Guest) -> float:
        """The last moment at which it still makes sense to begin."""
        ttft_ms = guest.arrival.promise.ttft_ms
        if ttft_ms is None:
            return guest.arrived_s + self._config.max_wait_s
        return guest.arrived_s + max(0.0, ttft_ms / 1e3 - self.pace.own_s(guest.cost))

    def _waited_too_long(self, guest: Guest, now_s: float) -> TripoolError:
        waited = f"waited {now_s - guest.arrived_s:.2f} s without being begun"
        ahead = self.shares.ahead(guest.account, guest.arrival.promise.priority)
        wait_s = self._predict_s(ahead, guest.cost, now_s) or 1.0
        kind = Overloaded if guest.arrival.promise.ttft_ms is None else TtftUnreachable
        return kind(waited, hint=_again(wait_s), retry_after_s=wait_s)

    # ---- letting go -------------------------------------------------------------------------------------------------

    def _drop(self, request_id: str, guest: Guest, now_s: float) -> None:
        if guest.stage is Stage.WAITING:
            self.shares.remove(request_id)
            self.rates.take(guest.arrival.tenant, -1, -guest.cost, now_s)
            return
        if guest.stage is Stage.INSIDE:
            self._begun(guest)
        self._slots_held -= guest.arrival.choices
        guest.account.slots_held -= guest.arrival.choices
        self.shares.left(guest.account)

    def _begun(self, guest: Guest) -> None:
        self._num_inside -= 1
        self._inside_tokens = self._inside_tokens - guest.cost if self._num_inside else 0.0

    # ---- for people -------------------------------------------------------------------------------------------------

    def _why(self, guest: Guest, now_s: float) -> str:
        slots, account = self.room.slots, guest.account
        if self._competes(now_s) and slots is not None:
            if 0 < self._slots_held >= slots:
                return f"all {slots} decode slots were taken"
            if not self._is_allowed(now_s)(account):
                return f"its tenant had {account.slots_held} of {slots} decode slots, and the rest is kept for others"
        window = self.window_tokens(now_s)
        return (
            f"{self._inside_tokens:.0f} tokens were inside without a first token (at most {window:.0f} at once), "
            f"and {guest.ahead_tokens:.0f} were to go before it"
        )

    def explain(self, request_id: str, now_s: float) -> dict[str, str | int | float | bool | None]:
        guest = self._guests.get(request_id)
        if guest is None:
            return {}
        until_s = now_s if guest.stage is Stage.WAITING else guest.admitted_s
        waited = f"{(until_s - guest.arrived_s) * 1e3:.1f} ms"
        facts: dict[str, str | int | float | bool | None] = {
            "waited in the door": f"{waited}, because {guest.why}" if guest.why else waited,
            "predicted first token ms": None if guest.predicted_s is None else round(guest.predicted_s * 1e3, 1),
            "priority": guest.arrival.promise.priority,
        }
        if guest.arrival.tenant.name:
            facts["tenant"] = guest.arrival.tenant.name
        if guest.arrival.promise.ttft_ms is not None:
            facts["promised first token ms"] = guest.arrival.promise.ttft_ms
        return facts

    def check(self, now_s: float) -> None:
        """The invariants, at length."""
        self.shares.check()
        self.rates.check(now_s)
        by_stage = {stage: [g for g in self._guests.values() if g.stage is stage] for stage in Stage}
        waiting, inside = by_stage[Stage.WAITING], by_stage[Stage.INSIDE]
        assert all((i in self.shares) == (g.stage is Stage.WAITING) for i, g in self._guests.items())
        assert len(self.shares) == len(waiting), "someone waits who is not here"
        assert self._num_inside == len(inside), "requests inside are miscounted"
        assert abs(self._inside_tokens - sum(g.cost for g in inside)) <= 1e-3, "tokens inside are miscounted"
        held = inside + by_stage[Stage.ANSWERING]
        assert self._slots_held == sum(g.arrival.choices for g in held), "slots are miscounted"
        for account in self.shares:
            own = [g for g in held if g.account is account]
            assert account.slots_held == sum(g.arrival.choices for g in own) and account.num_inside == len(own)
        watched = {(i, arrived_s) for _, i, arrived_s in self._deadlines}
        assert all((g.arrival.id, g.arrived_s) in watched for g in waiting), "someone waits without a bound"
        if waiting:
            assert held, "requests wait before a backend that has nothing to do"


def _again(seconds: float) -> str:
    return f"try again in about {max(1.0, seconds):.0f} s"
