"""One tenant: the owner of API keys, with a cache namespace and limits of its own. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a tenant may take. None: no limit of its own."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Prompt and answer; cached prompt tokens are not counted."""
    cache_bytes: int | None = None
    """In the cache pool, all members together."""
    weight: float = 1.0
    """Share of the work and of the places in a batch, when tenants compete for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    namespace: str
    """Salt of its cache blocks; derived from the authenticated key, never from a client's field."""
    limits: Limits = Limits()
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    """Defaults for requests that bring no promise of their own."""
    public_prefix: bool = False
    """Opted in: the blocks of its system prompts are shared with other tenants that did."""


ANONYMOUS = Tenant(name="", namespace="")
"""Everybody, on a server without keys."""
