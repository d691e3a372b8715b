"""What the client of a request has already of its answer, as its gateway tells the next coordinator. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldChoice:
    """What the client of one choice has of it, in the hands of its gateway: a coordinator that knows nothing of the
    request takes it up from there."""

    tokens: tuple[int, ...]
    done: bool = False
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """What the client of one request has of it."""

    choices: tuple[HeldChoice, ...]
    num_cached_tokens: int | None = None
    """As its first event said; None: there was none."""

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)
