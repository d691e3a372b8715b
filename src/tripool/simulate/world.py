"""A gateway in virtual time: the admission control and the router that serve, their clients and what these send.

Everything else is an argument. The fleet brings its network and cost model:

| fleet | router | engines |
|---|---|---|
| `simulate/fleet.py` | `Coordinator` | serving workers on threads, a network that loses messages |
| `simulate/supernode/fleet.py` | `Coordinator` | serving workers on modelled engines and links |
| `simulate/supernode/colocated.py` | the engine itself | one engine for prefill and decode, measured steps |

Faults are events of the same timeline; an observer sees what clients see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from tripool.config import AdmissionConfig
from tripool.core import Request, TokenEvent
from tripool.errors import TripoolError
from tripool.messages import ToWorker, WorkerId
from tripool.router import Emit, Fail, Output, Send, ToSupervisor
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Admit, Capacity, Decision, Refuse
from tripool.router.admission_types import Arrival as Prompt
from tripool.router.held import Held
from tripool.router.replica import Record, Replica
from tripool.simulate.request_table import DONE, FAILED, REFUSED, Arrival, Open, RequestTable
from tripool.simulate.timeline import GATEWAY, TICK, Timeline, to_fs

TICK_S = 0.05
_NO_GATEWAY_S = 0.3
"""After that time a client tries again to connect."""


class Router(Protocol):
    """Takes what admission lets in; its outputs are for `World.do`. A `Coordinator` is one."""

    def submit(self, request: Request, now_s: float, held: Held | None = None) -> list[Output]: ...

    def cancel(self, request_id: str, now_s: float) -> list[Output]: ...

    def tick(self, now_s: float) -> list[Output]: ...


RouterT = TypeVar("RouterT", bound=Router)


class Fleet(Protocol[RouterT]):
    """What computes, and the network to it."""

    def new_router(self, gateway_epoch: int) -> RouterT:
        """Of a gateway that starts."""

    def capacity(self, router: RouterT) -> Capacity:
        """As admission control knows it."""

    def start(self, world: World[RouterT]) -> None:
        """The gateway is there: what its router makes of messages is given to `World.do`."""

    def send(self, worker_id: WorkerId, message: ToWorker) -> None: ...

    def suspected(self, worker_id: WorkerId) -> None:
        """To the supervisor: this worker is silent."""


class Faults(Protocol[RouterT]):
    def start(self, world: World[RouterT]) -> None:
        """Plan the faults as events of the world's timeline."""


class Observer:
    """Called for what happens to requests. This one ignores it."""

    def turned_away(self) -> None:
        """There was no gateway."""

    def arrived(self, request: Request) -> None: ...

    def admitted(self, request_id: str) -> None: ...

    def refused(self, request_id: str, error: TripoolError) -> None:
        """By admission control."""

    def failed(self, request_id: str, error: TripoolError) -> None: ...

    def cancelled(self, request_id: str) -> None:
        """By its client, who may not know yet that it has ended."""

    def token(self, event: TokenEvent) -> None: ...

    def gateway_died(self) -> None: ...

    def coordinator_died(self) -> None: ...

    def taken_over(self, requests: list[Request], untold: Counter[str]) -> None:
        """Another coordinator takes up these. `untold`: requests per tenant that the log did not tell of."""


