"""The store of responses: what `previous_response_id`, `item_reference` and the routes by id read. In memory, bounded
in bytes, and off unless the operator gives it some; without it, `item_reference` reads `recent.py`.

Tenants see their own responses alone. When there are too many bytes, the tenant with most loses the response that was
used least recently. A response is kept with the input of its request and the id of the response before it; a
conversation is read by following these, and using it makes all its responses recent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from tripool.errors import InvalidRequest, TripoolError
from tripool.gateway.responses.items import Item
from tripool.gateway.responses.recent import RecentItems

_MAX_CHAIN = 10_000
"""Responses of one conversation: a bound on the time that reading one takes."""
_decode = msgspec.json.decode


class ResponseUnknown(TripoolError, status=404, code="response_not_found"):
    """No stored or open response has this id."""


class PreviousUnknown(InvalidRequest, code="previous_response_not_found"):
    """The conversation that a request continues is not stored, or not any more."""

    def __init__(self, response_id: str, *, hint: str) -> None:
        super().__init__(f"there is no response '{response_id[:100]}'", hint=hint, param="previous_response_id")
        self.response_id = response_id


class ItemUnknown(InvalidRequest, code="item_not_found"):
    """An item that a request refers to is not stored, or not any more."""

    def __init__(self, item_id: str, *, hint: str) -> None:
        super().__init__(f"there is no item '{item_id[:100]}'", hint=hint, param="input")
        self.item_id = item_id


class History(Protocol):
    """The stored responses of one tenant, as a request sees them."""

    def before(self, response_id: str) -> Sequence[Item]:
        """Inputs and outputs of the conversation up to this response. Raises PreviousUnknown."""
        ...

    def item(self, item_id: str) -> Item:
        """Raises ItemUnknown."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    response: bytes
    """As JSON."""
    items: bytes
    """The input of its request, as JSON."""
    item_ids: tuple[str, ...]
    """Of its output."""
    previous: str | None

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class OpenResponse(Protocol):
    """A response that is being generated."""

    def snapshot(self, status: str) -> bytes:
        """The response so far, as JSON."""
        ...

    def cancel(self) -> None:
        """Its stream ends as soon as the backend has stopped."""
        ...


