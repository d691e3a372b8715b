"""The real admission control in virtual time, before the coordinator, with checks of its decisions. Pure.

Checks from outside: no request is decided about twice or overtaken by one of its tenant and priority, a refused one
was never begun, and no tenant exceeds its rate.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from tripool.config import AdmissionConfig
from tripool.core import Request, TokenEvent
from tripool.errors import TripoolError
from tripool.router import Coordinator
from tripool.router.admission import AdmissionController
from tripool.router.admission_types import Admit, Arrival, Capacity, Decision
from tripool.tenants import Tenant


class SimAdmission:
    """`admit` is called with each admitted request, `refuse` with each refused one."""

    def __init__(
        self,
        config: AdmissionConfig,
        tenants: dict[str, Tenant],
        now_s: float,
        *,
        minds_slots: bool,
        admit: Callable[[Request], None],
        refuse: Callable[[Request, TripoolError], None],
    ) -> None:
        self.admission = AdmissionController(config)
        self._tenants, self._opened_s = tenants, now_s
        self._minds_slots = minds_slots
        self._admit, self._refuse = admit, refuse
        self._waiting: dict[str, Request] = {}
        self._inside: dict[str, list[int]] = {}
        """Tokens of each unfinished choice of the admitted requests."""
        self._lines: dict[tuple[str, int], deque[str]] = {}
        """Waiting requests by tenant and priority, in order of arrival."""
        self._num_taken: Counter[str] = Counter()
        """Requests of each tenant that passed its rate limit."""
        self.num_waited = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def arrive(self, request: Request, now_s: float) -> None:
        slo = request.slo
        refused = self.admission.enter(self._tenants[slo.tenant], now_s)
        if refused is not None:
            self._refuse(request, refused)
            return
        self._waiting[request.id] = request
        self._lines.setdefault((slo.tenant, slo.priority), deque()).append(request.id)
        self._num_taken[slo.tenant] += 1
        arrival = Arrival(
            id=request.id,
            prompt_tokens=len(request.prompt_ids),
            tenant=self._tenants[slo.tenant],
            choices=request.params.n,
            slo=slo,
        )
        self._do(self.admission.arrive(arrival, now_s))
        self.num_waited += request.id in self._waiting

    def token(self, request: Request, event: TokenEvent, now_s: float) -> None:
        left = self._inside[request.id]
        if event.index == 0:
            self._do(self.admission.first_token(request.id, len(request.prompt_ids) - event.num_cached_tokens, now_s))
        left[event.choice] += 1
        if event.finish_reason is not None:
            self.admission.answered(request.id, left[event.choice], now_s)
            left[event.choice] = -1
            if all(count < 0 for count in left):
                self.gone(request.id, now_s)

    def gone(self, request_id: str, now_s: float) -> bool:
        """Finished, failed or cancelled. True if it was not admitted yet."""
        waited = self._waiting.pop(request_id, None)
        if waited is not None:
            self._lines[waited.slo.tenant, waited.slo.priority].remove(request_id)
        self._inside.pop(request_id, None)
        self._do(self.admission.cancelled(request_id, now_s))
        return waited is not None

    def tick(self, coordinator: Coordinator, now_s: float) -> None:
        decode = [m for m in coordinator.view if m.hello.role == "decode" and not m.draining]
        slots = sum(m.hello.max_running for m in decode) if self._minds_slots else 0
        self._do(self.admission.tick(now_s, Capacity(max(1, coordinator.view.num_ready("prefill")), slots or None)))

    def check(self, now_s: float) -> None:
        self.admission.check(now_s)
        assert self.admission.num_waiting == len(self._waiting), "admission has lost a request"
        for name, number in self._num_taken.items():
            per_minute = self._tenants[name].limits.requests_per_minute or float("inf")
            most = per_minute * (1 + (now_s - self._opened_s) / 60)
            assert number <= most + 1e-6, f"'{name}' got {number} requests through, and may {most:.1f}"
        assert all(request_id in self.admission for request_id in (*self._waiting, *self._inside))

    def _do(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            request = self._waiting.pop(decision.id, None)
            assert request is not None, f"{decision.id}: decided about twice"
            line = self._lines[request.slo.tenant, request.slo.priority]
            if isinstance(decision, Admit):
                assert line[0] == decision.id, f"{decision.id} overtakes {line[0]}"
                line.popleft()
                self._inside[request.id] = [0] * request.params.n
                self._admit(request)
            else:
                line.remove(decision.id)
                assert decision.id not in self.admission, "refused, and still pending"
                self._refuse(request, decision.error)
