"""The ledger of requests: which tokens each client has, where each choice is placed, and which KV leases it holds.

| stage        | placement        | lease                     | ends by                                        |
|--------------|------------------|---------------------------|------------------------------------------------|
| queued       | none             | none                      | a prefill worker with room                     |
| resting      | none             | at prefill worker or none | its deadline: then it is queued again          |
| prefilling   | a prefill worker | none                      | TransferReady, or a first token that is last   |
| packed       | none             | at the prefill worker     | a decode worker with room                      |
| transferring | a decode worker  | at the prefill worker     | TransferDone, or a token that implies it       |
| decoding     | a decode worker  | none                      | its last token                                 |
| done         | none             | none                      |                                                |

A placement is one StartPrefill or StartDecode and has its own attempt number within the request. Every message from a
worker is about a placement; if that is no longer the choice's current one, it is dropped. Pure; sends nothing and makes
no placement decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from heapq import heappop, heappush

from tripool.core import Request, TokenEvent
from tripool.messages import Answered, KvDescriptor, WorkerId
from tripool.router.held import Held
from tripool.router.placement_trace import PlacementTrace


class Stage(Enum):
    QUEUED = "queued"
    RESTING = "resting"
    PREFILLING = "prefilling"
    PACKED = "packed"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    DONE = "done"


# Tuples: membership compares by identity; a set would hash the stage's name first, in Python.
_PLACED = (Stage.PREFILLING, Stage.TRANSFERRING, Stage.DECODING)
_LEASED = (Stage.PACKED, Stage.TRANSFERRING)


@dataclass(slots=True, eq=False)
class Placement:
    """One StartPrefill or StartDecode at one worker, while it has choices left."""

    attempt: int
    worker_id: WorkerId
    weight_tokens: int
    choices: set[int]
    source: WorkerId | None = None
    """The prefill worker whose KV a StartDecode copies."""


@dataclass(frozen=True, slots=True)
class Lease:
    """KV that a prefill worker keeps for one choice."""

    worker_id: WorkerId
    attempt: int
    """Of its StartPrefill: cancelling that releases the KV too."""
    number: int
    """Unique within the worker's epoch."""
    descriptor: KvDescriptor
    until_s: float
    """The worker keeps it longer than this, long enough to be copied."""


@dataclass(slots=True, eq=False)
class ChoiceState:
    index: int
    stage: Stage
    since_s: float
    deadline_s: float
    tokens: list[int] = field(default_factory=list)
    """Tokens that the client has."""
    attempt: int = 0
    """Of its current placement; 0: none."""
    lease: Lease | None = None
    alarm_s: float | None = None
    """When the deadline heap next looks at it."""
    avoid: WorkerId | None = None
    """The worker that refused it last."""
    num_refused: int = 0
    """Refusals since its last KV transfer."""
    proof_tokens: int | None = None
    """Set after a crash of its worker: the token count that clears it of suspicion. See `router.suspects`."""
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_before: int = 0
    accepted_before: int = 0
    """Of earlier placements; an event counts from its own."""


_PAUSABLE = (Stage.QUEUED, Stage.PREFILLING, Stage.DECODING)
_BACKGROUND_PATIENCE = 2000.0
_LAST = 2**48
"""Added to the arrival number of background requests, which are placed after all others."""


@dataclass(slots=True, eq=False)
class Entry:
    request: Request
    order: int
    """Arrival number: older requests are placed first."""
    choices: list[ChoiceState]
    trace: PlacementTrace
    held_by: str = ""
    """Why no worker had room for it when it was next; empty once it is placed."""
    placements: dict[int, Placement] = field(default_factory=dict)
    num_attempts: int = 0
    num_losses: int = 0
    """Workers or messages lost with it. Waiting for room does not count."""
    num_crashes: int = 0
    """Of those workers, the ones that crashed."""
    moved_s: float = 0.0
    """When its client last received a token, or sent the request."""
    num_open: int = 0
    num_cached_tokens: int | None = None
    """From the first attempt that reported it; later attempts do not change what the client sees."""

    @property
    def patience(self) -> float:
        """Factor of its deadlines: workers pause background requests for as long as others have work."""
        return _BACKGROUND_PATIENCE if self.request.slo.background else 1.0

    def answered(self, choice: ChoiceState) -> Answered:
        return Answered(choice.index, tuple(choice.tokens))


