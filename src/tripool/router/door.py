"""The door before a backend: who is refused, who waits, who goes next. Pure; the clock is an argument.

| fact | what follows |
|---|---|
| `enter` | a request has come and is not read yet: refused, or counted against its tenant's rate |
| `arrive` | refused at once (rate, queue, a promise that cannot be kept), let through, or kept waiting |
| `first_token` | its work is known now: its tenant's account, the pace and the window are corrected |
| `finished`, `cancelled` | whatever it held is free |
| `tick` | whoever has waited too long is refused; call it every few tens of milliseconds |

Each returns what is to be done. A request of several prompts arrives whole, and is let through one prompt at a time:
between two of them others have their turn.

Only a small window of prompts is inside the backend without a first token: enough to keep it busy, so little that the
order is decided here. While all requests are alike (one tenant, one priority) there is no order to decide, and the
window is wide. Decode slots are shared by the backend itself, which takes them from whoever has more than its share;
here a tenant that has its share of them waits when few are left. Knows nothing of workers, blocks or text; the same
object stands before an engine of this process, before pools, and in the simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from tripool.config import DoorConfig
from tripool.errors import Overloaded, TripoolError, TtftUnreachable
from tripool.router.fair import Account, Shares
from tripool.router.guests import Admit, Arrival, Decision, Guest, Refuse, Room, Stage, check_account
from tripool.router.pace import Pace
from tripool.router.rates import Rates
from tripool.tenants import Tenant

_FIRST_WINDOW_TOKENS = 512
"""Before the backend's pace is known."""
_LIGHT = 0.5
"""Of what another asks for: less does not have to wait for it."""
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
        self._later: dict[str, deque[Arrival]] = {}
        """Prompts that have not arrived yet, by their ids: those behind another one of the same request."""
        self._later_tokens = 0
        self._inside: dict[str, Guest] = {}
        """Let through, without a first token."""
        self._inside_tokens = 0.0
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

    def enter(self, tenant: Tenant, now_s: float) -> TripoolError | None:
        """Before anything of a request is read. What comes of it later does not give this back."""
        refused = self.rates.refusal(tenant, 1, 0, now_s)
        if refused is None:
            self.rates.take(tenant, 1, 0, now_s)
        return refused

    def arrive(self, arrival: Arrival, now_s: float, rest: Sequence[Arrival] = ()) -> list[Decision]:
        """`rest`: further prompts of the same request. It is refused whole or not at all."""
        everything = (arrival, *rest)
        assert not any(one.id in self._guests or one.id in self._later for one in everything), "is here already"
        tenant = arrival.tenant
        self._notice((tenant.name, arrival.promise.priority), now_s)
        amount = sum(one.tokens for one in everything)
        guest = self._guest(arrival, deque(rest), now_s)
        error = self.rates.refusal(tenant, 0, amount, now_s) or self._full(guest) or self._too_slow(guest)
        if error is not None:
            return [Refuse(arrival.id, error)]
        self.rates.take(tenant, 0, amount, now_s)
        guest.account.open_tokens += sum(one.asked_tokens for one in everything)
        for one in rest:
            self._later[one.id] = guest.rest
            self._later_tokens += one.prompt_tokens
        self._queue_up(guest)
        decisions = self._settle(now_s)
        if guest.stage is Stage.WAITING:
            guest.why = self._why(guest, now_s)
        return decisions

    def _guest(self, arrival: Arrival, rest: deque[Arrival], now_s: float) -> Guest:
        account = self.shares.account(arrival.tenant)
        cost = account.cost_of(arrival.prompt_tokens)
        account.count(now_s, asked=cost)
        ahead = self.shares.ahead(account, arrival.promise.priority)
        light = self._is_light(account, arrival.asked_tokens + sum(one.asked_tokens for one in rest))
        predicted_s = self._predict_s(ahead, cost, now_s, light=light)
        return Guest(arrival, account, cost, arrival.answer_tokens, rest, now_s, ahead[1], predicted_s)

    def _queue_up(self, guest: Guest) -> None:
        arrival = guest.arrival
        self._guests[arrival.id] = guest
        self.shares.push(arrival.id, guest.account, arrival.promise.priority, guest.cost)
        heappush(self._deadlines, (self._latest_start_s(guest), arrival.id, guest.arrived_s))

    def _next_prompt(self, guest: Guest, now_s: float) -> None:
        """The one behind it arrives now."""
        if guest.rest:
            arrival, rest = guest.rest.popleft(), guest.rest
            del self._later[arrival.id]
            self._later_tokens -= arrival.prompt_tokens
            guest.rest = deque()
            self._queue_up(self._guest(arrival, rest, now_s))

    def first_token(self, request_id: str, uncached_tokens: int, now_s: float) -> list[Decision]:
        """Of any of its choices; a second one changes nothing."""
        guest = self._guests.get(request_id)
        if guest is None or guest.stage is not Stage.INSIDE:
            return []
        guest.stage = Stage.ANSWERING
        self._begun(guest)
        account = guest.account
        self.shares.correct(account, uncached_tokens - guest.cost)
        self.rates.take(guest.arrival.tenant, 0, uncached_tokens - guest.arrival.prompt_tokens, now_s)
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
            reserved = min(guest.reserved_tokens, num_tokens)
            guest.reserved_tokens -= reserved
            self.rates.take(guest.arrival.tenant, 0, num_tokens - reserved, now_s)

    def finished(self, request_id: str, num_tokens: int, now_s: float) -> list[Decision]:
        """`num_tokens`: those that `answered` was not told of."""
        self.answered(request_id, num_tokens, now_s)
        return self.cancelled(request_id, now_s)

    def cancelled(self, request_id: str, now_s: float) -> list[Decision]:
        """It is over, in whatever way. Unknown ones are fine."""
        guest = self._guests.pop(request_id, None)
        if guest is not None:
            self._drop(request_id, guest, now_s)
        elif request_id in self._later:
            self._drop_later(request_id, now_s)
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
        while waiting := len(shares):
            request_id = shares.pop(self._is_allowed(now_s))
            if request_id is None:
                break
            guest = self._guests[request_id]
            guest.account.num_unbegun += 1
            guest.unhindered = len(self._inside) < self.room.lanes
            guest.stage, guest.admitted_s = Stage.INSIDE, now_s
            self._inside[request_id] = guest
            self._inside_tokens += guest.cost
            self._slots_held += guest.arrival.choices
            guest.account.slots_held += guest.arrival.choices
            decisions.append(Admit(request_id))
            self._next_prompt(guest, now_s)
        if not self._inside and not waiting:
            shares.rest()
        shares.credit_tokens = (self.pace.tokens_per_s() or 0.0) * self._config.credit_s
        self.pace.full(len(self._inside) >= self.room.lanes or waiting > 0, now_s)
        if len(self._deadlines) > 64 + 4 * waiting:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in shares]
            heapify(self._deadlines)
        return decisions

    def _has_room(self, now_s: float) -> bool:
        return len(self._inside) < self.room.lanes or self._inside_tokens < self.window_tokens(now_s)

    def window_tokens(self, now_s: float) -> float:
        if not self._competes(now_s):
            return self._config.wide_tokens * self.room.lanes
        pace = self.pace.tokens_per_s()
        if pace is None:  # nothing is known yet
            return min(_FIRST_WINDOW_TOKENS, self._config.wide_tokens) * self.room.lanes
        return pace * self._config.window_s

    def _is_allowed(self, now_s: float) -> Callable[[Account], bool]:
        """Whose next request may go in, by the window and by the decode slots.

        A tenant that asks for much less than another that is inside may have a prompt there as well, whatever that one
        has: the backend computes it between the pieces of longer ones. What was computed for them, and how fast, says
        little of who is in whose way: one may make the backend slow, or ask for what is cached. The last slots are kept
        for tenants that have less than their share of them, present or still to come. Without keys all are one tenant:
        then it is the backend that shares between requests.
        """
        slots, room, weight = self.room.slots, self._has_room(now_s), self.shares.present_weight
        plenty = slots is None or not self._competes(now_s) or slots - self._slots_held > slots * self._config.reserve
        slots_each = (slots or 0) / (weight + 1.0)

        def allowed(account: Account) -> bool:
            if not account.name:
                return room
            fair = plenty or account.slots_held < max(1.0, slots_each * account.weight)
            return fair and (room or self._is_light(account))

        return allowed

    def _is_light(self, account: Account, more_tokens: int = 0) -> bool:
        """Whether it asks for much less than another that is inside, and has nothing to begin there itself."""
        if not account.name or account.num_unbegun:
            return False
        asks = account.asks + more_tokens / account.weight
        return any(asks < _LIGHT * guest.account.asks for guest in self._inside.values())

    def _notice(self, kind: tuple[str, int], now_s: float) -> None:
        if self._last_kind not in (None, kind):
            self._compete_until_s = now_s + self._config.compete_s
        self._last_kind = kind

    def _competes(self, now_s: float) -> bool:
        return now_s < self._compete_until_s

    # ---- refusing ---------------------------------------------------------------------------------------------------

    def _predict_s(self, ahead: tuple[float, float], cost: float, now_s: float, *, light: bool = False) -> float | None:
        """`light`: it goes in at once, and is next there after what is under way."""
        lanes, requests, tokens = self.room.lanes, len(self._inside) + ahead[0], self._inside_tokens + ahead[1]
        if light and self._inside:
            requests, tokens = lanes, self._inside_tokens * min(1.0, lanes / len(self._inside))
        requests, tokens = (requests, tokens) if requests >= lanes else (0.0, 0.0)
        return self.pace.predict_s(requests, tokens, cost, now_s)

    def _full(self, guest: Guest) -> TripoolError | None:
        there = self.shares.waiting_tokens + self._inside_tokens
        free, cost = self._config.queue_tokens - there, guest.cost
        if guest.rest:
            # What waits behind an earlier prompt is nobody else's hindrance, but takes memory.
            cost += sum(one.prompt_tokens for one in guest.rest)
            free -= self._later_tokens
            there += self._later_tokens
        if guest.arrival.tenant.name:
            own = sum(guest.account.waiting_tokens.values())
            free = min(free, _QUEUE_GREED * max(0.0, free) * max(1.0, guest.account.weight) - own)
        if not there or cost <= free:
            return None
        wait_s = self.pace.turn.seconds_for(1, cost - free) or 1.0
        return Overloaded(f"{there:.0f} tokens are waiting already", hint=_again(wait_s), retry_after_s=wait_s)

    def _too_slow(self, guest: Guest) -> TripoolError | None:
        """An idle backend takes anything: it may be faster than is remembered."""
        predicted_s, ttft_ms = guest.predicted_s, guest.arrival.promise.ttft_ms
        if predicted_s is None or (not self._inside and not len(self.shares)):
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
        self.rates.take(guest.arrival.tenant, 0, -guest.reserved_tokens, now_s)
        guest.account.open_tokens -= guest.arrival.asked_tokens
        if guest.stage is Stage.WAITING:
            self.shares.remove(request_id)
            self.rates.take(guest.arrival.tenant, 0, -guest.arrival.prompt_tokens, now_s)
            self._next_prompt(guest, now_s)
            return
        if guest.stage is Stage.INSIDE:
            self._begun(guest)
        self._slots_held -= guest.arrival.choices
        guest.account.slots_held -= guest.arrival.choices
        self.shares.left(guest.account)

    def _drop_later(self, request_id: str, now_s: float) -> None:
        line = self._later.pop(request_id)
        arrival = next(one for one in line if one.id == request_id)
        line.remove(arrival)
        self._later_tokens -= arrival.prompt_tokens
        self.rates.take(arrival.tenant, 0, -arrival.tokens, now_s)
        self.shares.account(arrival.tenant).open_tokens -= arrival.asked_tokens

    def _begun(self, guest: Guest) -> None:
        guest.account.num_unbegun -= 1
        del self._inside[guest.arrival.id]
        self._inside_tokens = self._inside_tokens - guest.cost if self._inside else 0.0

    # ---- for people -------------------------------------------------------------------------------------------------

    def _why(self, guest: Guest, now_s: float) -> str:
        slots, account = self.room.slots, guest.account
        if slots is not None and not self._is_allowed(now_s)(account):
            return f"its tenant had {account.slots_held} of {slots} decode slots, and the rest is kept for others"
        window = self.window_tokens(now_s)
        return (
            f"{self._inside_tokens:.0f} tokens were inside without a first token (at most {window:.0f} at once), "
            f"and {guest.ahead_tokens:.0f} were to go before it"
        )

    def explain(self, request_id: str, now_s: float) -> dict[str, str | int | float | bool | None]:
        guest = self._guests.get(request_id)
        if request_id in self._later:
            return {"waited in the door": "waits behind earlier prompts of the same request"}
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
        assert len(self._inside) == len(inside), "requests inside are miscounted"
        assert abs(self._inside_tokens - sum(g.cost for g in inside)) <= 1e-3, "tokens inside are miscounted"
        held = inside + by_stage[Stage.ANSWERING]
        assert self._slots_held == sum(g.arrival.choices for g in held), "slots are miscounted"
        for account in self.shares:
            check_account(account, [g for g in self._guests.values() if g.account is account])
        later = {one.id: one for guest in waiting for one in guest.rest}
        assert self._later.keys() == later.keys(), "a prompt that never arrives"
        assert self._later_tokens == sum(one.prompt_tokens for one in later.values())
        watched = {(i, arrived_s) for _, i, arrived_s in self._deadlines}
        assert all((g.arrival.id, g.arrived_s) in watched for g in waiting), "someone waits without a bound"
        if waiting:
            assert held, "requests wait before a backend that has nothing to do"


def _again(seconds: float) -> str:
    return f"try again in about {max(1.0, seconds):.0f} s"
