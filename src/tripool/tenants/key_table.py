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


KEY_MARK = "tp-"
MAX_KEY_CHARS = 256
"""Longer ones are nobody's, and are not hashed to find that out."""
_HEAD_BYTES = 8


def key_digest(pepper: bytes, key: str) -> bytes:
    """How a key is kept.

    A fast hash is right here: slow ones protect words that people choose, which can be guessed one by one. A key has
    256 random bits, and guessing those is hopeless at any speed; a slow hash would only slow down every request. It is
    keyed with the book's own random bytes, so that digests of two books cannot be compared.
    """
    return blake2b(key.encode(), key=pepper, digest_size=32, person=b"tripool-key").digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """All that is kept of one; the key itself is shown once and then nowhere."""

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
    """Who sent a request, as its key says."""

    tenant: Tenant
    key: str = ""
    """Prefix of the key; empty on a server without keys."""
    admin: bool = False


NOBODY = Caller(tenant=ANONYMOUS, admin=True)
"""Everybody, on a server without keys: there everyone is the operator."""


class KeyTable:
    """Immutable. `generation` grows with every change of the book."""

    def __init__(
        self, tenants: Iterable[Tenant] = (), keys: Iterable[Key] = (), *, pepper: bytes = b"", generation: int = 0
    ) -> None:
        self.generation = generation
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self.keys = tuple(keys)
        """All that were ever made, revoked ones too."""
        self._pepper = pepper
        self._by_head: dict[bytes, list[Key]] = {}
        for key in self.keys:
            self._by_head.setdefault(key.digest[:_HEAD_BYTES], []).append(key)

    def find(self, presented: str, now_s: float) -> Caller | None:
        """Whose key this is; None for one that is unknown, revoked or expired.

        How long it takes says nothing about keys: what is looked up is the head of a keyed digest, which nobody outside
        can steer, and the rest is compared in constant time.
        """
        if not presented.startswith(KEY_MARK) or len(presented) > MAX_KEY_CHARS:
            return None
        digest = key_digest(self._pepper, presented)
        for key in self._by_head.get(digest[:_HEAD_BYTES], ()):
            if compare_digest(key.digest, digest) and key.is_good(now_s):
                return Caller(tenant=self.tenants[key.tenant], key=key.prefix, admin=key.admin)
        return None