class World(Generic[RouterT]):
    """`retry_s`: after which time a client asks again that was refused (why), or cut off; None: never.
    `to_client_s`: from the gateway to a client, for tokens."""

    def __init__(
        self,
        timeline: Timeline,
        fleet: Fleet[RouterT],
        arrivals: Iterable[Arrival],
        *,
        admission: AdmissionConfig,
        faults: Faults[RouterT] | None = None,
        tick_s: float = TICK_S,
        to_client_s: float = 0.0,
        retry_s: Callable[[TripoolError | None], float | None] = lambda error: None,
        observer: Observer | None = None,
        takeovers: bool = False,
    ) -> None:
        """`takeovers`: gateways keep what their clients have, for another coordinator."""
        self.timeline, self.observer = timeline, observer or Observer()
        self.open: dict[str, Open] = {}
        self.table = RequestTable()
        self.router: RouterT | None = None
        """None: there is no gateway just now."""
        self._fleet, self._arrivals, self._retry_s = fleet, iter(arrivals), retry_s
        self._admission_config, self._tick_fs, self._to_client_s = admission, to_fs(tick_s), to_client_s
        self._gateway_epoch = 0
        self._takeovers, self._replica = takeovers, Replica()
        """Of the standby: what the log has said."""
        self._untold: Counter[str] = Counter()
        """Requests per tenant since it said something."""
        self._taking_over = False
        self.start_gateway()
        fleet.start(self)
        self._next_arrival()
        if faults is not None:
            faults.start(self)
        timeline.over = self.idle

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Until every request has come and ended."""
        while self.timeline.run(1000):
            if progress is not None:
                progress(len(self.table))

    # ---- clients ----------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self.timeline.expect(arrival.time_s, self._arrive_in_turn, arrival)

    def _arrive_in_turn(self, arrival: Arrival) -> None:
        self._next_arrival()
        self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        now_s, request = self.timeline.now_s, arrival.request
        if self.router is None:
            self.observer.turned_away()
            self.timeline.expect(now_s + _NO_GATEWAY_S, self._arrive, arrival)
            return
        tenant, choices = arrival.tenant, request.params.n
        self.open[request.id] = Open(arrival, now_s, choices)
        self.observer.arrived(request)
        error = self.admission.enter(tenant, now_s)
        if error is None:
            self._untold[tenant.name] += self._takeovers
            num_tokens = len(request.prompt_ids)
            prompt = Prompt(id=request.id, prompt_tokens=num_tokens, tenant=tenant, choices=choices, slo=request.slo)
            self._decide(self.admission.arrive(prompt, now_s))
        else:
            self._decide([Refuse(request.id, error)])
        if arrival.cancel_s is not None:
            self.timeline.expect(now_s + arrival.cancel_s, self._cancel, request.id)

    def _ask_again(self, arrival: Arrival, error: TripoolError | None = None) -> None:
        """A new request, in a while."""
        wait_s = self._retry_s(error)
        if wait_s is not None:
            request = replace(arrival.request, id=f"{arrival.request.id}+")
            again = replace(arrival, request=request, cancel_s=None)
            self.timeline.expect(self.timeline.now_s + wait_s, self._arrive, again)

    def _cancel(self, request_id: str) -> None:
        if self._taking_over:  # its gateway is there, and tells the next coordinator nothing of it
            self.open.pop(request_id, None)
            self.observer.cancelled(request_id)
        elif self.router is not None:
            now_s, opened = self.timeline.now_s, self.open.pop(request_id, None)
            self.observer.cancelled(request_id)
            self._decide(self.admission.cancelled(request_id, now_s))
            if opened is None or opened.admitted:
                self.do(self.router.cancel(request_id, now_s))

    def _close(self, request_id: str, outcome: int, error: TripoolError | None = None) -> None:
        end_s = self.timeline.now_s + (self._to_client_s if outcome == DONE else 0.0)
        self.table.close(self.open.pop(request_id), outcome, end_s, error)
        self.timeline.over = self.idle

    @property
    def idle(self) -> bool:
        """Nothing is to come, and every request has ended."""
        return not self.open and not self.timeline.num_expected

    # ---- the gateway ------------------------------------------------------------------------------------------------

    def start_gateway(self) -> None:
        self._gateway_epoch += 1
        self.router = self._fleet.new_router(self._gateway_epoch)
        self.admission = AdmissionController(self._admission_config, room=self._fleet.capacity(self.router))
        self.timeline.at(self.timeline.now_fs + self._tick_fs, TICK, GATEWAY, self._tick, self._gateway_epoch)

    def kill_coordinator(self) -> None:
        """Gateways keep their clients. What the log had not said yet is lost."""
        self.router, self._taking_over = None, True
        self.observer.coordinator_died()

    def take_over(self) -> None:
        """By the standby: each gateway tells it of its open requests."""
        now_s, opened = self.timeline.now_s, list(self.open.values())
        self._taking_over = False
        self.start_gateway()
        self.admission.rate_limiter.restore(self._replica.state.levels)
        self.observer.taken_over([one.arrival.request for one in opened], self._untold)
        self._untold.clear()
        for one in opened:
            request, one.admitted = one.arrival.request, False
            tokens, choices = len(request.prompt_ids), request.params.n
            prompt = Prompt(
                id=request.id, prompt_tokens=tokens, tenant=one.arrival.tenant, choices=choices, slo=request.slo
            )
            self._decide(self.admission.resume(prompt, one.held.num_tokens, now_s))

    def kill_gateway(self) -> None:
        """With the connections of all its clients."""
        self.router = None
        cut_off, self.open = self.open, {}
        self.observer.gateway_died()
        for opened in cut_off.values():
            self._ask_again(opened.arrival)

    def _tick(self, epoch: int) -> None:
        if self.router is None or epoch != self._gateway_epoch:
            return
        now_s = self.timeline.now_s
        self.do(self.router.tick(now_s))
        if self._takeovers:
            self._replica.apply(Record(levels=self.admission.rate_limiter.changes(now_s)))
            self._untold.clear()
        self._decide(self.admission.tick(now_s, self._fleet.capacity(self.router)))
        self.timeline.at(self.timeline.now_fs + self._tick_fs, TICK, GATEWAY, self._tick, epoch)

    def _decide(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            opened = self.open.get(decision.id)
            assert opened is not None and not opened.admitted, f"{decision.id}: decided about twice"
            if isinstance(decision, Admit):
                assert self.router is not None
                opened.admitted = True
                self.observer.admitted(decision.id)
                held = opened.held if opened.events else None
                self.do(self.router.submit(opened.arrival.request, self.timeline.now_s, held))
            else:
                assert decision.id not in self.admission, f"{decision.id}: refused, and still pending"
                self.observer.refused(decision.id, decision.error)
                self._ask_again(opened.arrival, decision.error)
                self._close(decision.id, REFUSED, decision.error)

    def do(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Send():
                    self._fleet.send(output.worker_id, output.message)
                case Emit():
                    self._token(output.event)
                case Fail():
                    request_id, error = output.request_id, output.error
                    self.observer.failed(request_id, error)
                    self._ask_again(self.open[request_id].arrival, error)
                    self._decide(self.admission.cancelled(request_id, self.timeline.now_s))
                    self._close(request_id, REFUSED if error.code == "overloaded" else FAILED, error)
                case ToSupervisor():
                    self._fleet.suspected(output.message.worker_id)

    def _token(self, event: TokenEvent) -> None:
        request_id, now_s = event.request_id, self.timeline.now_s
        self.observer.token(event)
        opened = self.open[request_id]
        if self._takeovers:
            opened.events.setdefault(event.choice, []).append(event)
        begun = opened.first_s is not None
        if not begun:
            opened.first_s, opened.cached_tokens = now_s + self._to_client_s, event.num_cached_tokens
            fetched = event.stages.fetched_tokens if event.stages is not None else 0
            opened.fetched_tokens = min(fetched, event.num_cached_tokens)
        if not begun or self._takeovers:
            uncached = len(opened.arrival.request.prompt_ids) - event.num_cached_tokens
            self._decide(self.admission.first_token(request_id, uncached, now_s))
        if event.finish_reason is not None:
            opened.choices -= 1
            if opened.choices:
                self.admission.answered(request_id, event.index + 1, now_s)
            else:
                self._decide(self.admission.finished(request_id, event.index + 1, now_s))
                self._close(request_id, DONE)
