"""Placement: puts choices on workers, takes them off, and places them again; updates ledger and view together. Pure.

Two queues, oldest request first: choices that need a prefill worker, and those with KV ready that need a decode worker.
A request that is queued again after a loss is older than later arrivals, so it is placed first. No request waits for
both pools at once: a decode worker is chosen when the KV is ready.

A choice is ordered as if its request had arrived as many requests later as it has choices before it, so that a request
with many choices lets others in between. Where a choice finds no room, those of other clients may: a full worker takes
a request of a group with fewer slots (`decode_slots.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import TypeVar

from tripool.config import RouterConfig
from tripool.core import Slo
from tripool.errors import TripoolError, WorkersCrashed, WorkersFailed
from tripool.messages import Cancel, Release, Role, StartDecode, StartPrefill, WorkerId
from tripool.router.decode_slots import DecodeSlots
from tripool.router.ledger import ChoiceState, Entry, Lease, Ledger, Placement, Stage
from tripool.router.outputs import Fail, Lost, Output, Send
from tripool.router.placement_trace import why_full
from tripool.router.suspects import Suspects
from tripool.router.view import FleetView, Member

_GROWTH_TOKENS = 256
"""Answer length for which a decode worker's memory is reserved; a longer answer may be preempted there."""
_LOOK_AHEAD = 32
"""Choices behind one without room that are considered."""
_MOST_OVER = 8
"""Choices placed beyond the slots of a full decode worker; it preempts one per step for them."""
_BACKGROUND_AHEAD = 512
"""Tokens of background requests on one prefill worker: another request's first token waits for them."""
_APART = "a request from a crashed worker is tried alone"
_RESERVED = "the rest is reserved for other tenants"
_Queued = TypeVar("_Queued", tuple[int, str], tuple[int, str, int])


