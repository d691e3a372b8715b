"""The versions of a registered model for a server: a `VersionSource` over the registry.

A server of one process loads other versions when they are needed. A split one has those that it was started with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from tripool.errors import TripoolError
from tripool.gateway.models import Fixed, ModelControl, Models, Served
from tripool.gateway.versions import VersionedModel

if TYPE_CHECKING:
    from tripool.checkpoints import Registered, Registry

T = TypeVar("T")


class VersionNotStarted(TripoolError, status=409, code="version_not_started"):
    """A split server has no workers for this version."""


class RegistrySource(Generic[T]):
    """`describe` opens a checkpoint by its path in the registry, `serve` makes what it found known to the server."""

    def __init__(self, found: Registered, describe: Callable[[str], T], serve: Callable[[T], Served]) -> None:
        self.name, self._prefix = found.name, found.prefix
        self._registry: Registry = found.registry
        self._describe, self._serve = describe, serve

    def published(self) -> int | None:
        return self._registry.published(self.name)

    def publish(self, number: int) -> None:
        self._registry.publish(self.name, number)

    def content(self, number: int) -> str:
        return self._registry.version(self.name, number).content

    def describe(self, number: int) -> T:
        return self._describe(f"{self._prefix}{self._registry.version(self.name, number).label}")

    def serve(self, description: T) -> Served:
        return self._serve(description)


def add_versions(models: Models, label: str, source: RegistrySource[T], control: ModelControl) -> VersionedModel:
    """`label`: of the version that is served at first; others may have been named at the start, too."""
    parts = [(one.name.rpartition("@"), one) for one in models]
    numbered = {int(number): one for (base, _, number), one in parts if base == source.name and number.isdecimal()}
    versioned = VersionedModel(source.name, models.find(label), int(label.rpartition("@")[2]), source, control)
    versioned.known |= numbered
    models.add_versions(versioned)
    return versioned


class _Stay(Fixed):
    """Each version has workers of its own, which stay: they serve again after a roll-back."""

    async def unload(self, name: str) -> None:
        """It gets no new requests; its open answers go on."""


def follow_started(models: Models, label: str, follows: str) -> VersionedModel:
    """Of a split server: `follows` is a name of a registry."""
    from tripool.checkpoints import registered

    found = registered(follows)
    assert found is not None, "a model that is followed was found in a registry"

    def describe(model: str) -> NoReturn:
        hint = f"start it with both: tripool serve {follows} {model} --split"
        raise VersionNotStarted(f"this server was started without {model}", hint=hint)

    source: RegistrySource[None] = RegistrySource(found, describe, lambda _: models.default)
    return add_versions(models, label, source, _Stay(list(models)))
