"""The models behind one gateway, by name, and which of them a body names. Independent of loading and memory.

`ModelControl` loads and unloads them: `Fixed` never does, `gateway/model_manager.py` keeps to a memory budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from tripool.core import Request, ServingStats
from tripool.errors import InvalidRequest, ModelNotFound, TripoolError
from tripool.gateway.admission import AdmissionBackend
from tripool.gateway.backend import Backend
from tripool.gateway.metrics import Metrics
from tripool.gateway.parse import Parser
from tripool.gateway.remote_backend import RemoteBackend
from tripool.gateway.tokens import TokenService
from tripool.tenants import Tenant
from tripool.text import Tokenizer


class ModelStays(TripoolError, status=409, code="model_stays"):
    """This server was started for one model and cannot load or unload."""


class ModelControl(Protocol):
    """Decides which models are in memory. Names are those of the registry."""

    def describe(self, name: str) -> dict[str, Any]:
        """At least `state`: ready, loading, draining, unloaded or failed."""
        ...

    async def load(self, name: str) -> None:
        """Returns when it is ready, or raises a typed error."""
        ...

    async def unload(self, name: str) -> None:
        """Returns when its open requests have ended and its memory is free."""
        ...


class OpenRequests:
    """Counts open requests. For one event loop: no lock."""

    def __init__(self) -> None:
        self.num_open = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class Served:
    """One model as the application sees it. The tokenizer is available even while the weights are unloaded."""

    def __init__(self, name: str, backend: Backend, tokenizer: Tokenizer) -> None:
        self.name, self.backend, self.tokenizer = name, backend, tokenizer
        self.parser = Parser(tokenizer, name, lambda: backend.context_tokens)
        self.tokens = TokenService(self.parser, tokenizer, lambda: backend.context_tokens)
        more = backend.families if isinstance(backend, (AdmissionBackend, RemoteBackend)) else None
        self.open = OpenRequests()
        self.metrics = Metrics(name, backend.stats, lambda: self.open.num_open, more)

    def check(self, requests: Sequence[Request]) -> None:
        """Raises the errors that can be found before anything is prepared for the requests."""
        if isinstance(self.backend, (AdmissionBackend, RemoteBackend)):
            self.backend.check(requests)


class Fixed:
    """Models that stay loaded as long as the server runs."""

    def __init__(self, served: Sequence[Served]) -> None:
        self._served = {one.name: one for one in served}

    def describe(self, name: str) -> dict[str, Any]:
        return {"state": "ready" if self._served[name].backend.alive else "failed"}

    async def load(self, name: str) -> None:
        """Already loaded."""

    async def unload(self, name: str) -> None:
        hint = "a server of one process that is given several models loads and unloads them"
        raise ModelStays(f"'{name}' stays loaded as long as this server runs", hint=hint)


class _Name(msgspec.Struct):
    """The only field read before the model of a body is known."""

    model: str | None = None


def check_names(names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = "give them folders or files of different names"
        raise InvalidRequest(f"two models are named '{twice}'", hint=hint, param="model")


class Models:
    """The first is the default."""

    def __init__(self, served: Sequence[Served], control: ModelControl | None = None) -> None:
        assert served, "a gateway without a model"
        self._served = {one.name: one for one in served}
        check_names([one.name for one in served])
        self.default = served[0]
        self.control: ModelControl = control or Fixed(served)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def find(self, name: str) -> Served:
        name = name if name in self._served else name.removesuffix(":latest")  # a tag that Ollama's clients add
        if name not in self._served:
            known = ", ".join(f"'{one}'" for one in self._served)
            raise ModelNotFound(f"there is no model '{name[:100]}'", hint=f"this server has {known}")
        return self._served[name]

    def meant_by(self, raw: bytes) -> Served:
        """The model that a body names. An unreadable body goes to the default model, whose parser reports the error."""
        if len(self._served) == 1:
            return self.default
        try:
            name = msgspec.json.decode(raw, type=_Name).model
        except (msgspec.DecodeError, RecursionError):  # DecodeError: also for a `model` that is not a string
            return self.default
        return self.default if name is None else self.find(name)

    async def enter(self, tenant: Tenant) -> None:
        """Count a request of its tenant, before anything of it is read. Raises RateLimited."""
        backend = self.default.backend  # a tenant's rates apply to all models together
        if isinstance(backend, AdmissionBackend):
            backend.enter(tenant)
        elif isinstance(backend, RemoteBackend):
            await backend.enter(tenant)

    def read(self, tenant: Tenant, num_bytes: int) -> None:
        """Charge the tenant for reading a body."""
        if isinstance(self.default.backend, (AdmissionBackend, RemoteBackend)):
            self.default.backend.read(tenant, num_bytes)

    # ---- all models together ----------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return all(one.backend.alive for one in self)

    def stats(self) -> ServingStats:
        """Sums; of ratios and stalls the worst."""
        several = [one.backend.stats() for one in self]
        sums = ("running", "waiting", "num_steps", "num_preemptions", "num_drafted", "num_accepted")
        return ServingStats(
            **{name: sum(getattr(stats, name) for stats in several) for name in sums},
            kv_usage=max(stats.kv_usage for stats in several),
            stalled_s=max(stats.stalled_s for stats in several),
            missing=next((stats.missing for stats in several if stats.missing), ""),
        )
