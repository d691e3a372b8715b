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
from tripool.gateway.record import Record
from tripool.gateway.remote_backend import RemoteBackend
from tripool.gateway.tokens import TokenService
from tripool.gateway.versions import NoVersions, VersionedModel
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

    def __init__(self, name: str, backend: Backend, tokenizer: Tokenizer, gateway: str = "") -> None:
        """`gateway`: its name, where a server may have several."""
        self.name, self.backend, self.tokenizer = name, backend, tokenizer
        self.parser = Parser(tokenizer, name, lambda: backend.context_tokens)
        self.tokens = TokenService(self.parser, tokenizer, lambda: backend.context_tokens)
        more = backend.families if isinstance(backend, (AdmissionBackend, RemoteBackend)) else None
        self.open = OpenRequests()
        self.metrics = Metrics(name, backend.stats, lambda: self.open.num_open, more, gateway)

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


def _base(name: str) -> str:
    return name.partition("@")[0]


class Models:
    """The first is the default."""

    def __init__(self, served: Sequence[Served], control: ModelControl | None = None) -> None:
        assert served, "a gateway without a model"
        self._served = {one.name: one for one in served}
        check_names([one.name for one in served])
        self._first = served[0]
        self._versioned: dict[str, VersionedModel] = {}
        self.control: ModelControl = control or Fixed(served)

    def add_versions(self, model: VersionedModel) -> None:
        """The name of a registered model, of which one version is served here already."""
        self._versioned[model.name] = model

    def versioned(self, name: str) -> VersionedModel:
        if name not in self._versioned:
            hint = "a server that was started with a name of the registry, without a version, has versions and canaries"
            raise NoVersions(f"'{name[:100]}' is not served from a registry here", hint=hint)
        return self._versioned[name]

    @property
    def default(self) -> Served:
        versioned = self._versioned.get(_base(self._first.name))
        return self._first if versioned is None else versioned.current

    def __iter__(self) -> Iterator[Served]:
        """With every version that was served since the start: their counters go on."""
        yield from self._served.values()
        for model in self._versioned.values():
            yield from (one for one in model.known.values() if one.name not in self._served)

    @property
    def names(self) -> dict[str, Served]:
        """Registered models that are served, by the name without a version."""
        found = {_base(name): served for name, served in reversed(self._served.items()) if "@" in name}
        return found | {name: model.current for name, model in self._versioned.items()}

    def find(self, name: str) -> Served:
        known = {one.name: one for one in self} | self.names
        name = name if name in known else name.removesuffix(":latest")  # a tag that Ollama's clients add
        if name not in known:
            listed = ", ".join(f"'{one}'" for one in known)
            raise ModelNotFound(f"there is no model '{name[:100]}'", hint=f"this server has {listed}")
        return known[name]

    def meant_by(self, raw: bytes, tenant: str | None = None) -> Served:
        """The model that a body names. An unreadable body goes to the default model, whose parser reports the error.

        `tenant`: of a request for tokens, which a canary may take.
        """
        if len(self._served) == 1 and not self._versioned:
            return self.default
        try:
            name = msgspec.json.decode(raw, type=_Name).model
        except (msgspec.DecodeError, RecursionError):  # DecodeError: also for a `model` that is not a string
            return self.default
        name = _base(self._first.name) if name is None else name.removesuffix(":latest")
        if name in self._versioned:
            model = self._versioned[name]
            return model.current if tenant is None else model.pick(raw, tenant)
        return self._first if name == _base(self._first.name) else self.find(name)

    def begun(self, served: Served, answer_id: str) -> None:
        """`answer_id`: by which a later request may name this answer."""
        if (model := self._versioned.get(_base(served.name))) is not None:
            model.begun(served, answer_id)

    def refused(self, served: Served) -> None:
        """A request for tokens that was refused before it had a record."""
        if (model := self._versioned.get(_base(served.name))) is not None:
            model.refused(served)

    def ended(self, served: Served, record: Record) -> None:
        served.metrics.ended(record)
        if (model := self._versioned.get(_base(served.name))) is not None:
            model.ended(served, record)

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
