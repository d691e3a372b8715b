"""Tenants, their keys and limits, as read from the key store. Pure: the clock is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest

from tripool.cache import PUBLIC_NAMESPACE, namespace_tag

PUBLIC_SHARE = 0.25
"""Of every member, for public blocks: no tenant's quota counts them, so they need a bound of their own."""


def spread(cache_bytes: int, slot_bytes: int, num_members: int) -> list[int]:
    """Slots at each member; all together never more bytes than given."""
    each, left = divmod(cache_bytes // slot_bytes, num_members)
    return [each + (number < left) for number in range(num_members)]


def tables(
    tenants: Iterable[Tenant], members: Sequence[str], slot_bytes: int, num_slots: Mapping[str, int]
) -> dict[str, dict[bytes, int]]:
    """By member: most slots by namespace tag. Tenants without a quota have no line and no bound but the pool's size.

    Members that are away have their share all the same: quotas do not move when one comes or goes.
    """
    public = namespace_tag(PUBLIC_NAMESPACE)
    table = {name: {public: int(num_slots.get(name, 0) * PUBLIC_SHARE)} for name in members}
    for tenant in tenants:
        if tenant.limits.cache_bytes is not None:
            shares = spread(tenant.limits.cache_bytes, slot_bytes, len(members))
            for name, slots in zip(members, shares, strict=True):
                table[name][namespace_tag(tenant.namespace)] = slots
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a tenant. None: no limit of its own."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Prompt and answer; cached prompt tokens are not counted."""
    cache_bytes: int | None = None
    """In the cache pool, all members together."""
    weight: float = 1.0
    """Share of the work and of the slots in a batch, while tenants compete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    namespace: str
    """Salt of its cache blocks; derived from the authenticated key, never from a client's field."""
    limits: Limits = Limits()
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    """Default SLO of requests that set none."""
    public_prefix: bool = False
    """Opted in: the blocks of its system prompts are shared with other tenants that did."""


ANONYMOUS = Tenant(name="", namespace="")
"""The tenant of all requests on a server without keys."""


KEY_MARK = "tp-"
MAX_KEY_CHARS = 256
"""Longer ones are refused without hashing."""
_HEAD_BYTES = 8


def key_digest(pepper: bytes, key: str) -> bytes:
    """The digest that is stored of a key.

    A fast hash is right here: slow ones protect passwords, which can be guessed. A key has 256 random bits and cannot
    be guessed at any speed; a slow hash would only delay every request. It is keyed with the store's own random bytes,
    so that digests of two stores cannot be compared.
    """
    return blake2b(key.encode(), key=pepper, digest_size=32, person=b"tripool-key").digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is stored of one; the key itself is shown once and not stored."""

    prefix: str
    """Its first characters, for people to tell keys apart."""
    tenant: str
    digest: bytes
    admin: bool = False
    created_s: float = 0.0
    last_used_s: float | None = None
    expires_s: float | None = None
    revoked_s: float | None = None

    def is_good(self, now_s: float) -> bool:
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, by its key."""

    tenant: Tenant
    key: str = ""
    """Prefix of the key; empty on a server without keys."""
    admin: bool = False


OPEN_CALLER = Caller(tenant=ANONYMOUS, admin=True)
"""The caller on a server without keys: everyone is the operator."""


class KeyTable:
    """Immutable. `generation` grows with every change of the store."""

    def __init__(
        self, tenants: Iterable[Tenant] = (), keys: Iterable[Key] = (), *, pepper: bytes = b"", generation: int = 0
    ) -> None:
        self.generation = generation
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self.keys = tuple(keys)
        """All that were ever created, including revoked ones."""
        self.pepper = pepper
        self._by_head: dict[bytes, list[Key]] = {}
        for key in self.keys:
            self._by_head.setdefault(key.digest[:_HEAD_BYTES], []).append(key)

    def find(self, presented: str, now_s: float) -> Caller | None:
        """The caller with this key; None for an unknown, revoked or expired one.

        Timing reveals nothing about keys: the lookup uses the head of a keyed digest, which callers cannot control, and
        the rest is compared in constant time.
        """
        if not presented.startswith(KEY_MARK) or len(presented) > MAX_KEY_CHARS:
            return None
        digest = key_digest(self.pepper, presented)
        for key in self._by_head.get(digest[:_HEAD_BYTES], ()):
            if compare_digest(key.digest, digest) and key.is_good(now_s):
                return Caller(tenant=self.tenants[key.tenant], key=key.prefix, admin=key.admin)
        return None
