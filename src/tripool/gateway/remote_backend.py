"""One model's backend in another process: what a gateway asks of the coordinator, through its link. Decides nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from tripool.core import Request, ServingStats, TokenEvent
from tripool.errors import AboveRateLimit, ContextOverflow, EngineStopped
from tripool.fabric.gateway_wire import AdmissionStatus, ModelStatus
from tripool.gateway.backend import Facts
from tripool.gateway.coordinator_link import CoordinatorLink
from tripool.gateway.metrics import histogram_family
from tripool.router.answer_limits import answer_tokens, check_answers
from tripool.router.kept_types import Keyed
from tripool.router.rate_limiter import RateLimiter
from tripool.router.service import ERRORS_S
from tripool.tenants import Tenant
from tripool.token_stream import TokenStream, Watcher

_NOTHING = ModelStatus("", 0, 0, ServingStats(), AdmissionStatus({}, 1.0, (0,) * (len(ERRORS_S) + 1), 0.0), ())


class RemoteBackend:
    """`tenant_of` finds a tenant, with its current limits, by its name."""

    def __init__(
        self,
        model: str,
        link: CoordinatorLink,
        tenant_of: Callable[[str], Tenant],
        *,
        more: Callable[[Callable[[], set[str]], dict[str, str]], Iterable[Metric]] = lambda of, labels: (),
    ) -> None:
        """`more`: metrics of the instances that `of` names, under labels."""
        self._model, self._link, self._tenant_of, self._more = model, link, tenant_of, more
        self._refusing: str | None = None

    @property
    def _status(self) -> ModelStatus:
        return self._link.models.get(self._model, _NOTHING)

    # ---- Backend ----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._refusing is None

    @property
    def context_tokens(self) -> int:
        return self._status.context_tokens

    @property
    def slots(self) -> int | None:
        return self._status.slots or None

    async def stream(
        self, *requests: Request, watcher: Watcher | None = None, keyed: Keyed | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        if self._refusing is not None:
            raise EngineStopped(self._refusing)
        self._check_lengths(requests)
        tenant = self._tenant_of(requests[0].slo.tenant)
        stream = TokenStream(requests, watcher)
        try:
            self._link.submit(self._model, requests, tenant, stream, keyed)
            while (event := await stream.read()) is not None:
                yield event
        finally:
            for request_id in tuple(stream.choices_left):
                self._link.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        self._link.cancel(request_id)

    def stopped(self, request_id: str, lengths: tuple[int, ...]) -> None:
        """A request with an idempotency key ends here: a stop string was found."""
        self._link.stopped(request_id, lengths)

    def stats(self) -> ServingStats:
        if self._link.welcome:
            return self._status.stats
        return ServingStats(missing="there is no coordinator")

    def explain(self, request_id: str) -> Facts:
        """The coordinator knows, and is asked by `explained`."""
        return {}

    async def explained(self, request_id: str) -> Facts:
        """Where the request runs or ran and why, as far as the coordinator remembers."""
        facts: Facts = msgspec.json.decode(await self._link.ask("explain", name=request_id))
        return facts

    # ---- admission --------------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        """Accept no new request; open ones go on."""
        self._refusing = self._refusing or why

    async def enter(self, tenant: Tenant) -> None:
        """Count a request before anything of it is read. Raises RateLimited. Only tenants with a limit wait for it."""
        current = self._tenant_of(tenant.name)
        if current.limits.requests_per_minute is not None:
            await self._link.ask("enter", tenant=current)

    def read(self, tenant: Tenant, num_bytes: int) -> None:
        """A request's body was read."""
        current = self._tenant_of(tenant.name)
        if current.limits.tokens_per_minute is not None:
            self._link.charge(current, num_bytes)

    def check(self, requests: Sequence[Request]) -> None:
        """Raises the errors that can be found before anything is prepared for the requests."""
        self._check_lengths(requests)
        context_tokens, tenant = self.context_tokens, self._tenant_of(requests[0].slo.tenant)
        check_answers(requests, context_tokens)
        if requests[0].slo.background:
            return
        amount = sum(len(request.prompt_ids) + answer_tokens(request, context_tokens) for request in requests)
        error = RateLimiter().refusal(tenant, 0, amount, 0.0)  # of a full bucket: what it can never hold
        if isinstance(error, AboveRateLimit):
            raise error

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        """Checks all prompts before the first begins: one that is too long fails the whole request."""
        longest = max(len(request.prompt_ids) for request in requests)
        if 0 < self.context_tokens <= longest:
            hint = f"at most {self.context_tokens - 1} prompt tokens fit; shorten the prompt or give more KV memory"
            raise ContextOverflow.of(self.context_tokens, f"the prompt has {longest} tokens", hint=hint)

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def families(self, labels: dict[str, str]) -> Iterator[Metric]:
        """Prometheus metrics of the coordinator's admission, the same from every gateway."""
        status = self._status
        waiting = GaugeMetricFamily("tripool_admission_waiting", "Waiting requests.", labels=[*labels, "tenant"])
        for name, number in status.admission.waiting.items():
            waiting.add_metric([*labels.values(), name], number)
        yield waiting
        index = GaugeMetricFamily("tripool_fairness_index", "Jain's index of the last minute.", labels=list(labels))
        index.add_metric(list(labels.values()), status.admission.fairness)
        yield index
        name, about = "tripool_ttft_prediction_error_seconds", "Error of predicted times to first token."
        errors = status.admission
        yield histogram_family(name, about, labels, ERRORS_S, errors.errors, errors.errors_s)
        yield from self._more(lambda: set(status.instances), labels)
