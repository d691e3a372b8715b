"""Fair queue: weighted deficit round robin over tenants, on uncached tokens. Pure and incremental.

With a vanishing quantum, round robin orders tenants by one number each: the tokens it was given divided by its weight
(`Account.given`). The tenant with the least is next. Two rules keep that fair over time:

- A tenant that returns starts at the current level (`_level`), less a bounded credit (`credit_tokens`) for the share it
  did not use: two requests at once after an idle time are no flood. Its debt stays.
- A prompt is charged by what will probably have to be computed, and corrected once its first token shows what was
  cached.

So a tenant that asks for less than its share is served before one that asks for more, however much that one has
waiting, and two that ask for more get their shares. Within a tenant, lower priorities go first, then earlier arrivals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tripool.router.replica import Given
from tripool.tenants import Tenant


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def max_min(asked: Sequence[float], weights: Sequence[float], capacity: float) -> list[float]:
    """Weighted max-min shares of a capacity: none exceeds its demand, and unused shares are redistributed."""
    got = [0.0] * len(asked)
    left, weight = capacity, sum(weights)
    for i in sorted(range(len(asked)), key=lambda i: asked[i] / weights[i]):
        got[i] = min(asked[i], left * weights[i] / weight)
        left -= got[i]
        weight -= weights[i]
    return got


def fairness(accounts: Iterable[Account], now_s: float) -> float:
    """Jain's index of served over entitled tokens per tenant, over about the last minute."""
    known = list(accounts)
    for account in known:
        account.count(now_s)
    known = [account for account in known if account.asked_tokens >= 1.0]
    if not known:
        return 1.0
    served = [account.served_tokens for account in known]
    entitled = max_min([a.asked_tokens for a in known], [a.weight for a in known], sum(served))
    return jain([got / due for got, due in zip(served, entitled, strict=True) if due > 0])


MAX_LABELS = 20
"""Tenants with a metrics label of their own; the others are counted together."""


def waiting_by_tenant(accounts: Iterable[Account], most: int) -> dict[str, int]:
    """Waiting requests of the tenants that have most of them; the others' together as "(others)"."""
    ranked = sorted(((a.total_waiting, a.name) for a in accounts if a.num_waiting), reverse=True)
    shown, rest = {name: number for number, name in ranked[:most]}, sum(number for number, _ in ranked[most:])
    return shown | {"(others)": rest} if rest or not shown else shown


_MEMORY_S = 60.0
"""Time constant over which asked and served tokens are compared."""
_HIT_WEIGHT = 0.1
_IDLE_ACCOUNTS = 1024


@dataclass(slots=True, eq=False)
class Account:
    """One tenant in one queue."""

    name: str
    weight: float
    given: float = 0.0
    """Tokens per weight: the deficit, counted upwards."""
    version: int = 0
    """Version of its newest heap entry."""
    waiting_tokens: dict[int, float] = field(default_factory=dict)
    """By priority; no entry where nothing waits."""
    num_waiting: Counter[int] = field(default_factory=Counter)
    queue: list[tuple[int, int, str]] = field(default_factory=list)
    """(priority, serial, id); may hold stale entries."""
    num_admitted: int = 0
    num_prefilling: int = 0
    """Of the admitted requests, those without a first token."""
    slots_held: int = 0
    """Choices admitted and not ended."""
    hit_ratio: float = 0.0
    """Recent share of its prompt tokens found in the cache."""
    asked_tokens: float = 0.0
    served_tokens: float = 0.0
    """Uncached tokens over about the last minute."""
    counted_s: float = 0.0
    open_tokens: int = 0
    """Prompt and answer tokens, cached or not, of all its open requests."""

    @property
    def total_waiting(self) -> int:
        return self.num_waiting.total()

    @property
    def present(self) -> bool:
        return bool(self.num_waiting or self.num_admitted)

    @property
    def asks(self) -> float:
        """How much it currently asks of the backend, by its weight."""
        return self.open_tokens / self.weight

    def cost_of(self, prompt_tokens: int) -> float:
        """What will probably have to be computed; at least one token always is."""
        return max(1.0, prompt_tokens * (1.0 - self.hit_ratio))

    def count(self, now_s: float, *, asked: float = 0.0, served: float = 0.0) -> None:
        passed_s = now_s - self.counted_s
        if passed_s != 0.0:
            left = max(0.0, 1.0 - max(0.0, passed_s) / _MEMORY_S)
            self.asked_tokens *= left
            self.served_tokens *= left
        self.asked_tokens += asked
        self.served_tokens += served
        self.counted_s = now_s

    def learn_hits(self, prompt_tokens: int, uncached_tokens: float) -> None:
        ratio = 1.0 - min(1.0, uncached_tokens / prompt_tokens)
        self.hit_ratio += _HIT_WEIGHT * (ratio - self.hit_ratio)


