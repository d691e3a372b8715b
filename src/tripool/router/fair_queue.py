"""Whose request is next: deficit round robin over tenants, on uncached tokens, weighted. Pure and incremental.

A ring that gives every waiting tenant a small quantum per round and lets whoever's deficit is paid off go next needs no
walk: the quantum may as well be nothing, and the order is then that of one number per tenant, the tokens it has been
given divided by its weight. The least is next (`Account.given`). Two rules keep that fair over time:

- Whoever comes back starts level with the ring (`_level`), but for a bounded credit (`credit_tokens`) from what it did
  not use meanwhile: two requests at once after a quiet time are no flood. What it owes stays.
- A prompt is charged by what will probably have to be computed, and corrected once its first token says what was found
  in the cache.

So a tenant that asks for less than its share is served before one that asks for more, however much that has waiting,
and of two that ask for more each gets its share. Within a tenant, lower priorities go first, then who came first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tripool.tenants import Tenant


def jain(values: Sequence[float]) -> float:
    """1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def max_min(asked: Sequence[float], weights: Sequence[float], capacity: float) -> list[float]:
    """What each is entitled to of a capacity: nobody gets more than it asked for, and what it leaves is shared."""
    got = [0.0] * len(asked)
    left, weight = capacity, sum(weights)
    for i in sorted(range(len(asked)), key=lambda i: asked[i] / weights[i]):
        got[i] = min(asked[i], left * weights[i] / weight)
        left -= got[i]
        weight -= weights[i]
    return got


def fairness(accounts: Iterable[Account], now_s: float) -> float:
    """Jain's index of what tenants got of what they were entitled to, over the last minute or so."""
    known = list(accounts)
    for account in known:
        account.count(now_s)
    known = [account for account in known if account.asked_tokens >= 1.0]
    if not known:
        return 1.0
    served = [account.served_tokens for account in known]
    entitled = max_min([a.asked_tokens for a in known], [a.weight for a in known], sum(served))
    return jain([got / due for got, due in zip(served, entitled, strict=True) if due > 0])


_MEMORY_S = 60.0
"""Over which asked and served tokens are compared."""
_HIT_WEIGHT = 0.1
_IDLE_ACCOUNTS = 1024


