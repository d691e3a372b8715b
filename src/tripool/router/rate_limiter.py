"""Rate limits of tenants: token buckets for requests and tokens, one minute deep. Pure; time is an argument.

A bucket fills at its rate up to one minute's worth. A request is charged at once for all that it may use, and refunded
what it did not use (answer tokens not generated, prompt tokens found in the cache). A request above a full bucket never
fits. Only what is charged afterwards, reading a body, can leave a bucket in debt, and nothing is admitted until that is
paid: over any period a tenant gets its rate and at most one minute more.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Literal

from tripool.errors import AboveRateLimit, RateLimited, TripoolError
from tripool.router.replica import Level
from tripool.tenants import Limits, Tenant

Limit = Literal["requests", "tokens"]
_BYTES_PER_TOKEN = 1024
"""Of a body: reading this many costs its tenant a token."""


class Bucket:
    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = self.capacity
        self._updated_s = now_s

    @property
    def capacity(self) -> float:
        """One minute's worth, and at least 1, so that a rate below one per minute still admits a request."""
        return max(1.0, self.per_minute)

    def level(self, now_s: float) -> float:
        """Current level; below zero when in debt."""
        passed_s = max(0.0, now_s - self._updated_s)
        return min(self.capacity, self._level + passed_s * self.per_minute / 60.0)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until this amount can be taken; infinite if it exceeds the capacity."""
        if amount > self.capacity:
            return inf
        return max(0.0, (amount - self.level(now_s)) * 60.0 / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """A negative amount is a refund; the level never exceeds the capacity."""
        self._level = min(self.capacity, self.level(now_s) - amount)
        self._updated_s = max(self._updated_s, now_s)

    def change(self, per_minute: float, now_s: float) -> None:
        """Sets a new limit; the amount used stays used."""
        used = self.capacity - self.level(now_s)
        self.per_minute = per_minute
        self._level = self.capacity - used
        self._updated_s = max(self._updated_s, now_s)


class RateLimiter:
    """The buckets of all tenants, shared by all models of a server. A tenant without limits has none."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, Limit], Bucket] = {}
        self._changed: set[tuple[str, Limit]] = set()

    def wait_s(self, tenant: Tenant, tokens: float, now_s: float, *, requests: float = 1) -> tuple[float, Limit]:
        """How long so many more tokens and requests have to wait, and for which limit."""
        waits: list[tuple[float, Limit]] = [(0.0, "requests")]
        if self._is_free(tenant):
            return waits[0]
        for limit, amount in self._amounts(requests, tokens):
            bucket = self._bucket(tenant.name, limit, tenant.limits, now_s)
            if bucket is not None:
                waits.append((bucket.wait_s(amount, now_s), limit))
        return max(waits)

    def refusal(self, tenant: Tenant, requests: float, tokens: float, now_s: float) -> TripoolError | None:
        """Why this many may not be admitted now, or ever."""
        if self._is_free(tenant):
            return None
        wait_s, limit = self.wait_s(tenant, tokens, now_s, requests=requests)
        limits = tenant.limits
        if wait_s == inf:
            message = f"it asks for up to {tokens:.0f} tokens, and the limit of '{tenant.name}' is "
            message += f"{limits.tokens_per_minute:g} per minute"
            return AboveRateLimit(message, hint="send fewer prompts or choices, or a smaller max_tokens")
        if wait_s <= 0:
            return None
        per_minute = limits.requests_per_minute if limit == "requests" else limits.tokens_per_minute
        return RateLimited(f"'{tenant.name}' may use {per_minute:g} {limit} per minute", retry_after_s=wait_s)

    def read(self, tenant: Tenant, num_bytes: int, now_s: float) -> None:
        """A body was read: that takes time too, and costs a few tokens whatever comes of it."""
        self.take(tenant, 0, num_bytes / _BYTES_PER_TOKEN, now_s)

    def tokens_left(self, tenant: Tenant, now_s: float) -> float | None:
        """Tokens available now; None without a limit."""
        bucket = self._bucket(tenant.name, "tokens", tenant.limits, now_s)
        return None if bucket is None else bucket.level(now_s)

    def take(self, tenant: Tenant, requests: float, tokens: float, now_s: float) -> None:
        """Negative amounts are refunds."""
        if self._is_free(tenant):
            return
        for limit, amount in self._amounts(requests, tokens):
            bucket = self._bucket(tenant.name, limit, tenant.limits, now_s)
            if bucket is not None:
                bucket.take(amount, now_s)
                self._changed.add((tenant.name, limit))

    def level(self, name: str, limit: Limit, now_s: float) -> float | None:
        bucket = self._buckets.get((name, limit))
        return None if bucket is None else bucket.level(now_s)

    def changes(self, now_s: float, *, everything: bool = False) -> tuple[Level, ...]:
        """For a standby: the levels of buckets that were charged since the last call."""
        changed, self._changed = self._buckets if everything else self._changed, set()
        return tuple(
            Level(*key, bucket.per_minute, bucket.level(now_s), now_s)
            for key in changed
            if (bucket := self._buckets.get(key)) is not None
        )

    def restore(self, levels: Iterable[Level]) -> None:
        for one in levels:
            bucket = Bucket(one.per_minute, one.at_s)
            bucket.take(bucket.capacity - one.level, one.at_s)
            limit: Limit = "requests" if one.limit == "requests" else "tokens"
            self._buckets[one.tenant, limit] = bucket

    def check(self, now_s: float) -> None:
        for (name, limit), bucket in self._buckets.items():
            assert bucket.per_minute > 0, f"{name}: a limit of {limit} that nothing fits"
            assert bucket.level(now_s) <= bucket.capacity, f"{name}: more than a minute's {limit}"

    def _is_free(self, tenant: Tenant) -> bool:
        """Fast path for servers without limits."""
        limits = tenant.limits
        return not self._buckets and limits.requests_per_minute is None and limits.tokens_per_minute is None

    @staticmethod
    def _amounts(requests: float, tokens: float) -> tuple[tuple[Limit, float], ...]:
        return ("requests", requests), ("tokens", tokens)

    def _bucket(self, name: str, limit: Limit, limits: Limits, now_s: float) -> Bucket | None:
        per_minute = limits.requests_per_minute if limit == "requests" else limits.tokens_per_minute
        bucket = self._buckets.get((name, limit))
        if per_minute is None:
            if bucket is not None:
                del self._buckets[name, limit]
            return None
        if bucket is None:
            bucket = self._buckets[name, limit] = Bucket(per_minute, now_s)
        elif bucket.per_minute != per_minute:
            bucket.change(per_minute, now_s)
        return bucket