@dataclass(frozen=True, slots=True)
class Waiting:
    account: Account
    priority: int
    serial: int
    cost: float


class FairQueue:
    """Waiting requests by tenant, and the order in which they are admitted."""

    def __init__(self) -> None:
        self.credit_tokens = 0.0
        self._accounts: dict[str, Account] = {}
        self._entries: dict[str, Waiting] = {}
        self._ring: list[tuple[float, int, str]] = []
        self._level = 0.0
        """`given` of the tenant served last, at that time."""
        self._highest = 0.0
        self._versions = 0
        self._serials = 0
        self.waiting_tokens = 0.0
        self.active_weight = 0.0
        """Of tenants with waiting requests."""
        self.present_weight = 0.0
        """Of tenants with waiting or admitted requests."""
        self._num_active = 0
        self._changed: set[str] = set()
        """Tenants that were given something since the last `changes`."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def get(self, name: str) -> Account | None:
        return self._accounts.get(name)

    def account(self, tenant: Tenant) -> Account:
        """Created at its first request. A new weight takes effect once the tenant has no request here."""
        account = self._accounts.get(tenant.name)
        if account is None:
            if len(self._accounts) > _IDLE_ACCOUNTS + 2 * self._num_active:
                self._forget()
            account = self._accounts[tenant.name] = Account(tenant.name, tenant.limits.weight)
            account.given = self._level - self.credit_tokens
        elif account.weight != tenant.limits.weight and not account.present:
            account.weight = tenant.limits.weight
        return account

    def _forget(self) -> None:
        """Drop tenants without requests and debt; called rarely, to keep the cost per request low."""
        for name, account in list(self._accounts.items()):
            if not account.present and account.given <= self._level:
                del self._accounts[name]

    # ---- push and pop -----------------------------------------------------------------------------------------------

    def push(self, request_id: str, account: Account, priority: int, cost: float) -> None:
        self._serials += 1
        was_present, first = account.present, not account.num_waiting
        if first:
            account.given = max(account.given, self._level - self.credit_tokens)
            self.active_weight += account.weight
            self._num_active += 1
        entry = self._entries[request_id] = Waiting(account, priority, self._serials, cost)
        account.num_waiting[priority] = account.num_waiting.get(priority, 0) + 1
        account.waiting_tokens[priority] = account.waiting_tokens.get(priority, 0.0) + cost
        heappush(account.queue, (priority, entry.serial, request_id))
        self.waiting_tokens += cost
        self._presence(account, was_present)
        if first:
            self._sort_in(account)

    def pop(self, allowed: Callable[[Account], bool]) -> str | None:
        """The next request, charged to its tenant. None: nothing waits, or no waiting tenant is allowed."""
        passed_over: list[tuple[float, int, str]] = []
        found: str | None = None
        while self._ring and found is None:
            entry = heappop(self._ring)
            account = self._accounts.get(entry[2])
            if account is None or account.version != entry[1] or not account.num_waiting:
                continue
            if not allowed(account):
                passed_over.append(entry)
                continue
            found = self._head(account)
            self._level = max(self._level, account.given)
            cost = self._entries[found].cost
            self._take_out(found, admitted=True)
            account.given += cost / account.weight
            self._highest = max(self._highest, account.given)
            self._changed.add(account.name)
            if account.num_waiting:
                self._sort_in(account)
        for entry in passed_over:
            heappush(self._ring, entry)
        return found

    def remove(self, request_id: str) -> None:
        """Refused or cancelled while it waited: nothing is charged."""
        self._take_out(request_id, admitted=False)

    def left(self, account: Account) -> None:
        """An admitted request has ended."""
        was_present = account.present
        account.num_admitted -= 1
        assert account.num_admitted >= 0, "more requests ended than were admitted"
        self._presence(account, was_present)

    def correct(self, account: Account, tokens: float) -> None:
        """Correct the charge: `tokens` more than charged were computed, or fewer if negative."""
        account.given += tokens / account.weight
        self._highest = max(self._highest, account.given)
        self._changed.add(account.name)
        if account.num_waiting:
            self._sort_in(account)

    def changes(self, model: str, *, everything: bool = False) -> tuple[Given, ...]:
        """For a standby: what tenants were given, of those that were given something since the last call."""
        changed, self._changed = self._accounts if everything else self._changed, set()
        accounts = [self._accounts[name] for name in changed if name in self._accounts]
        return tuple(Given(model, account.name, account.weight, account.given, self._level) for account in accounts)

    def restore(self, given: Iterable[Given]) -> None:
        """Before the first request."""
        for one in given:
            account = self._accounts[one.tenant] = Account(one.tenant, one.weight, one.given)
            self._level, self._highest = max(self._level, one.level), max(self._highest, account.given)

    def rest(self) -> None:
        """The backend is idle: all tenants start level, with full credit and without debt.

        Use of an idle backend is not held against a tenant; else the present tenants would rank behind a new one that
        floods the queue.
        """
        self._level = max(self._level, self._highest + self.credit_tokens)

    def ahead(self, account: Account, priority: int) -> tuple[float, float]:
        """Upper bound of requests and tokens served before a new one; looks at this tenant's priorities only."""
        if not self._entries:
            return 0.0, 0.0
        own_requests = sum(n for p, n in account.num_waiting.items() if p <= priority)
        own_tokens = sum(t for p, t in account.waiting_tokens.items() if p <= priority)
        start = account.given if account.num_waiting else max(account.given, self._level - self.credit_tokens)
        start += own_tokens / account.weight
        own_all = sum(account.waiting_tokens.values())
        others_weight = self.active_weight - (account.weight if account.num_waiting else 0.0)
        num_others = self._num_active - bool(account.num_waiting)
        mean = self.waiting_tokens / len(self._entries)
        # Each of the others is served up to the same level, and may start one more request below it.
        reach = others_weight * max(0.0, start - self._level) + num_others * mean
        others = max(0.0, min(self.waiting_tokens - own_all, reach))
        return own_requests + (others / mean if mean else 0.0), own_tokens + others

    # ---- internals --------------------------------------------------------------------------------------------------

    def _head(self, account: Account) -> str:
        while True:
            _, serial, request_id = account.queue[0]
            entry = self._entries.get(request_id)
            if entry is not None and entry.serial == serial:
                return request_id
            heappop(account.queue)

    def _take_out(self, request_id: str, *, admitted: bool) -> None:
        entry = self._entries.pop(request_id)
        account, priority = entry.account, entry.priority
        was_present = account.present
        account.num_waiting[priority] -= 1
        account.waiting_tokens[priority] -= entry.cost
        self.waiting_tokens -= entry.cost
        if not account.num_waiting[priority]:
            account.num_waiting.pop(priority)
            account.waiting_tokens.pop(priority)
        account.num_admitted += admitted
        if not account.num_waiting:
            account.queue.clear()
            self.active_weight -= account.weight
            self._num_active -= 1
            if not self._num_active:
                self.active_weight = self.waiting_tokens = 0.0  # drops rounding errors
        elif len(account.queue) > 64 + 2 * account.total_waiting:
            account.queue = [item for item in account.queue if self._is_there(item)]
            heapify(account.queue)
        self._presence(account, was_present)

    def _is_there(self, item: tuple[int, int, str]) -> bool:
        entry = self._entries.get(item[2])
        return entry is not None and entry.serial == item[1]

    def _presence(self, account: Account, was_present: bool) -> None:
        if account.present != was_present:
            self.present_weight += account.weight if account.present else -account.weight

    def _sort_in(self, account: Account) -> None:
        self._versions += 1
        account.version = self._versions
        heappush(self._ring, (account.given, account.version, account.name))
        if len(self._ring) > 64 + 4 * self._num_active:
            self._ring = [entry for entry in self._ring if self._is_current(entry)]
            heapify(self._ring)

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        account = self._accounts.get(entry[2])
        return account is not None and account.version == entry[1] and bool(account.num_waiting)

    def check(self) -> None:
        """The invariants, in full."""
        active = [account for account in self if account.num_waiting]
        assert self._num_active == len(active), "waiting tenants are miscounted"
        assert _near(self.active_weight, sum(account.weight for account in active))
        assert _near(self.present_weight, sum(account.weight for account in self if account.present))
        assert _near(self.waiting_tokens, sum(entry.cost for entry in self._entries.values()))
        for account in self:
            own = [entry for entry in self._entries.values() if entry.account is account]
            assert account.num_waiting == Counter(entry.priority for entry in own), f"{account.name}: miscounted"
            assert _near(sum(account.waiting_tokens.values()), sum(entry.cost for entry in own))
            queued = {request_id for _, serial, request_id in account.queue if self._is_there((0, serial, request_id))}
            assert len(queued) == len(own), f"{account.name}: a request cannot be picked"
        current = Counter(entry[2] for entry in self._ring if self._is_current(entry))
        assert current == Counter(account.name for account in active), "a tenant cannot be picked, or twice"


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))
