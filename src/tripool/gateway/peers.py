"""The other gateways of a server, and what they are asked: counters, load, explanations, stored responses.

A request may come to any gateway. What only the one knows that served an earlier request, the others ask it for,
through the coordinator. A server of one process has no others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tripool.gateway.coordinator_link import CoordinatorLink, NoCoordinator

Answer = Callable[[Any], Awaitable[Any]]
"""From what was asked to what is known of it here; None: nothing. Both are JSON."""


class Peers:
    def __init__(self, link: CoordinatorLink | None = None) -> None:
        self._link = link

    @property
    def draining(self) -> bool:
        """Whether the whole server refuses new requests."""
        return self._link is not None and self._link.draining

    async def drain(self, draining: bool) -> None:
        """All gateways, those to come included. Raises NoCoordinator."""
        if self._link is not None:
            await self._link.ask("drain" if draining else "undrain")

    def answer(self, what: str, answer: Answer) -> None:
        """How this gateway answers such questions."""

        async def reply(body: bytes) -> bytes:
            found = await answer(msgspec.json.decode(body))
            return b"" if found is None else msgspec.json.encode(found)

        if self._link is not None:
            self._link.answers[what] = reply

    async def ask(self, what: str, about: Any = None) -> list[Any]:
        """What the others know; those that do not answer within a second count as knowing nothing."""
        if self._link is None:
            return []
        try:
            replies = await self._link.ask_others(what, msgspec.json.encode(about))
        except NoCoordinator:
            return []
        return [msgspec.json.decode(reply) for reply in replies if reply]

    async def find(self, what: str, about: Any) -> Any:
        """What the first of them knows; None: nothing."""
        return next(iter(await self.ask(what, about)), None)
