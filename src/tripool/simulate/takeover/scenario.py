"""What happens in one run of the takeover simulation, drawn from a seed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from tripool.router.kept_types import KeptLimits
from tripool.simulate.request_table import Arrival
from tripool.simulate.rng import Rng
from tripool.simulate.scenario import Scenario, draw
from tripool.tenants import Limits

FaultKind = Literal[
    "leader kill", "leader stop", "standby kill", "standby stop", "log cut", "gateway kill", "line cut", "worker kill",
    "worker stop", "worker line cut",
]  # fmt: skip
"""log cut: leader and standby do not hear each other. line cut: the connection of a gateway to its coordinator ends;
worker line cut: that of a worker."""

KEPT = KeptLimits(
    claim_s=2.0, alone_s=3.0, kept_s=5.0, rejoin_s=0.5, tenant_bytes=2**20, all_bytes=2**22, answer_tokens=2**17
)
_SPAN_S = 4.0


@dataclass(frozen=True, slots=True)
class Fault:
    time_s: float
    kind: FaultKind
    length_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    arrival: Arrival
    keyed: bool
    twin_s: float | None = None
    """After that time another client asks with the same key."""


@dataclass(frozen=True, slots=True)
class TakeoverScenario:
    seed: int
    base: Scenario
    """Workers, tenants and deadlines."""
    asks: list[Ask]
    num_gateways: int
    faults: list[Fault]
    kill_s: float
    """From a standby's decision to end a silent leader until that one is dead; it leads meanwhile. 0: as on one host,
    where the kernel's lock waits for the death."""
    blind: bool
    """A leader cannot look who leads."""
    stale: bool
    """An address may lead to any coordinator that thinks that it leads."""


def draw_takeovers(seed: int, *, faults: bool = True) -> TakeoverScenario:
    base = draw(seed, faults=False)
    rng = Rng(seed + 2**40)
    if rng.chance(0.3):
        base = _limited(base)
    asks = [_ask(rng, arrival, base) for arrival in base.arrivals]
    two_live = faults and rng.chance(0.5)
    drawn = _faults(rng, two_live) if faults else []
    return TakeoverScenario(
        seed, base, asks, rng.between(2, 3), drawn,
        kill_s=rng.pick([0.3, 3.0, 12.0]) if two_live else 0.0,
        blind=two_live and rng.chance(0.5),
        stale=two_live and rng.chance(0.5),
    )  # fmt: skip


def _limited(base: Scenario) -> Scenario:
    """Tenants that ask for more than they may."""
    limits = Limits(requests_per_minute=10.0)
    tenants = {name: replace(tenant, limits=limits) for name, tenant in base.tenants.items()}
    return replace(base, may_refuse=True, tenants=tenants)


def _ask(rng: Rng, arrival: Arrival, base: Scenario) -> Ask:
    """Over a longer time, and without salts, which answers do not depend on."""
    request, tenant = replace(arrival.request, namespace=""), base.tenants[arrival.tenant.name]
    keyed = rng.chance(0.6)
    twin_s = rng.uniform(0.0, 0.3) if keyed and rng.chance(0.3) else None
    return Ask(replace(arrival, time_s=2 * arrival.time_s, request=request, tenant=tenant), keyed, twin_s)


def _faults(rng: Rng, two_live: bool) -> list[Fault]:
    """`two_live`: an old leader may live on; then connections end after it was replaced."""
    kinds = [rng.pick(get_args(FaultKind)) for _ in range(rng.between(3, 5))]
    kinds += [rng.pick(["leader stop", "leader stop", "log cut", "leader kill"]) for _ in range(rng.between(1, 2))]
    lengths = [rng.pick([rng.uniform(0.05, 0.6), rng.uniform(0.6, 3.5), 10.0]) for _ in kinds]
    faults = [Fault(rng.uniform(0.1, _SPAN_S), kind, length) for kind, length in zip(kinds, lengths, strict=True)]
    if two_live:
        faults += [Fault(rng.uniform(0.1, 1.0), "log cut", 4.0), Fault(rng.uniform(0.1, 2.0), "leader stop", 0.8)]
        faults += [Fault(rng.uniform(2.0, 8.0), "line cut", 0.0) for _ in range(4)]
        faults += [Fault(rng.uniform(4.0, 8.0), rng.pick(["worker line cut", "gateway kill"]), 0.0) for _ in range(3)]
    return sorted(faults, key=lambda fault: fault.time_s)
