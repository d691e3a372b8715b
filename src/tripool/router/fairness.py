"""How fair it was: what tenants got of what they were entitled to, as one number. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tripool.router.fair_queue import Account


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
