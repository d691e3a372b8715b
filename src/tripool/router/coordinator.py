"""The coordinator: takes requests, messages and the time, and returns messages, tokens and failures to send. Pure.

`submit`, `cancel`, `receive`, `drain` and `tick` take the time and return outputs, in order. Call `tick` every few tens
of milliseconds: every wait has a deadline.

A worker is trusted from its Hello until it is silent, leaves or is reaped. A Hello says that its sender holds nothing:
whatever was placed on it before is placed again. A worker that is not trusted gets no answer; it then drops everything
and sends Hello again, unless it was killed before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from tripool.config import RouterConfig
from tripool.core import Request, TokenEvent
from tripool.errors import InvalidRequest, NoWorkers, Overloaded, TripoolError, error_of
from tripool.messages import (
    PROTOCOL,
    AnyMessage,
    Cancel,
    Drain,
    Heartbeat,
    Hello,
    Left,
    Reaped,
    Refused,
    Release,
    Role,
    Stamped,
    Suspect,
    Tokens,
    TransferDone,
    TransferReady,
    Welcome,
    WorkerId,
)
from tripool.router.held import Held
from tripool.router.ledger import ChoiceState, Entry, Gap, Lease, Stage
from tripool.router.outputs import Emit, Output, Send, ToSupervisor
from tripool.router.placing import Placing
from tripool.router.replica import Trouble
from tripool.router.view import Member


class Coordinator:
    def __init__(self, config: RouterConfig, *, epoch: int, traces: bool = True) -> None:
        """`traces`: whether each request keeps a placement trace; it does not affect decisions."""
        self._config = config
        self._welcome = Welcome(epoch, config.heartbeat_s)
        self._placing = Placing(config, traces=traces)
        self.ledger = self._placing.ledger
        self.view = self._placing.view
        self._alarms: list[tuple[float, str, int]] = []
        """When to check a worker (name, epoch) again."""
        self._suspected: dict[WorkerId, float] = {}
        self._computed: dict[WorkerId, dict[str, set[int]]] = {}
        """What suspected workers were computing, until it is known how they ended."""
        self._newest: dict[str, int] = {}
        """Newest epoch of each worker."""
        self._over: dict[str, int] = {}
        """Epoch up to which a worker's processes are known to have ended."""

    # ---- for gateways and workers -----------------------------------------------------------------------------------

    def submit(self, request: Request, now_s: float, held: Held | None = None) -> list[Output]:
        """Takes what admission lets in. Raises InvalidRequest for an id in use. `held`: an earlier coordinator had it,
        and its client has this much of it; the rest is computed as after the loss of a worker."""
        if self.ledger.get(request.id) is not None:
            raise InvalidRequest(f"request id '{request.id}' is in use", param="request_id")
        entry = self.ledger.open(request, now_s, held)
        still_open = [choice for choice in entry.choices if choice.stage is not Stage.DONE]
        assert still_open, "a finished request is taken up again"
        self._placing.enqueue(entry, still_open, now_s)
        return self._placing.settle(now_s)

    def cancel(self, request_id: str, now_s: float) -> list[Output]:
        """The client disconnected or needs no more. Unknown and finished requests are ignored."""
        entry = self.ledger.get(request_id)
        if entry is not None:
            self._placing.drop(entry)
        return self._placing.settle(now_s)

    def receive(self, message: AnyMessage, now_s: float) -> list[Output]:
        """From a worker or the supervisor, in the order in which each sent them."""
        match message:
            case Tokens():
                self._tokens(message, now_s)
            case Heartbeat():
                self._heartbeat(message, now_s)
            case TransferReady():
                self._transfer_ready(message, now_s)
            case TransferDone():
                self._transfer_done(message, now_s)
            case Refused():
                self._refused(message, now_s)
            case Hello():
                self._hello(message, now_s)
            case Left():
                self._ended(message.worker_id, now_s, crashed=False)
            case Reaped():
                self._ended(message.worker_id, now_s, crashed=message.crashed)
            case _:
                raise AssertionError(f"a coordinator is not sent {type(message).__name__}")
        return self._placing.settle(now_s)

    def advance(self, worker_id: WorkerId, runs: Iterable[tuple[Stamped, Sequence[int]]], now_s: float) -> list[Output]:
        """Tokens of many steps at once, by choice: the newest, and those right before it. The ledger takes them like
        single ones; clients get only the newest. For a simulation that fast-forwards over quiet steps."""
        for stamped, before in runs:
            self._token(worker_id, stamped, before, now_s)
        return self._placing.settle(now_s)

    def drain(self, worker_id: WorkerId, now_s: float) -> list[Output]:
        """No new work for this worker. Its streams move to another worker if there is one; else it finishes them."""
        member = self.view.get(worker_id)
        if member is not None and not member.draining:
            self._drain(member, now_s)
            self._placing.out.append(Send(worker_id, Drain()))
        return self._placing.settle(now_s)

    def disconnected(self, worker_id: WorkerId, now_s: float) -> list[Output]:
        """Its connection has ended: it holds nothing any more. Its next Hello is welcome at once."""
        if worker_id in self.view:
            self._computed[worker_id] = self._placing.computed_at(worker_id)
            self._placing.lose(worker_id, now_s)
        return self._placing.settle(now_s)

    def tick(self, now_s: float) -> list[Output]:
        """Checks deadlines of requests and silence of workers."""
        for entry, choice in self.ledger.overdue(now_s):
            self._overdue(entry, choice, now_s)
        while self._alarms and self._alarms[0][0] <= now_s:
            _, worker, epoch = heappop(self._alarms)
            worker_id = WorkerId(worker, epoch)
            member = self.view.get(worker_id)
            if member is None:
                continue
            due_s = min(member.heard_s + self._config.silence_s, member.progress_s + self._config.stall_s)
            if due_s > now_s:
                heappush(self._alarms, (due_s, worker, epoch))
            else:
                self._suspected[worker_id] = now_s
                self._computed[worker_id] = self._placing.computed_at(worker_id)
                self._placing.lose(worker_id, now_s)
                self._placing.out.append(ToSupervisor(Suspect(worker_id)))
        return self._placing.settle(now_s)

    def troubles(self, *, everything: bool = False) -> tuple[Trouble, ...]:
        """For a standby: of requests that lost a worker since the last call."""
        troubled, self._placing.troubled = self._placing.troubled, set()
        entries = [entry for name in troubled if (entry := self.ledger.get(name)) is not None]
        found = [entry for entry in self.ledger if entry.num_losses or entry.num_crashes] if everything else entries
        return tuple(Trouble(entry.request.id, entry.num_losses, entry.num_crashes) for entry in found)

    def restore(self, trouble: Trouble) -> None:
        """Of a request that was just submitted again: an earlier coordinator lost workers with it."""
        entry = self.ledger.get(trouble.request_id)
        if entry is not None:
            entry.num_losses, entry.num_crashes = trouble.num_losses, trouble.num_crashes

    def check(self, now_s: float | None = None) -> None:
        """The invariants, in full. With the time: nothing is past its deadline (after a tick)."""
        self._placing.check(now_s)
        watched = {(worker, epoch) for _, worker, epoch in self._alarms}
        for member in self.view:
            assert member.worker_id.epoch > self._over.get(member.worker_id.name, 0), "an ended worker is trusted"
            assert member.worker_id not in self._suspected, "a suspected worker is trusted"
            assert (member.worker_id.name, member.worker_id.epoch) in watched, "a worker without an alarm"

    # ---- workers join and leave -------------------------------------------------------------------------------------

    def _hello(self, hello: Hello, now_s: float) -> None:
        worker_id, worker = hello.worker_id, hello.worker_id.name
        if hello.protocol != PROTOCOL or hello.role == "cache" or worker_id.epoch <= self._over.get(worker, 0):
            return
        suspected_s = self._suspected.get(worker_id)
        if suspected_s is not None and now_s < suspected_s + self._config.distrust_s:
            return
        newest = self._newest.get(worker, worker_id.epoch)
        if worker_id.epoch < newest:
            return
        # The same epoch again holds nothing. A worker's next epoch starts only after the last one has ended.
        self._lose(WorkerId(worker, newest), now_s)
        self._newest[worker] = worker_id.epoch
        self.view.add(hello, now_s)
        heappush(self._alarms, (now_s + self._config.silence_s, worker, worker_id.epoch))
        self._placing.out.append(Send(worker_id, self._welcome))

    def _heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        worker_id = heartbeat.worker_id
        if worker_id not in self.view:
            return  # without an answer it will send Hello
        member = self.view.heard(heartbeat, now_s)
        self._placing.out.append(Send(worker_id, self._welcome))
        if member.draining:
            self._placing.out.append(Send(worker_id, Drain()))  # repeated: the first may have been lost
        if not member.num_placed or member.idle_s is None:
            return
        if now_s - max(member.idle_s, member.placed_s) > self._config.silence_s:
            # It has been idle for longer than any message travels: what we sent, or its answer, was lost.
            for request_id, placement in self.ledger.placements_at(worker_id):
                self._placing.cancel_placement(request_id, placement, now_s, lost=True)

    def _ended(self, worker_id: WorkerId, now_s: float, *, crashed: bool) -> None:
        """The process has ended for certain."""
        self._over[worker_id.name] = max(self._over.get(worker_id.name, 0), worker_id.epoch)
        computed = self._computed.get(worker_id)
        if crashed and computed is not None:  # it was silent first: its work is already placed again
            self._placing.accuse(computed)
        self._lose(worker_id, now_s, crashed=crashed)

    def _lose(self, worker_id: WorkerId, now_s: float, *, crashed: bool = False) -> None:
        self._suspected.pop(worker_id, None)
        self._computed.pop(worker_id, None)
        if worker_id in self.view:
            self._placing.lose(worker_id, now_s, crashed=crashed)

    def _drain(self, member: Member, now_s: float) -> None:
        self.view.drain(member.worker_id)
        if member.hello.role == "decode" and self.view.num_ready("decode"):
            for request_id, placement in self.ledger.placements_at(member.worker_id):
                self._placing.cancel_placement(request_id, placement, now_s, lost=False)

    # ---- messages about requests ------------------------------------------------------------------------------------

    def _tokens(self, message: Tokens, now_s: float) -> None:
        member = self.view.get(message.worker_id)
        for stamped in message.events:
            if member is None or self._is_token(stamped.event, member):  # else it is a gap, which the ledger detects
                self._token(message.worker_id, stamped, (), now_s)

    def _is_token(self, event: TokenEvent, member: Member) -> bool:
        """Whether it is valid for this model and request: it is forwarded to clients and counted."""
        entry = self.ledger.get(event.request_id)
        num_prompt = len(entry.request.prompt_ids) if entry is not None else 0
        known = entry is None or 0 <= event.num_cached_tokens <= num_prompt
        drafts = 0 <= event.num_accepted_draft_tokens <= event.num_draft_tokens
        return known and drafts and 0 <= event.token_id < member.hello.vocab

    def _token(self, worker_id: WorkerId, stamped: Stamped, before: Sequence[int], now_s: float) -> None:
        event, attempt = stamped.event, stamped.attempt
        found = self.ledger.choice_of(worker_id, event.request_id, attempt, event.choice)
        if found is None:
            self._stray(worker_id, event.request_id, attempt)
            return
        entry, choice = found
        taken = self.ledger.take(entry, choice, event, now_s, self._config.token_s, before)
        if isinstance(taken, Gap):
            self._placing.cancel_placement(event.request_id, entry.placements[attempt], now_s, lost=True)
        elif taken is not None:
            self._placing.out.append(Emit(taken))
            if choice.stage is Stage.TRANSFERRING:  # TransferDone was lost
                self._placing.transfer_done(entry, choice, now_s)
            if choice.stage is Stage.DECODING:
                self._placing.decoded(entry, choice, done=False)
            if taken.finish_reason is not None:
                self._placing.done(entry, choice, now_s)

    def _transfer_ready(self, message: TransferReady, now_s: float) -> None:
        found = self.ledger.choice_of(message.worker_id, message.request_id, message.attempt, message.choice)
        if found is None:
            if message.worker_id in self.view:
                self._placing.out.append(Send(message.worker_id, Release(message.lease)))
            return
        entry, choice = found
        placement = entry.placements[message.attempt]
        if message.num_tokens != len(entry.request.prompt_ids) + len(choice.tokens) - 1:
            # Its tokens were lost on the way. Its KV is dropped with the placement.
            self._placing.cancel_placement(message.request_id, placement, now_s, lost=True)
            return
        self._placing.lift(entry, choice)
        until_s = now_s + self._config.queue_s
        lease = Lease(message.worker_id, message.attempt, message.lease, message.descriptor, until_s)
        self.ledger.hold(entry, choice, lease)
        self._placing.pack(entry, choice, now_s)

    def _transfer_done(self, message: TransferDone, now_s: float) -> None:
        found = self.ledger.choice_of(message.worker_id, message.request_id, message.attempt, message.choice)
        if found is None:
            self._stray(message.worker_id, message.request_id, message.attempt)
        elif found[1].stage is Stage.TRANSFERRING:
            self._placing.transfer_done(*found, now_s)

    def _refused(self, message: Refused, now_s: float) -> None:
        member = self.view.get(message.worker_id)
        if message.code == "draining" and member is not None and not member.draining:
            self._drain(member, now_s)
        found = self.ledger.find(message.worker_id, message.request_id, message.attempt)
        if found is None:
            return
        entry, placement = found
        if message.final:
            self._placing.fail(entry, error_of(message.code, message.message, message.hint))
            return
        full = message.code == "overloaded"
        if full and self._stands_still(entry, now_s):
            self._placing.fail(entry, self._waited_for("prefill" if placement.source is None else "decode"))
            return
        choices = self._placing.choices_under(entry, placement)
        for choice in choices:
            choice.avoid = message.worker_id
        # A refusal for want of room does not invalidate the KV; any other one does.
        keeps_descriptor = full or message.code == "draining"
        void = message.worker_id if placement.source is None else None if keeps_descriptor else placement.source
        lost, why = not keeps_descriptor, f"refused ({message.code})"
        self._placing.again(entry, choices, now_s, lost=lost, void=void, rest=True, why=why)

    def _stray(self, worker_id: WorkerId, request_id: str, attempt: int) -> None:
        """A trusted worker works on an attempt that no longer exists: its Cancel was lost, or crosses this message."""
        if worker_id in self.view:
            self._placing.out.append(Send(worker_id, Cancel(request_id, attempt)))

    # ---- deadlines --------------------------------------------------------------------------------------------------

    def _overdue(self, entry: Entry, choice: ChoiceState, now_s: float) -> None:
        if choice.stage is Stage.RESTING:
            self._placing.rested(entry, choice, now_s)
        elif choice.stage in (Stage.QUEUED, Stage.PACKED):
            self._found_no_room(entry, choice, now_s)
        else:
            # Its worker has no room or time for it; another may have.
            placement = entry.placements[choice.attempt]
            if self._stands_still(entry, now_s):
                self._placing.fail(entry, self._waited_for("prefill" if placement.source is None else "decode"))
                return
            for other in self._placing.choices_under(entry, placement):
                other.avoid = placement.worker_id
            self._placing.cancel_placement(entry.request.id, placement, now_s, lost=False)

    def _found_no_room(self, entry: Entry, choice: ChoiceState, now_s: float) -> None:
        """Fails it, unless it waits for other choices of its own request: they go on, and will free their room."""
        packed = choice.stage is Stage.PACKED
        if now_s - entry.moved_s >= self._config.queue_s * entry.patience:
            self._placing.fail(entry, self._waited_for("decode" if packed else "prefill"))
        elif choice.lease is not None:  # its lease will soon expire: it is computed again
            self._placing.again(entry, [choice], now_s, lost=False, void=choice.lease.worker_id, why="waited too long")
        else:
            self.ledger.move(entry, choice, Stage.QUEUED, now_s, self._config.queue_s)

    def _stands_still(self, entry: Entry, now_s: float) -> bool:
        """Whether its client has received nothing for as long as waiting and computing may take together."""
        return now_s - entry.moved_s >= (self._config.queue_s + self._config.prefill_s) * entry.patience

    def _waited_for(self, role: Role) -> TripoolError:
        waited = f"waited {self._config.queue_s:g} s for a {role} worker"
        if self.view.num_ready(role):
            return Overloaded(f"{waited} with room", hint="try again later", retry_after_s=self._config.queue_s)
        return NoWorkers(waited, hint="is one running? see `tripool status`")