class Placing:
    def __init__(self, config: RouterConfig, *, traces: bool = True) -> None:
        self._config, self._traces = config, traces
        self.ledger = Ledger()
        self.view = FleetView()
        self.suspects = Suspects()
        self.places = DecodeSlots()
        self.out: list[Output] = []
        self.troubled: set[str] = set()
        """Requests that lost a worker since somebody emptied it."""
        self._to_prefill: list[tuple[int, str]] = []
        """(order, request). Both heaps may hold stale entries."""
        self._to_decode: list[tuple[int, str, int]] = []
        """(turn, request, choice)"""
        self._num_changes = 0
        self._tried = (-1, -1)
        """Changes of view and queues when all was placed that could be: retrying is useless until one changes."""

    # ---- into the queues --------------------------------------------------------------------------------------------

    def enqueue(self, entry: Entry, choices: Iterable[ChoiceState], now_s: float) -> None:
        for choice in choices:
            self.ledger.move(entry, choice, Stage.QUEUED, now_s, self._config.queue_s)
        self._num_changes += 1
        heappush(self._to_prefill, (entry.order, entry.request.id))

    def pack(self, entry: Entry, choice: ChoiceState, now_s: float) -> None:
        """Queue a choice with KV ready for a decode worker."""
        assert choice.lease is not None
        wait_s = max(0.0, min(self._config.queue_s, choice.lease.until_s - now_s))
        self.ledger.move(entry, choice, Stage.PACKED, now_s, wait_s)
        self._num_changes += 1
        heappush(self._to_decode, (entry.order + choice.index, entry.request.id, choice.index))

    # ---- placing ----------------------------------------------------------------------------------------------------

    def settle(self, now_s: float) -> list[Output]:
        """Place whatever there is room for; returns all outputs since the last call."""
        if self._tried != (self.view.num_changes, self._num_changes):
            self.pump(now_s)
        out, self.out = self.out, []
        return out

    def pump(self, now_s: float) -> None:
        # Head first, until one finds no room: no request overtakes it, so nothing starves.
        while self._to_prefill and self._place_prefill(*self._to_prefill[0], now_s):
            heappop(self._to_prefill)
        if self._to_prefill and self.view.reserved:
            for order, request_id in self._with_workers(self._to_prefill):
                self._place_prefill(order, request_id, now_s)
        while self._to_decode and self._place_decode(*self._to_decode[0], now_s):
            heappop(self._to_decode)
        if self._to_decode:
            self._pass_by(now_s)
        self._tried = (self.view.num_changes, self._num_changes)

    def _pass_by(self, now_s: float) -> None:
        """The head has no room: try the next choices of other clients. They stay in the heap, where they are skipped
        later."""
        tried = set()
        next_ones = sorted(self._to_decode[:_LOOK_AHEAD])
        if self.view.reserved:
            next_ones = sorted({*next_ones, *self._with_workers(self._to_decode)})
        for turn, request_id, index in next_ones:
            entry = self.ledger.get(request_id)
            group = None if entry is None else entry.request.slo.group
            if group is not None and group not in tried and not self._place_decode(turn, request_id, index, now_s):
                tried.add(group)

    def _with_workers(self, queue: list[_Queued]) -> list[_Queued]:
        """Of those behind a head without room: requests whose tenants have workers of their own. Oldest first."""
        owners = set(self.view.reserved.values())
        entries = ((item, self.ledger.get(item[1])) for item in queue)
        return sorted(item for item, entry in entries if entry is not None and entry.request.slo.tenant in owners)

    def _closed_to(self, entry: Entry) -> tuple[set[WorkerId], str]:
        """Workers that may not take this request, and why."""
        closed = self.suspects.closed_to(entry, self.ledger)
        if not self.view.reserved:
            return closed, _APART
        return closed | self.view.closed_to(entry.request.slo.tenant), _APART if closed else _RESERVED

    def _place_prefill(self, order: int, request_id: str, now_s: float) -> bool:
        """False: no room."""
        entry = self.ledger.get(request_id)
        if entry is None or entry.order != order:
            return True
        choices = [choice for choice in entry.choices if choice.stage is Stage.QUEUED]
        if not choices:
            return True
        tokens = len(entry.request.prompt_ids)
        for choice in choices:
            tokens += len(choice.tokens) + 1
        closed, why_closed = self._closed_to(entry)
        ahead_tokens = _BACKGROUND_AHEAD if entry.request.slo.background else self._config.prefill_ahead_tokens
        member = self.view.pick_prefill(tokens, ahead_tokens, choices[0].avoid, closed)
        if member is None:
            entry.held_by = why_closed if closed else why_full("prefill", self.view.considered, tokens)
            return False
        if self._traces:
            self._note("prefill", entry, choices, member, now_s)
        wait_s = self._config.prefill_s
        placement = self.ledger.place(entry, choices, Stage.PREFILLING, member.worker_id, tokens, now_s, wait_s)
        self.view.place(member.worker_id, tokens, now_s)
        answered = tuple([entry.answered(choice) for choice in choices])
        # The lease must last while the KV waits for a decode worker, and while it is copied; messages may be late.
        lease_s = self._config.queue_s + 2 * self._config.transfer_s
        self.out.append(
            Send(
                member.worker_id,
                StartPrefill(entry.request, placement.attempt, answered, wait_s * entry.patience, lease_s),
            )
        )
        return True

    def _place_decode(self, turn: int, request_id: str, index: int, now_s: float) -> bool:
        """False: no room."""
        entry = self.ledger.get(request_id)
        if entry is None or entry.order + index != turn or entry.choices[index].stage is not Stage.PACKED:
            return True
        choice = entry.choices[index]
        lease = choice.lease
        assert lease is not None
        rest = (entry.request.params.max_tokens or _GROWTH_TOKENS) - len(choice.tokens)
        tokens = len(entry.request.prompt_ids) + len(choice.tokens) + max(0, min(rest, _GROWTH_TOKENS))
        closed, why_closed = self._closed_to(entry)
        slo = entry.request.slo
        member = self.view.pick_decode(tokens, lease.worker_id, choice.avoid, slo.tpot_ms, closed)
        member = member or self._owing(slo)
        if member is None:
            entry.held_by = why_closed if closed else why_full("decode", self.view.considered, tokens)
            return False
        if self._traces:
            self._note("decode", entry, [choice], member, now_s)
        wait_s = self._config.transfer_s
        placement = self.ledger.place(entry, [choice], Stage.TRANSFERRING, member.worker_id, tokens, now_s, wait_s)
        self.view.place(member.worker_id, tokens, now_s, lease.worker_id, slo.tpot_ms)
        self.places.place(member.worker_id, slo)
        cached = entry.num_cached_tokens or 0
        answered = entry.answered(choice)
        adopt = StartDecode(entry.request, placement.attempt, answered, lease.descriptor, cached, wait_s)
        self.out.append(Send(member.worker_id, adopt))
        return True

    def _owing(self, slo: Slo) -> Member | None:
        """A full worker, of those considered, where a group has more than its share of the slots."""
        for member in self.view.considered:
            over = member.num_placed - member.bearable
            if member.ceiling is None and over < _MOST_OVER and self.places.owes(member.worker_id, slo, over):
                return member
        return None

    def _note(self, role: Role, entry: Entry, choices: list[ChoiceState], member: Member, now_s: float) -> None:
        waited_s = now_s - choices[0].since_s
        held_by, entry.held_by = entry.held_by, ""
        if not held_by and waited_s > 0:
            held_by = "older requests go first"
        indices, seen = [choice.index for choice in choices], self.view.considered
        entry.trace.placed(role, member, seen, indices, waited_s=waited_s, held_by=held_by, now_s=now_s)

    # ---- taking off -------------------------------------------------------------------------------------------------

    def lift(self, entry: Entry, choice: ChoiceState) -> None:
        """Take a choice off its worker; a transfer under way ends too."""
        placement = entry.placements[choice.attempt]
        if choice.stage is Stage.TRANSFERRING:
            self._end_transfer(placement)
        if self.ledger.lift(entry, choice) is not None:
            self.view.take_off(placement.worker_id, placement.weight_tokens, entry.request.slo.tpot_ms)
            if placement.source is not None:
                self.places.take_off(placement.worker_id, entry.request.slo)

    def transfer_done(self, entry: Entry, choice: ChoiceState, now_s: float) -> None:
        self._end_transfer(entry.placements[choice.attempt])
        self._let_go(choice)
        choice.num_refused = 0
        self.ledger.move(entry, choice, Stage.DECODING, now_s, self._config.token_s)

    def decoded(self, entry: Entry, choice: ChoiceState, *, done: bool) -> None:
        """A decode worker has made a token."""
        if self.suspects.came_further(entry, choice, done=done):
            self._num_changes += 1

    def done(self, entry: Entry, choice: ChoiceState, now_s: float) -> None:
        self.lift(entry, choice)
        self.ledger.move(entry, choice, Stage.DONE, now_s, 0.0)
        self.decoded(entry, choice, done=True)
        if not entry.num_open:
            self.ledger.close(entry)

    def drop(self, entry: Entry) -> None:
        """The request is over: notify every worker that holds something of it."""
        cancels = [Send(p.worker_id, Cancel(entry.request.id, p.attempt)) for p in entry.placements.values()]
        self.out += cancels
        for choice in entry.choices:
            if choice.attempt:
                self.lift(entry, choice)
            self._let_go(choice)
        self._num_changes += 1  # it may have been the head that found no room
        self.suspects.forget(entry)
        self.ledger.close(entry)

    def fail(self, entry: Entry, error: TripoolError) -> None:
        self.drop(entry)
        self.out.append(Fail(entry.request.id, error))

    def cancel_placement(self, request_id: str, placement: Placement, now_s: float, *, lost: bool) -> None:
        """A placement failed, or moves elsewhere. Its worker may still hold it and is sent a Cancel."""
        entry = self.ledger.get(request_id)
        if entry is None or entry.placements.get(placement.attempt) is not placement:
            return  # ended meanwhile, with another of the same request
        self.out.append(Send(placement.worker_id, Cancel(request_id, placement.attempt)))
        void = placement.worker_id if placement.source is None else None
        self.again(entry, self.choices_under(entry, placement), now_s, lost=lost, void=void)

    def computed_at(self, worker_id: WorkerId) -> dict[str, set[int]]:
        """By request, the choices that this worker computes."""
        computed: dict[str, set[int]] = {}
        for request_id, placement in self.ledger.placements_at(worker_id):
            computed.setdefault(request_id, set()).update(placement.choices)
        return computed

    def accuse(self, computed: Mapping[str, Iterable[int]]) -> None:
        """A worker that computed these has crashed. Guilty requests fail."""
        found = {name: (entry, computed[name]) for name in computed if (entry := self.ledger.get(name)) is not None}
        for entry in self.suspects.accuse(found):
            message = f"{entry.num_crashes} workers crashed while they computed request {entry.request.id}"
            self.fail(entry, WorkersCrashed(message, hint="it is not tried again; see the server's log"))
        self._num_changes += 1

    def lose(self, worker_id: WorkerId, now_s: float, *, crashed: bool = False) -> None:
        """Nothing this worker holds counts any more: it is removed, and its choices are placed again."""
        self.view.drain(worker_id)  # or it would be picked for its own work
        start = len(self.out)
        if crashed:
            self.accuse(self.computed_at(worker_id))
        touched = self.computed_at(worker_id)
        for request_id, index in self.ledger.leases_at(worker_id):
            touched.setdefault(request_id, set()).add(index)
        for request_id, indices in touched.items():
            entry = self.ledger.get(request_id)
            assert entry is not None
            self.again(entry, [entry.choices[index] for index in sorted(indices)], now_s, lost=True, void=worker_id)
        self.view.remove(worker_id)
        self.out.append(Lost(worker_id, len(touched)))
        # It is sent nothing: it must notice the silence.
        self.out[start:] = [o for o in self.out[start:] if not (isinstance(o, Send) and o.worker_id == worker_id)]

    def choices_under(self, entry: Entry, placement: Placement) -> list[ChoiceState]:
        """Choices that a Cancel of this placement ends, including those whose KV it keeps."""

        def packed_there(lease: Lease | None) -> bool:
            return lease is not None and (lease.worker_id, lease.attempt) == (placement.worker_id, placement.attempt)

        return [c for c in entry.choices if c.index in placement.choices or packed_there(c.lease)]

    def again(
        self,
        entry: Entry,
        choices: list[ChoiceState],
        now_s: float,
        *,
        lost: bool,
        void: WorkerId | None,
        rest: bool = False,
        why: str = "",
    ) -> None:
        """Take choices off their workers and queue them: for decode if their KV is still valid, else for prefill.

        KV of `void` is not. `rest`: after a backoff that grows each time. `why`: for the placement trace.
        """
        entry.num_losses += lost
        if lost:
            self.troubled.add(entry.request.id)
        entry.trace.num_lost = entry.num_losses
        if entry.num_losses >= self._config.max_losses:
            hint = "it may be what they fail on; see their logs"
            self.fail(entry, WorkersFailed(f"{entry.num_losses} workers were lost with this request", hint=hint))
            return
        to_prefill = []
        for choice in choices:
            good = choice.lease is not None and choice.lease.worker_id != void
            if choice.attempt:
                placement = entry.placements[choice.attempt]
                how = why or ("lost" if lost else "moved away")
                entry.trace.left(placement.worker_id.name, f"{how} while {choice.stage.value}", choice.index, now_s)
                if choice.stage is Stage.TRANSFERRING and not good:
                    self.out.append(Send(placement.worker_id, Cancel(entry.request.id, placement.attempt)))
                self.lift(entry, choice)
            if not good:
                self._let_go(choice)
            if rest:
                choice.num_refused += 1
                rest_s = self._config.rest_s * 2.0 ** min(choice.num_refused, 6)
                self.ledger.move(entry, choice, Stage.RESTING, now_s, rest_s)
            elif good:
                self.pack(entry, choice, now_s)
            else:
                to_prefill.append(choice)
        if to_prefill:
            self.enqueue(entry, to_prefill, now_s)

    def rested(self, entry: Entry, choice: ChoiceState, now_s: float) -> None:
        if choice.lease is not None:
            self.pack(entry, choice, now_s)
        else:
            self.enqueue(entry, [choice], now_s)

    def _end_transfer(self, placement: Placement) -> None:
        assert placement.source is not None
        self.view.transferred(placement.source, placement.worker_id)

    def _let_go(self, choice: ChoiceState) -> None:
        lease = self.ledger.let_go(choice)
        if lease is not None:
            self.out.append(Send(lease.worker_id, Release(lease.number)))

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self, now_s: float | None) -> None:
        """With the time: nothing is past its deadline (after a tick)."""
        self.ledger.check()
        self.suspects.check(self.ledger)
        placed: dict[WorkerId, tuple[int, int]] = {}
        transfers: list[tuple[WorkerId, WorkerId]] = []
        at_decode: Counter[tuple[WorkerId, tuple[str, str]]] = Counter()
        to_prefill, to_decode = set(self._to_prefill), set(self._to_decode)
        for entry in self.ledger:
            name = entry.request.id
            for placement in entry.placements.values():
                owner = self.view.reserved.get(placement.worker_id, entry.request.slo.tenant)
                assert owner == entry.request.slo.tenant, f"{name} is on a worker reserved for another tenant"
                number, tokens = placed.get(placement.worker_id, (0, 0))
                placed[placement.worker_id] = (number + 1, tokens + placement.weight_tokens)
                if placement.source is not None:
                    at_decode[placement.worker_id, entry.request.slo.group] += 1
            for choice in entry.choices:
                if choice.stage is Stage.QUEUED:
                    assert (entry.order, name) in to_prefill, f"{name} is queued in no queue"
                elif choice.stage is Stage.PACKED:
                    turn = entry.order + choice.index
                    assert (turn, name, choice.index) in to_decode, f"{name} is packed in no queue"
                elif choice.stage is Stage.TRANSFERRING and choice.lease is not None:
                    transfers.append((choice.lease.worker_id, entry.placements[choice.attempt].worker_id))
                if choice.lease is not None:
                    assert choice.lease.worker_id in self.view, f"{name} has a lease at a lost worker"
                late = now_s is not None and choice.stage is not Stage.DONE and choice.deadline_s <= now_s
                assert not late, f"{name} is {choice.stage.value} past its deadline"
        self.view.check(placed, transfers)
        self.places.check(at_decode)
