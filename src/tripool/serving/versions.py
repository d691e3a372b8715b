"""The versions of a registered model for a server of one process: a `VersionSource` over the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from tripool.gateway.models import Served

if TYPE_CHECKING:
    from tripool.checkpoints import Registered, Registry

T = TypeVar("T")


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