class ResponseStore:
    """`max_bytes` of 0: nothing is stored; open responses are known all the same. For one event loop, but read from
    other threads: each read is one look into a dictionary."""

    def __init__(self, max_bytes: int = 0, recent: RecentItems | None = None) -> None:
        self._max_bytes, self.recent = max_bytes, recent
        self._stored: dict[str, OrderedDict[str, Stored]] = {}
        """By tenant and id, the one that was used least recently first."""
        self._num_bytes: Counter[str] = Counter()
        self._by_item: dict[tuple[str, str], str] = {}
        """From a tenant and the id of an output item to the id of its response."""
        self._open: dict[tuple[str, str], OpenResponse] = {}

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def check_invariants(self) -> None:
        kept = {tenant: sum(one.num_bytes for one in of_tenant.values()) for tenant, of_tenant in self._stored.items()}
        assert +self._num_bytes == Counter(kept), "bytes are not those of the responses"
        assert self._num_bytes.total() <= self._max_bytes
        items = {
            (t, i): r for t, of_tenant in self._stored.items() for r, one in of_tenant.items() for i in one.item_ids
        }
        assert items == self._by_item, "items are not those of the responses"

    # ---- writing ----------------------------------------------------------------------------------------------------

    def keep(self, tenant: str, response_id: str, stored: Stored) -> bool:
        """False if it alone is too large, or nothing is stored."""
        if stored.num_bytes > self._max_bytes:
            return False
        self.delete(tenant, response_id)
        self._stored.setdefault(tenant, OrderedDict())[response_id] = stored
        self._num_bytes[tenant] += stored.num_bytes
        for item_id in stored.item_ids:
            self._by_item[tenant, item_id] = response_id
        while self._num_bytes.total() > self._max_bytes:
            most = max(self._num_bytes, key=lambda name: self._num_bytes[name])
            self.delete(most, next(iter(self._stored[most])))
        return True

    def delete(self, tenant: str, response_id: str) -> bool:
        of_tenant = self._stored.get(tenant)
        stored = None if of_tenant is None else of_tenant.pop(response_id, None)
        if of_tenant is None or stored is None:
            return False
        self._num_bytes[tenant] -= stored.num_bytes
        for item_id in stored.item_ids:
            self._by_item.pop((tenant, item_id), None)
        if not of_tenant:
            del self._stored[tenant], self._num_bytes[tenant]
        return True

    @contextmanager
    def opened(self, tenant: str, response_id: str, response: OpenResponse) -> Iterator[None]:
        """While a response is generated."""
        self._open[tenant, response_id] = response
        try:
            yield
        finally:
            self.ended(tenant, response_id)

    def ended(self, tenant: str, response_id: str) -> None:
        """It is generated: from now on it is found in the store, or not at all."""
        self._open.pop((tenant, response_id), None)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def open_response(self, tenant: str, response_id: str) -> OpenResponse | None:
        return self._open.get((tenant, response_id))

    def find(self, tenant: str, response_id: str) -> Stored | None:
        of_tenant = self._stored.get(tenant)
        return None if of_tenant is None else of_tenant.get(response_id)

    def used(self, tenant: str, response_id: str | None) -> None:
        """Make a conversation recent, its first response most: without that, the others are of no use."""
        of_tenant = self._stored.get(tenant)
        for _ in range(_MAX_CHAIN):
            if of_tenant is None or response_id is None or response_id not in of_tenant:
                return
            of_tenant.move_to_end(response_id)
            response_id = of_tenant[response_id].previous

    def history(self, tenant: str) -> History:
        return _TenantHistory(self, tenant)

    def response_of(self, tenant: str, item_id: str) -> str | None:
        """The id of the stored response that has this output item."""
        return self._by_item.get((tenant, item_id))

    def item(self, tenant: str, item_id: str) -> Item | None:
        """An output item of a stored response, or a recent one."""
        response_id = self.response_of(tenant, item_id)
        stored = None if response_id is None else self.find(tenant, response_id)
        found = () if stored is None else _output(stored)
        recent = None if self.recent is None else self.recent.find(tenant, item_id)
        return next((one for one in found if one.get("id") == item_id), recent)


class _TenantHistory:
    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store, self._tenant = store, tenant
        self._hint = (
            "it was deleted, or dropped in favour of newer ones: send the whole conversation as 'input'"
            if store.is_on
            else "this server stores no responses: send the whole conversation as 'input', with \"store\": false, or "
            "start it with --response-store-mb"
        )

    def before(self, response_id: str) -> Sequence[Item]:
        parts: list[list[Item]] = []
        wanted: str | None = response_id
        while wanted is not None:
            stored = self._store.find(self._tenant, wanted) if len(parts) < 2 * _MAX_CHAIN else None
            if stored is None:
                raise PreviousUnknown(wanted, hint=self._hint)
            parts += [_output(stored), _decode(stored.items)]
            wanted = stored.previous
        return [item for part in reversed(parts) for item in part]

    def item(self, item_id: str) -> Item:
        found = self._store.item(self._tenant, item_id)
        if found is None:
            raise ItemUnknown(item_id, hint=self._hint)
        return found


NOTHING_STORED: History = ResponseStore().history("")


def _output(stored: Stored) -> list[Item]:
    output: list[Item] = _decode(stored.response)["output"]
    return output


def with_ids(items: Sequence[Item], key: str) -> list[dict[str, Any]]:
    """Input items as they are listed: each has an id, and messages have lists of parts."""
    listed = [{"id": f"in_{key}{number:04x}", "type": "message", **item} for number, item in enumerate(items)]
    for item in listed:
        if isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
    return listed
