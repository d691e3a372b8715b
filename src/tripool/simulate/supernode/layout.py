"""What stands where: a deployment file turned into workers, their memory, their engines and their links. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tripool.config import AdmissionConfig, RouterConfig, SchedulerConfig
from tripool.errors import InvalidRequest
from tripool.messages import AnyMessage, WorkerId
from tripool.planner.cost import DecodeModel, PrefillModel, Setup, footprint, named_routing
from tripool.planner.cost.setup import place_experts
from tripool.planner.deployment import DeploymentFile
from tripool.planner.hardware import Hardware
from tripool.planner.models import ModelShape
from tripool.simulate.supernode.expert_ranks import ExpertRanks
from tripool.simulate.supernode.links import Slices
from tripool.simulate.supernode.step_times import DecodeTimes, PrefillTimes
from tripool.simulate.timeline import Timeline

BLOCK_TOKENS = 512
"""Of one simulated KV block: what traces hash together."""
_AHEAD_STEPS = 2
"""Work that a prefill instance has ahead, in its own steps; where it is less, the instance runs dry between two."""
_LEAST_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    instances: int
    workers: int
    """Of one instance, as the router sees them: whatever has a batch of its own."""
    chips: int
    """Of one instance."""
    config: SchedulerConfig
    """Of one worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes per second, and seconds before the first one."""

    transfer_bytes_per_s: float
    """Into one decode worker."""
    send_bytes_per_s: float
    """Out of one prefill instance."""
    transfer_s: float
    cache_bytes_per_s: float
    """Of one prefill instance, reading from the pool; writing takes as long."""
    cache_s: float
    hop_s: float
    """A message between gateway and worker."""
    totals: tuple[tuple[str, float], ...]
    """Of each plane, all chips together, for its use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    title: str
    chips: int
    node_chips: int
    prefill: PoolLayout
    decode: PoolLayout
    prefill_times: PrefillTimes
    decode_times: DecodeTimes
    replay_times: PrefillTimes
    """Of a decode instance that computes a preempted sequence again."""
    links: Links
    num_members: int
    member_slots: int
    block_bytes: int
    token_bytes: int
    """KV of one token."""
    context_tokens: int
    ttft_s: float
    tpot_s: float
    router: RouterConfig
    admission: AdmissionConfig
    experts: ExpertRanks | None = None
    """Of a decode instance; None: the model has none, or none that a balancer places."""
    fast_forwards: bool = True
    """Whether decode engines skip quiet steps, or take them one by one: the plain way, with the same result."""
    promised: bool = True
    """Whether requests carry the time per token as a promise, or are only judged by it."""


class Site(Protocol):
    """The deployment as an instance and its workers see it: time, messages to the gateway, links."""

    timeline: Timeline
    layout: Layout
    slices: Slices

    def tell(self, number: int, messages: Sequence[AnyMessage]) -> None:
        """Send to the gateway, in this order. `number`: the worker's own, among all."""

    def trusts(self, worker_id: WorkerId) -> bool:
        """Whether this worker runs: the KV that it sends can be read."""

    def transfer(self, source: WorkerId, number: int, num_bytes: int) -> int:
        """Start to move KV into a worker's memory; when it will be there, in femtoseconds."""


