"""Tenants' cache quotas, in slots per cache member. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tripool.cache import PUBLIC_NAMESPACE, namespace_tag
from tripool.tenants.key_table import Tenant

PUBLIC_SHARE = 0.25
"""Of every member, for public blocks: no tenant's quota counts them, so they need a bound of their own."""


def spread(cache_bytes: int, slot_bytes: int, num_members: int) -> list[int]:
    """Slots at each member; in total never more bytes than given."""
    each, left = divmod(cache_bytes // slot_bytes, num_members)
    return [each + (number < left) for number in range(num_members)]


def tables(
    tenants: Iterable[Tenant], members: Sequence[str], slot_bytes: int, num_slots: Mapping[str, int]
) -> dict[str, dict[bytes, int]]:
    """By member: most slots by namespace tag. Tenants without a quota are only bound by the pool's size.

    Members that are away keep their share: quotas do not move when a member joins or leaves.
    """
    public = namespace_tag(PUBLIC_NAMESPACE)
    table = {name: {public: int(num_slots.get(name, 0) * PUBLIC_SHARE)} for name in members}
    for tenant in tenants:
        if tenant.limits.cache_bytes is not None:
            shares = spread(tenant.limits.cache_bytes, slot_bytes, len(members))
            for name, slots in zip(members, shares, strict=True):
                table[name][namespace_tag(tenant.namespace)] = slots
    return table
