"""What happens in one simulated run, drawn from its seed: requests, workers, memory, bounds and faults. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from tripool.config import AdmissionConfig, RouterConfig, SchedulerConfig
from tripool.core import Request, SamplingParams, Slo
from tripool.messages import Role
from tripool.simulate.request_table import Arrival
from tripool.simulate.rng import Rng
from tripool.tenants import Limits, Tenant

CONTEXT_TOKENS = 64
BLOCK_TOKENS = 4
END_ID = 0
_VOCAB = 24
"""Of prompts: a part of the fake engine's."""

FaultKind = Literal[
    "kill", "stop", "slow", "cut", "loss", "spoil", "cache restart", "gateway restart", "burst", "drain", "purge",
    "disk full", "disk rot", "coordinator restart",
]  # fmt: skip
"""cut: a connection breaks and both ends notice. loss: messages vanish unnoticed. spoil: KV changes after
they were packed. burst: more at once than memory holds. purge: a tenant's blocks are to be forgotten. disk full, disk
rot: a cache member's disk takes nothing more, or has changed what was on it. gateway restart: coordinator and gateway
at once, with all clients' connections. coordinator restart: a standby takes its place, and clients stay."""

HostFaultKind = Literal["partition", "one way", "slow path", "host kill"]
"""partition: two hosts cannot reach each other; one way: only one cannot reach the other. slow path: everything between
two hosts takes longer. host kill: all processes of a host, its supervisor included."""