class Gap:
    """Tokens before this one are missing: a message was lost."""


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._next_order = self._num_placements = 0
        self.num_dropped = 0
        """Events of placements that are no longer current."""
        self._at: dict[WorkerId, dict[tuple[str, int], Placement]] = {}
        """Placements by worker, then by (request, attempt)."""
        self._leases: dict[WorkerId, dict[int, tuple[str, int]]] = {}
        """KV leases by prefill worker, then lease: (request, choice)."""
        self._alarms: list[tuple[float, int, str, int]] = []
        self._num_alarms = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    # ---- a choice's stages ------------------------------------------------------------------------------------------

    def open(self, request: Request, now_s: float, held: Held | None = None) -> Entry:
        """Adds a queued request; the caller sets its deadline. `held`: what its client has already."""
        assert request.id not in self._entries
        choices = [ChoiceState(index, Stage.QUEUED, now_s, now_s) for index in range(request.params.n)]
        trace, count = PlacementTrace(now_s), len(choices)
        order = self._next_order + (_LAST if request.slo.background else 0)
        entry = Entry(request, order, choices, trace, moved_s=now_s, num_open=count)
        self._next_order += 1
        self._entries[request.id] = entry
        if held is not None:
            # It may have been here before, until its gateway's connection broke: attempts of then must not be ours.
            entry.num_attempts = self._num_placements
            entry.num_cached_tokens = held.num_cached_tokens
            for choice, had in zip(choices, held.choices, strict=True):
                choice.tokens.extend(had.tokens)
                choice.drafted_before = choice.num_drafted = had.num_draft_tokens
                choice.accepted_before = choice.num_accepted = had.num_accepted_draft_tokens
                if had.done:
                    self.move(entry, choice, Stage.DONE, now_s, 0.0)
        return entry

    def place(
        self,
        entry: Entry,
        choices: list[ChoiceState],
        stage: Stage,
        worker_id: WorkerId,
        weight: int,
        now_s: float,
        wait_s: float,
    ) -> Placement:
        """A StartPrefill (prefilling) of several choices, or a StartDecode (transferring) of one."""
        entry.num_attempts += 1
        self._num_placements += 1
        attempt = entry.num_attempts
        lease = choices[0].lease
        placement = Placement(
            attempt, worker_id, weight, {c.index for c in choices}, source=lease.worker_id if lease else None
        )
        entry.placements[attempt] = placement
        self._at.setdefault(worker_id, {})[entry.request.id, attempt] = placement
        for choice in choices:
            assert choice.attempt == 0
            choice.attempt = attempt
            self.move(entry, choice, stage, now_s, wait_s)
        return placement

    def lift(self, entry: Entry, choice: ChoiceState) -> Placement | None:
        """Take a choice off its placement. Returns the placement if that was its last choice and it is over."""
        placement = entry.placements[choice.attempt]
        choice.attempt = 0
        choice.drafted_before, choice.accepted_before = choice.num_drafted, choice.num_accepted
        placement.choices.remove(choice.index)
        if placement.choices:
            return None
        del entry.placements[placement.attempt]
        there = self._at[placement.worker_id]
        del there[entry.request.id, placement.attempt]
        if not there:
            del self._at[placement.worker_id]
        return placement

    def hold(self, entry: Entry, choice: ChoiceState, lease: Lease) -> None:
        assert choice.lease is None
        choice.lease = lease
        self._leases.setdefault(lease.worker_id, {})[lease.number] = (entry.request.id, choice.index)

    def let_go(self, choice: ChoiceState) -> Lease | None:
        """Drop a lease; the caller notifies the worker that holds it."""
        lease, choice.lease = choice.lease, None
        if lease is not None:
            held = self._leases[lease.worker_id]
            del held[lease.number]
            if not held:
                del self._leases[lease.worker_id]
        return lease

    def move(self, entry: Entry, choice: ChoiceState, stage: Stage, now_s: float, wait_s: float) -> None:
        """The only method that changes a stage, so that counts by stage are kept here."""
        wait_s = wait_s * entry.patience if stage in _PAUSABLE else wait_s
        choice.stage, choice.since_s, choice.deadline_s = stage, now_s, now_s + wait_s
        if stage is Stage.DONE:
            entry.num_open -= 1
        elif choice.alarm_s is None or choice.deadline_s < choice.alarm_s:
            self._set_alarm(entry, choice)

    def close(self, entry: Entry) -> None:
        """Remove an ended request. Its placements and leases are removed before."""
        assert not entry.placements and all(choice.lease is None for choice in entry.choices)
        del self._entries[entry.request.id]

    # ---- messages ---------------------------------------------------------------------------------------------------

    def find(self, worker_id: WorkerId, request_id: str, attempt: int) -> tuple[Entry, Placement] | None:
        """The placement that a message is about, if it still exists."""
        there = self._at.get(worker_id)
        placement = there.get((request_id, attempt)) if there is not None else None
        if placement is None:
            self.num_dropped += 1
            return None
        return self._entries[request_id], placement

    def choice_of(
        self, worker_id: WorkerId, request_id: str, attempt: int, index: int
    ) -> tuple[Entry, ChoiceState] | None:
        there = self._at.get(worker_id)
        placement = there.get((request_id, attempt)) if there is not None else None
        if placement is None or index not in placement.choices:
            self.num_dropped += 1
            return None
        entry = self._entries[request_id]
        return entry, entry.choices[index]

    def take(
        self,
        entry: Entry,
        choice: ChoiceState,
        event: TokenEvent,
        now_s: float,
        wait_s: float,
        before: Sequence[int] = (),
    ) -> TokenEvent | Gap | None:
        """A token as the client sees it, if it is the next one of its choice. None: the client already has it.

        `before`: tokens right before it that were not reported one by one.
        """
        index = event.index - len(before)
        if index != len(choice.tokens):
            self.num_dropped += 1
            return Gap() if index > len(choice.tokens) else None
        choice.tokens.extend(before)
        choice.tokens.append(event.token_id)
        entry.moved_s = now_s
        if entry.num_cached_tokens is None:
            entry.num_cached_tokens = event.num_cached_tokens
            entry.trace.begun(event)
        choice.num_drafted = choice.drafted_before + event.num_draft_tokens
        choice.num_accepted = choice.accepted_before + event.num_accepted_draft_tokens
        if now_s + wait_s * entry.patience > choice.deadline_s:
            choice.deadline_s = now_s + wait_s * entry.patience
        cached = entry.num_cached_tokens
        reported = (event.num_cached_tokens, event.num_draft_tokens, event.num_accepted_draft_tokens)
        if reported == (cached, choice.num_drafted, choice.num_accepted):
            return event
        return replace(
            event,
            num_cached_tokens=cached,
            num_draft_tokens=choice.num_drafted,
            num_accepted_draft_tokens=choice.num_accepted,
        )

    # ---- by worker, by time -----------------------------------------------------------------------------------------

    def placements_at(self, worker_id: WorkerId) -> list[tuple[str, Placement]]:
        return [(request_id, placement) for (request_id, _), placement in self._at.get(worker_id, {}).items()]

    def leases_at(self, worker_id: WorkerId) -> list[tuple[str, int]]:
        """(request, choice) of the KV that this worker keeps."""
        return list(self._leases.get(worker_id, {}).values())

    def overdue(self, now_s: float) -> Iterator[tuple[Entry, ChoiceState]]:
        """Choices past their deadline. Each is yielded again only once its deadline has moved."""
        while self._alarms and self._alarms[0][0] <= now_s:
            alarm_s, _, request_id, index = heappop(self._alarms)
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            choice = entry.choices[index]
            if choice.stage is Stage.DONE or choice.alarm_s != alarm_s:
                continue
            choice.alarm_s = None
            if choice.deadline_s > now_s:
                self._set_alarm(entry, choice)
            else:
                yield entry, choice

    def _set_alarm(self, entry: Entry, choice: ChoiceState) -> None:
        """A deadline that moved later is found when the earlier alarm fires."""
        if choice.alarm_s is None or choice.deadline_s < choice.alarm_s:
            choice.alarm_s = choice.deadline_s
            self._num_alarms += 1
            heappush(self._alarms, (choice.deadline_s, self._num_alarms, entry.request.id, choice.index))

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every open choice holds what its stage requires; every placement and lease has an owner."""
        placements: Counter[tuple[WorkerId, str, int]] = Counter()
        leases: Counter[tuple[WorkerId, int, str, int]] = Counter()
        for request_id, entry in self._entries.items():
            assert entry.request.id == request_id and entry.num_open > 0, "a finished request is still open"
            owned: dict[int, set[int]] = {}
            for choice in entry.choices:
                stage = choice.stage
                assert (choice.attempt > 0) == (stage in _PLACED), f"{request_id}: {stage} at attempt {choice.attempt}"
                leased = stage in _LEASED or (stage is Stage.RESTING and choice.lease is not None)
                assert (choice.lease is not None) == leased, f"{request_id}: {stage} with {choice.lease}"
                if choice.attempt:
                    owned.setdefault(choice.attempt, set()).add(choice.index)
                if choice.lease:
                    leases[choice.lease.worker_id, choice.lease.number, request_id, choice.index] += 1
                assert stage is Stage.DONE or choice.alarm_s is not None, f"{request_id}: no alarm for its deadline"
            assert owned == {a: p.choices for a, p in entry.placements.items()}, f"{request_id}: a choice is misplaced"
            placements.update((p.worker_id, request_id, p.attempt) for p in entry.placements.values())
            assert entry.num_open == sum(choice.stage is not Stage.DONE for choice in entry.choices)
        assert placements == Counter((worker_id, *key) for worker_id, there in self._at.items() for key in there)
        kept = Counter(
            (worker_id, lease, *owner) for worker_id, held in self._leases.items() for lease, owner in held.items()
        )
        assert leases == kept, "a lease without its owner"
