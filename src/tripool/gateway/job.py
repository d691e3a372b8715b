"""One HTTP request for tokens, parsed: what to compute, and how to answer. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tripool.core import Request

Api = Literal["chat", "completion", "messages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    """As the body names it, such as `chatcmpl-...`."""
    request_id: str
    """The client's own, or one drawn for it: what `X-Request-Id` says and `explain` finds."""
    key: str
    """Drawn here: two clients may choose the same `request_id`, and nothing inside may mix them up."""
    api: Api
    requests: tuple[Request, ...]
    """One per prompt; a choice's index over HTTP is prompt index x n + choice."""
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    """Usage so far in every chunk."""
    return_token_ids: bool = False
    echoes: tuple[str, ...] = ()
    """Each prompt's text, when answers are to begin with it."""
    calls: bool = False
    """Whether answers may hold tool calls."""
    thinks: bool | None = None
    """Whether reasoning is split off: None when not, else whether the prompt ends inside of it."""