_COMMON: tuple[FaultKind, ...] = (
    "kill", "kill", "stop", "stop", "stop", "slow", "cut", "loss", "spoil", "cache restart", "burst"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DiskSpec:
    num_segments: int
    blocks_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    role: Role
    config: SchedulerConfig
    context_tokens: int
    sender_slots: int
    overstated: float
    """KV memory that it tells of, as a multiple of what it has: above 1 it will be full."""
    token_s: float
    """Time per row of a step, and of a step without any."""


@dataclass(frozen=True, slots=True)
class Fault:
    time_s: float
    kind: FaultKind | HostFaultKind
    length_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    router: RouterConfig
    admission: AdmissionConfig
    minds_slots: bool
    tenants: dict[str, Tenant]
    workers: dict[str, WorkerSpec]
    num_members: int
    member_slots: int
    arrivals: list[Arrival]
    faults: list[Fault]
    may_refuse: bool
    """The queue is short: some requests are refused, as they should be."""
    disk: DiskSpec | None = None
    """Behind every cache member."""
    num_hosts: int = 1
    host_of: dict[str, int] = field(default_factory=dict)
    """Of workers and cache members; the others run where the gateway does."""


def draw(seed: int, *, faults: bool = True, hosts: int = 1) -> Scenario:
    """`hosts`: more than one add partitions between them to the faults; the rest is that of the same seed on one."""
    rng = Rng(seed)
    may_refuse = rng.chance(0.1)
    router = RouterConfig(
        prefill_ahead_tokens=rng.pick([48, 96, 200]), heartbeat_s=0.4, silence_s=0.6, stall_s=2.0, distrust_s=3.0,
        queue_s=12.0, prefill_s=4.0, transfer_s=2.0, token_s=4.0, rest_s=0.02, max_losses=1000,
    )  # fmt: skip
    workers = {}
    for role in ("prefill", "decode"):
        for number in range(rng.between(1, 3)):
            config = SchedulerConfig(
                num_blocks=rng.pick([20, 28, 48, 80]), block_tokens=BLOCK_TOKENS, max_running=rng.pick([3, 6, 10]),
                step_tokens=rng.pick([16, 32, 48]), prefix_reuse=rng.chance(0.9),
            )  # fmt: skip
            workers[f"{role}-{number}"] = WorkerSpec(
                role="prefill" if role == "prefill" else "decode", config=config, context_tokens=CONTEXT_TOKENS,
                overstated=rng.pick([1.0, 1.0, 2.0]), sender_slots=rng.pick([18, 30, 60]),
                token_s=rng.uniform(0.001, 0.003),
            )  # fmt: skip
    span_s = 3.0
    arrivals = _arrivals(rng, span_s, 50)
    drawn = _faults(rng, span_s) if faults else []
    for fault in drawn:
        if fault.kind == "burst":
            burst = [_request(rng, f"r{len(arrivals) + i}", prompt_tokens=30) for i in range(rng.between(4, 8))]
            arrivals += [Arrival(fault.time_s, request) for request in burst]
    num_members, member_slots = rng.between(1, 3), rng.pick([8, 16, 48])
    # From an rng of its own, so that the rest of a run does not depend on it.
    admission, tenants, minds_slots = _entry(entry_rng := Rng(seed + 2**33), may_refuse)
    arrivals = [_promised(entry_rng, arrival, tenants, may_refuse) for arrival in arrivals]
    arrivals.sort(key=lambda arrival: arrival.time_s)
    disk, disk_faults = _disk(Rng(seed + 2**34), span_s)
    drawn += disk_faults if faults else []
    host_of, host_faults = _hosts(Rng(seed + 2**35), span_s, hosts, [*workers, *member_names(num_members)])
    drawn += host_faults if faults else []
    drawn += _takeovers(Rng(seed + 2**36), span_s) if faults else []
    return Scenario(
        seed, router, admission, minds_slots, tenants, workers, num_members, member_slots, arrivals, drawn, may_refuse,
        disk, hosts, host_of,
    )  # fmt: skip


def member_names(num_members: int) -> list[str]:
    return [f"cache-{number}" for number in range(num_members)]


def _hosts(rng: Rng, span_s: float, hosts: int, names: list[str]) -> tuple[dict[str, int], list[Fault]]:
    """From an rng of its own too. Every second fault lasts longer than the gateway waits for a heartbeat."""
    if hosts == 1:
        return {}, []
    faults = []
    for _ in range(rng.between(2, 4)):
        kind = rng.pick(get_args(HostFaultKind))
        faults.append(Fault(rng.uniform(0.1, span_s), kind, rng.pick([rng.uniform(0.02, 0.6), rng.uniform(0.6, 2.5)])))
    return {name: rng.between(0, hosts - 1) for name in names}, faults


def _takeovers(rng: Rng, span_s: float) -> list[Fault]:
    """From an rng of its own too."""
    number = rng.between(1, 3) if rng.chance(0.4) else 0
    lengths = [rng.pick([rng.uniform(0.01, 0.2), rng.uniform(0.2, 1.8)]) for _ in range(number)]
    return [Fault(rng.uniform(0.1, span_s), "coordinator restart", length_s) for length_s in lengths]


def _disk(rng: Rng, span_s: float) -> tuple[DiskSpec | None, list[Fault]]:
    """From an rng of its own too."""
    kinds: list[FaultKind] = ["purge"] if rng.chance(0.3) else []
    spec = None
    if rng.chance(0.8):
        spec = DiskSpec(num_segments=rng.pick([2, 4, 16, 64]), blocks_per_s=rng.pick([5.0, 50.0, 1e6]))
        kinds += ["cache restart"] if rng.chance(0.5) else []
        kinds += ["disk rot"] if rng.chance(0.3) else []
        kinds += ["disk full"] if rng.chance(0.2) else []
    return spec, [Fault(rng.uniform(0.5, span_s), kind, rng.uniform(0.05, 0.5)) for kind in kinds]


def _entry(rng: Rng, may_refuse: bool) -> tuple[AdmissionConfig, dict[str, Tenant], bool]:
    admission = AdmissionConfig(
        queue_tokens=rng.pick([300, 600]) if may_refuse else 1_000_000,
        max_wait_s=rng.pick([1.0, 5.0]) if may_refuse else 1e6,
        window_s=rng.pick([0.005, 0.05, 0.5]),
        wide_tokens=rng.pick([40, 400, 1_000_000]),
        credit_s=rng.pick([0.0, 1.0]),
        compete_s=rng.pick([0.02, 0.5, 60.0]),
    )
    rate_limiter = [None, None, 25.0, 50.0] if may_refuse else [None]
    tenants = {
        name: Tenant(
            name=name,
            namespace=name,
            limits=Limits(
                requests_per_minute=rng.pick(rate_limiter),
                tokens_per_minute=rng.pick([rate and 40 * rate for rate in rate_limiter]),
                weight=rng.pick([0.5, 1.0, 1.0, 4.0]),
            ),
        )
        for name in ["", "one", "two"][: rng.between(2, 3)]
    }
    return admission, tenants, rng.chance(0.5)


def _promised(rng: Rng, arrival: Arrival, tenants: dict[str, Tenant], may_refuse: bool) -> Arrival:
    tenant, priority = rng.pick(list(tenants)), rng.pick([0, 0, 0, 0, -1, 3])
    ttft_ms = rng.pick([None, None, 200.0, 1000.0])
    slo = Slo(tenant=tenant, priority=priority, ttft_ms=ttft_ms if may_refuse else None)
    return replace(arrival, request=replace(arrival.request, slo=slo), tenant=tenants[tenant])


def _arrivals(rng: Rng, span_s: float, count: int) -> list[Arrival]:
    arrivals = []
    for number in range(count):
        cancel_s = rng.uniform(0.0, 0.8) if rng.chance(0.15) else None
        arrivals.append(Arrival(rng.uniform(0.0, span_s), _request(rng, f"r{number}"), cancel_s=cancel_s))
    return arrivals


def _request(rng: Rng, request_id: str, prompt_tokens: int = 0) -> Request:
    """Prompts share beginnings, and some come again, so that prefixes are found; tenants send the same ones, some of
    them in public."""
    family = rng.between(1, 3)
    shared = [(family * 7 + i) % _VOCAB for i in range(rng.pick([0, 4, 9, 18]))]
    words = Rng(rng.between(1, 6)) if rng.chance(0.5) else rng
    own = [1 + words.bits() % (_VOCAB - 1) for _ in range(words.between(1, 12))]
    prompt = shared + own
    prompt += [1 + i % (_VOCAB - 1) for i in range(prompt_tokens - len(prompt))]
    params = SamplingParams(
        n=rng.pick([1, 1, 1, 1, 1, 1, 2, 3]), max_tokens=rng.pick([1, 3, 5, 8, 12]), ignore_eos=rng.chance(0.4)
    )
    return Request(
        id=request_id,
        prompt_ids=tuple(prompt),
        params=params,
        seed=rng.bits() % 2**32,
        end_ids=frozenset({END_ID}),
        namespace=rng.pick(["", "", "other"]),
        public_tokens=len(shared) // 2 if own[0] % 3 == 0 else 0,
    )


def _faults(rng: Rng, span_s: float) -> list[Fault]:
    kinds = [rng.pick(_COMMON) for _ in range(rng.between(5, 8))]
    if rng.chance(0.15):
        kinds.append("gateway restart")
    if rng.chance(0.5):
        kinds.append("drain")
    assert set(kinds) <= set(get_args(FaultKind))
    times = sorted(rng.uniform(0.1, span_s) for _ in kinds)
    return [Fault(time_s, kind, rng.uniform(0.05, 1.8)) for time_s, kind in zip(times, kinds, strict=True)]