def lay_out(file: DeploymentFile, hardware: Hardware, model: ModelShape, *, block_tokens: int = BLOCK_TOKENS) -> Layout:
    if file.shared:
        hint = "give more chips, so that `tripool plan` can part prefill from decode"
        raise InvalidRequest("one pool that does both prefill and decode is not simulated", hint=hint)
    if file.decode_hardware != file.hardware:
        hint = "plan and simulate each kind of hardware by itself"
        raise InvalidRequest("prefill and decode on two kinds of hardware are not simulated", hint=hint)
    token_bytes = round(model.kv_bytes_per_token())
    replayed = replace(file.decode.setup, microbatches=1, expert_ranks=0)
    prefill, decode = _prefill(file, hardware, model, block_tokens), _decode(file, hardware, model, block_tokens)
    block_bytes = token_bytes * block_tokens
    members = max(1, file.chips // hardware.node_chips)
    ahead = _AHEAD_STEPS * prefill.config.step_tokens
    queue = max(AdmissionConfig().queue_tokens, 16 * prefill.config.step_tokens) * file.prefill.instances
    return Layout(
        title=f"{file.model} on {file.chips} x {file.hardware}", chips=file.chips, node_chips=hardware.node_chips,
        prefill=prefill, decode=decode,
        prefill_times=PrefillTimes.of(PrefillModel(hardware, model, file.prefill.setup)),
        decode_times=DecodeTimes.of(DecodeModel(hardware, model, file.decode.setup)),
        replay_times=PrefillTimes.of(PrefillModel(hardware, model, replayed)),
        links=_links(file, hardware), num_members=members, experts=_experts(model, file.decode.setup),
        member_slots=max(1, int(file.cache_gb * 1e9 / members / block_bytes)),
        block_bytes=block_bytes, token_bytes=token_bytes,
        context_tokens=min(p.config.num_blocks * block_tokens for p in (prefill, decode)),
        ttft_s=file.ttft_ms / 1e3, tpot_s=file.tpot_ms / 1e3,
        router=RouterConfig(prefill_ahead_tokens=max(ahead, RouterConfig().prefill_ahead_tokens)),
        admission=AdmissionConfig(queue_tokens=queue, wide_tokens=max(ahead, AdmissionConfig().wide_tokens)),
    )  # fmt: skip


def _prefill(file: DeploymentFile, hardware: Hardware, model: ModelShape, block_tokens: int) -> PoolLayout:
    setup = file.prefill.setup
    tokens = _kv_tokens(hardware, model, setup, setup.ep)
    step_tokens = max(2, file.prefill.batch * setup.ep)
    config = SchedulerConfig(
        num_blocks=max(_LEAST_BLOCKS, tokens // block_tokens), block_tokens=block_tokens, step_tokens=step_tokens,
        max_running=max(1, min(256, step_tokens - 1)),
    )  # fmt: skip
    return PoolLayout(instances=file.prefill.instances, workers=1, chips=file.prefill.chips, config=config)


def _decode(file: DeploymentFile, hardware: Hardware, model: ModelShape, block_tokens: int) -> PoolLayout:
    setup = file.decode.setup
    tokens = _kv_tokens(hardware, model, setup, setup.tp)
    running = max(1, file.decode.batch * setup.tp)
    config = SchedulerConfig(
        num_blocks=max(_LEAST_BLOCKS, tokens // block_tokens), block_tokens=block_tokens, max_running=running,
        step_tokens=running + block_tokens, prefix_reuse=False,
    )  # fmt: skip
    workers = setup.attention_ranks // setup.tp
    return PoolLayout(instances=file.decode.instances, workers=workers, chips=file.decode.chips, config=config)


def _experts(model: ModelShape, setup: Setup) -> ExpertRanks | None:
    if model.moe is None or setup.balance != "balanced":
        return None
    routing = named_routing()
    placed = place_experts(model, setup.holding_ranks, routing.redundant_share, setup.balance)
    return ExpertRanks(model.moe.experts, placed.routed_ranks, placed.per_rank, routing.popularity)


def _kv_tokens(hardware: Hardware, model: ModelShape, setup: Setup, ranks: int) -> int:
    """Whose KV fits onto so many ranks."""
    room = footprint(hardware, model, setup)
    if room.kv <= 0:
        hint = "more ranks per instance, or fewer bits"
        raise InvalidRequest(f"{model.name} does not fit: {-room.kv / 1e9:.1f} GB per rank are missing", hint=hint)
    return int(room.kv / room.kv_per_token * ranks)


def _links(file: DeploymentFile, hardware: Hardware) -> Links:
    transfer, memory, service = (hardware.plane(kind) for kind in ("transfer", "memory", "service"))
    worker_chips = file.decode.setup.tp / hardware.ranks
    return Links(
        transfer_bytes_per_s=transfer.bytes_per_s * worker_chips,
        send_bytes_per_s=transfer.bytes_per_s * file.prefill.chips,
        transfer_s=transfer.latency_us * 1e-6,
        cache_bytes_per_s=hardware.cache_bytes_per_s["memory"] * file.prefill.chips,
        cache_s=memory.latency_us * 1e-6,
        hop_s=service.latency_us * 1e-6,
        totals=tuple((plane.kind, plane.bytes_per_s * file.chips) for plane in (memory, transfer, service)),
    )  # fmt: skip