@dataclass(slots=True, eq=False)
class Account:
    """One tenant at one door."""

    name: str
    weight: float
    given: float = 0.0
    """Tokens per weight: the deficit, counted upwards."""
    version: int = 0
    """Of its newest place in the ring."""
    waiting_tokens: dict[int, float] = field(default_factory=dict)
    """By priority; no entry where nothing waits."""
    num_waiting: Counter[int] = field(default_factory=Counter)
    queue: list[tuple[int, int, str]] = field(default_factory=list)
    """(priority, serial, id), some of them gone already."""
    num_inside: int = 0
    num_unbegun: int = 0
    """Of those inside, the ones without a first token."""
    slots_held: int = 0
    """Choices that were let through and have not ended."""
    hit_ratio: float = 0.0
    """Of its prompts, lately: what share was found in the cache."""
    asked_tokens: float = 0.0
    served_tokens: float = 0.0
    """Uncached, of the last minute or so."""
    counted_s: float = 0.0
    open_tokens: int = 0
    """Of prompts and answers, cached or not, of all its requests that are not over."""

    @property
    def total_waiting(self) -> int:
        return self.num_waiting.total()

    @property
    def present(self) -> bool:
        return bool(self.num_waiting or self.num_inside)

    @property
    def asks(self) -> float:
        """How much it wants of the backend just now, by its weight."""
        return self.open_tokens / self.weight

    def cost_of(self, prompt_tokens: int) -> float:
        """What will probably have to be computed; at least one token always is."""
        return max(1.0, prompt_tokens * (1.0 - self.hit_ratio))

    def count(self, now_s: float, *, asked: float = 0.0, served: float = 0.0) -> None:
        left = max(0.0, 1.0 - max(0.0, now_s - self.counted_s) / _MEMORY_S)
        self.asked_tokens = self.asked_tokens * left + asked
        self.served_tokens = self.served_tokens * left + served
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
    """Requests that wait, by tenant, and the order in which they will go."""

    def __init__(self) -> None:
        self.credit_tokens = 0.0
        self._accounts: dict[str, Account] = {}
        self._entries: dict[str, Waiting] = {}
        self._ring: list[tuple[float, int, str]] = []
        self._level = 0.0
        """`given` of whoever was served last, when it was."""
        self._highest = 0.0
        self._versions = 0
        self._serials = 0
        self.waiting_tokens = 0.0
        self.active_weight = 0.0
        """Of tenants with something waiting."""
        self.present_weight = 0.0
        """Of tenants with something waiting or inside."""
        self._num_active = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def get(self, name: str) -> Account | None:
        return self._accounts.get(name)

    def account(self, tenant: Tenant) -> Account:
        """Made at its first request. A new weight counts once nothing of the tenant is here."""
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
        """Those who have nothing here and owe nothing; rarely, so that each request pays for little of it."""
        for name, account in list(self._accounts.items()):
            if not account.present and account.given <= self._level:
                del self._accounts[name]

    # ---- in and out -------------------------------------------------------------------------------------------------

    def push(self, request_id: str, account: Account, priority: int, cost: float) -> None:
        self._serials += 1
        was_present = account.present
        if not account.num_waiting:
            account.given = max(account.given, self._level - self.credit_tokens)
            self.active_weight += account.weight
            self._num_active += 1
        entry = self._entries[request_id] = Waiting(account, priority, self._serials, cost)
        account.num_waiting[priority] = account.num_waiting.get(priority, 0) + 1
        account.waiting_tokens[priority] = account.waiting_tokens.get(priority, 0.0) + cost
        heappush(account.queue, (priority, entry.serial, request_id))
        self.waiting_tokens += cost
        self._presence(account, was_present)
        if account.total_waiting == 1:
            self._sort_in(account)

    def pop(self, allowed: Callable[[Account], bool]) -> str | None:
        """The next request, charged to its tenant. None: nothing waits, or nobody who is allowed."""
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
            self._take_out(found, inside=True)
            account.given += cost / account.weight
            self._highest = max(self._highest, account.given)
            if account.num_waiting:
                self._sort_in(account)
        for entry in passed_over:
            heappush(self._ring, entry)
        return found

    def remove(self, request_id: str) -> None:
        """Refused or cancelled while it waited: nothing is charged."""
        self._take_out(request_id, inside=False)

    def left(self, account: Account) -> None:
        """One that was let through has ended."""
        was_present = account.present
        account.num_inside -= 1
        assert account.num_inside >= 0, "left more often than let through"
        self._presence(account, was_present)

    def correct(self, account: Account, tokens: float) -> None:
        """So much more than it was charged has been computed for it; less, if negative."""
        account.given += tokens / account.weight
        self._highest = max(self._highest, account.given)
        if account.num_waiting:
            self._sort_in(account)

    def rest(self) -> None:
        """Nothing waits and nothing is to be begun: all start level, with all their credit, and debts are forgiven.

        What was used while there was enough for everybody is held against nobody: else those who were here would stand
        behind one that comes fresh, and floods.
        """
        self._level = max(self._level, self._highest + self.credit_tokens)

    def ahead(self, account: Account, priority: int) -> tuple[float, float]:
        """Requests and tokens that will go before a new one, at most; looks at this tenant's priorities alone."""
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
        # Each of the others is served up to the same level, and may begin one more below it.
        reach = others_weight * max(0.0, start - self._level) + num_others * mean
        others = max(0.0, min(self.waiting_tokens - own_all, reach))
        return own_requests + (others / mean if mean else 0.0), own_tokens + others

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _head(self, account: Account) -> str:
        while True:
            _, serial, request_id = account.queue[0]
            entry = self._entries.get(request_id)
            if entry is not None and entry.serial == serial:
                return request_id
            heappop(account.queue)

    def _take_out(self, request_id: str, *, inside: bool) -> None:
        entry = self._entries.pop(request_id)
        account, priority = entry.account, entry.priority
        was_present = account.present
        account.num_waiting[priority] -= 1
        account.waiting_tokens[priority] -= entry.cost
        self.waiting_tokens -= entry.cost
        if not account.num_waiting[priority]:
            account.num_waiting.pop(priority)
            account.waiting_tokens.pop(priority)
        account.num_inside += inside
        if not account.num_waiting:
            account.queue.clear()
            self.active_weight -= account.weight
            self._num_active -= 1
            if not self._num_active:
                self.active_weight = self.waiting_tokens = 0.0  # sheds what rounding has left
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
        """The invariants, at length."""
        active = [account for account in self if account.num_waiting]
        assert self._num_active == len(active), "tenants that wait are miscounted"
        assert _near(self.active_weight, sum(account.weight for account in active))
        assert _near(self.present_weight, sum(account.weight for account in self if account.present))
        assert _near(self.waiting_tokens, sum(entry.cost for entry in self._entries.values()))
        for account in self:
            own = [entry for entry in self._entries.values() if entry.account is account]
            assert account.num_waiting == Counter(entry.priority for entry in own), f"{account.name}: miscounted"
            assert _near(sum(account.waiting_tokens.values()), sum(entry.cost for entry in own))
            queued = {request_id for _, serial, request_id in account.queue if self._is_there((0, serial, request_id))}
            assert len(queued) == len(own), f"{account.name}: a request that cannot be picked"
        current = Counter(entry[2] for entry in self._ring if self._is_current(entry))
        assert current == Counter(account.name for account in active), "a tenant cannot be picked, or twice"


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))
