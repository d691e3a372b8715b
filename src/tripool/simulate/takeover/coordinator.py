"""One run of a coordinator's process in virtual time: a standby that follows the log, then a leader that decides."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tripool.errors import TripoolError
from tripool.messages import AnyMessage, WorkerId
from tripool.router import Emit, Fail, Output, Send, ToSupervisor
from tripool.router.gateway_session import Resumption, Submission
from tripool.router.kept import KeptAnswers
from tripool.router.kept_log import news, restore
from tripool.router.replica import Lease, Record, Replica
from tripool.router.service import ModelService
from tripool.router.sessions import ForGateway, Sessions
from tripool.simulate.takeover.scenario import KEPT

if TYPE_CHECKING:
    from tripool.simulate.takeover.gateway import Line
    from tripool.simulate.takeover.world import TakeoverWorld

TICK_S, LOG_S, STATUS_S, LOOK_S, FOLLOW_S = 0.05, 0.05, 0.25, 0.05, 0.5


class CoordinatorRun:
    """`do` is the only way in: what comes while the process is stopped waits, and before anything is decided the leader
    looks whether it still leads."""

    def __init__(self, world: TakeoverWorld, slot: int) -> None:
        self.world, self.slot = world, slot
        self.dead = self.stopped = False
        self.leads = False
        self.epoch = 0
        self.replica = Replica()
        self.standby: CoordinatorRun | None = None
        """That gets the leader's log."""
        self.lines: dict[bytes, Line] = {}
        self.untold: Counter[str] = Counter()
        """Requests by tenant that were let in since the log said something that arrived."""
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._follows: CoordinatorRun | None = None
        self._asked_s = self._heard_s = float("-inf")
        self._lease = Lease(world.now_s)
        if world.arbiter.owner is None:
            self._lead()
        else:
            self._every(LOOK_S, self._look)

    def do(self, action: Callable[..., None], *args: Any) -> None:
        if self.dead:
            return
        if self.stopped:
            self._waiting.append((action, args))
        elif not self.leads or self._may_decide():
            action(*args)

    def stop(self) -> None:
        self.stopped = True

    def wake(self) -> None:
        if self.stopped and not self.dead:
            self.stopped = False
            self.world.seen["a leader woke up"] += self.leads
            self.world.seen["a leader woke up after its successor led"] += self.leads and not self._is_leader
            while self._waiting and not self.stopped:
                action, args = self._waiting.popleft()
                self.do(action, *args)

    def _every(self, every_s: float, action: Callable[[], None]) -> None:
        def turn() -> None:
            if self.dead:
                return
            self.do(action)
            self.world.timeline.call_at(self.world.now_s + every_s, turn)

        self.world.timeline.call_at(self.world.now_s + every_s, turn)

    # ---- a standby --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        world, now_s = self.world, self.world.now_s
        if self.leads:
            return
        leader = world.arbiter.owner
        if leader is None or leader.dead:
            self._lead()
            return
        if now_s - max(self._asked_s, self._heard_s) > FOLLOW_S:
            self._asked_s = now_s
            world.between_coordinators(leader, leader.follow, self)
        if self._follows is leader and self._lease.is_over(now_s, stopped=leader.stopped):
            world.note(f"the standby ends the silent leader of epoch {leader.epoch}")
            self._lease.renew(now_s)
            world.end_silent(leader, self)

    def hear(self, leader: CoordinatorRun, record: Record, told: Counter[str], everything: bool) -> None:
        if self.leads:
            return
        if everything:
            self._follows, self.replica = leader, Replica()
        elif self._follows is not leader:
            return
        self._heard_s = self.world.now_s
        self._lease.renew(self.world.now_s)
        self.replica.apply(record)
        leader.untold -= told
        self.world.seen["records"] += bool(record)

    # ---- a leader ---------------------------------------------------------------------------------------------------

    @property
    def _is_leader(self) -> bool:
        return self.epoch == self.world.arbiter.epoch

    def _may_decide(self) -> bool:
        if self._is_leader or self.world.scenario.blind:
            return True
        self.world.note(f"the leader of epoch {self.epoch} finds another one, and ends")
        self.world.seen["a leader found another one"] += 1
        self.world.coordinator_died(self)
        return False

    def _lead(self) -> None:
        world, base = self.world, self.world.scenario.base
        world.succeeds(self._follows)
        self.epoch = world.arbiter.lead(self)
        world.note(f"epoch {self.epoch} leads")
        self.leads = True
        self.service = ModelService(base.router, epoch=self.epoch, admission=base.admission)
        self.sessions = Sessions({"m": self.service}, KeptAnswers(KEPT))
        state = self.replica.state
        self.service.admission.rate_limiter.restore(state.levels)
        self.service.restore(self.replica, "m")
        restore(self.sessions.kept, state.kept, world.now_s)
        self.sessions.counts = {count.id: (count, None) for count in state.counts}
        world.led(self)
        self._every(TICK_S, self._tick)
        self._every(STATUS_S, self._tell)
        self._every(LOG_S, self._write_log)

    def carry_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case Emit(event):
                    self.sessions.emit(event)
                case Fail(request_id, error):
                    self.sessions.fail(request_id, error)
                case Send(worker_id, message):
                    self.world.decided(self)
                    self.world.network.send_to_worker(worker_id, message, self.slot)
                case ToSupervisor(message):
                    self.world.fleet.suspected(message.worker_id)
        while self.sessions.unsettled:
            self.carry_out(self.sessions.settle(self.world.now_s))
        unsent, self.sessions.unsent = self.sessions.unsent, []
        for session in unsent:
            items, session.out = session.out, []
            line = self.lines.get(session.line)
            if items and line is not None:
                self.world.decided(self)
                line.to_gateway(items)

    def _tick(self) -> None:
        self.carry_out(self.service.tick(self.world.now_s))

    def _tell(self) -> None:
        items: list[ForGateway] = []
        for line in self.lines.values():
            line.to_gateway(items)
        self.carry_out(self.sessions.tick(self.world.now_s))

    def _write_log(self) -> None:
        record, standby = self.record(), self.standby
        if standby is not None and not self.world.between_coordinators(
            standby, standby.hear, self, record, Counter(self.untold), False
        ):
            self.standby = None  # the connection ended: it asks again

    def record(self, *, everything: bool = False) -> Record:
        levels = self.service.admission.rate_limiter.changes(self.world.now_s, everything=everything)
        counts, counted, removed = self.sessions.count_news(everything=everything)
        return Record(
            levels, self.service.admission.queue.changes("m", everything=everything),
            self.service.coordinator.troubles(everything=everything),
            news(self.sessions.kept, everything=everything), removed, counts, counted,
        )  # fmt: skip

    def follow(self, standby: CoordinatorRun) -> None:
        if self.leads and self.standby is not standby:
            self.standby = standby
            told = self.record(everything=True), Counter(self.untold)
            self.world.between_coordinators(standby, standby.hear, self, *told, True)

    # ---- workers, the supervisor, gateways --------------------------------------------------------------------------

    def from_worker(self, worker_id: WorkerId, message: AnyMessage) -> None:
        if self.leads:
            self.carry_out(self.service.receive(message, self.world.now_s))

    def trusts(self, worker_id: WorkerId) -> bool:
        return self.leads and worker_id in self.service.coordinator.view

    def hello(self, line: Line) -> None:
        if self.leads and line.alive:
            self.lines[line.identity] = line
            self.sessions.joined(line.identity)
            line.welcome(self.epoch)

    def from_gateway(self, line: Line, message: Any) -> None:
        if line.identity not in self.lines:
            return
        now_s, sessions = self.world.now_s, self.sessions
        match message:
            case Submission():
                self.carry_out(self._submit(line, message))
            case Resumption():
                head = (message.model, message.request, message.tenant, message.held, now_s)
                self.carry_out(sessions.resume(line.identity, *head, message.keyed, message.place))
            case ("cancel", request_id):
                self.carry_out(sessions.cancel(line.identity, request_id, now_s))
            case ("counted", count_id):
                sessions.counted(count_id)

    def _submit(self, line: Line, submission: Submission) -> list[Output]:
        """As a gateway asks: a request is counted before it is submitted, unless its key has come before."""
        tenant, keyed, now_s = submission.tenant, submission.keyed, self.world.now_s
        if keyed is None or not self.sessions.kept.repeats(tenant.name, keyed.name):
            error = self.service.admission.enter(tenant, now_s)
            if error is not None:
                return self._refuse(line, submission, error)
            self.untold[tenant.name] += 1
            self.world.let_in(tenant)
        return self.sessions.submit(line.identity, submission.model, submission.requests, tenant, now_s, keyed)

    def _refuse(self, line: Line, submission: Submission, error: TripoolError) -> list[Output]:
        line.refuse([request.id for request in submission.requests], error)
        return []

    def gone(self, line: Line) -> None:
        if self.lines.pop(line.identity, None) is not None:
            self.carry_out(self.sessions.gone(line.identity, self.world.now_s))

    def check(self) -> None:
        if self.leads and not self.stopped:
            self.service.check(self.world.now_s)
            self.sessions.check()

    @property
    def holds_nothing(self) -> bool:
        if not self.leads:
            return True
        return not (len(self.service) or len(self.sessions.kept) or self.sessions.counts)
