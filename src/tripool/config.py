"""Configuration: one small frozen dataclass per room; each part receives its own slice, never the whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tripool.core import BLOCK_TOKENS
from tripool.errors import InvalidRequest

Precision = Literal["float32", "int8"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of one engine's step."""

    num_blocks: int
    """KV blocks in the pool."""
    block_tokens: int = BLOCK_TOKENS
    max_running: int = 64
    """Sequences that may hold blocks at once."""
    step_tokens: int = 512
    """Tokens computed in one step: every decoding sequence first, prompt chunks fill the rest."""
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        assert self.num_blocks > 0 and self.block_tokens > 0
        assert self.step_tokens > self.max_running > 0, "a full decode batch must leave room for prompt tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a user may set about the engine; the rest is derived from model and machine."""

    kv_gb: float | None = None
    """Memory for KV blocks. None: enough for eight full contexts, at most 2 GB; on a GPU that one engine has for
    itself, what weights and the largest step leave."""
    max_running: int = 64
    step_tokens: int | None = None
    """Tokens computed in one step. None: 512 on a CPU; on a GPU by its memory and the model's experts."""
    prefix_reuse: bool = True
    mtp: bool = True
    """Draft with the model's MTP layer, if it has one: fewer steps, the same text."""
    precision: Precision = "int8"
    """int8: a quarter of the memory, faster, and exact in any batch. float32: the checkpoint's own values; also the
    fallback where the 8-bit kernels could not be compiled."""
    threads: int | None = None
    """CPU threads of one step. None: every core this process may use."""
    device: Device = "cpu"
    """cuda: bfloat16, or 8 bits on Hopper where the checkpoint has them, or float32 if `precision` says so."""
    exact: bool = False
    """Batch-invariant kernels: a request's tokens depend neither on the batch, nor on chunks, preemptions, drafts or
    prefix hits on blocks written in prompt form. Slower on CUDA; on a CPU int8 is always so. Refused (`NotExact`) where
    there are no such kernels."""

    def __post_init__(self) -> None:
        for name in ("kv_gb", "max_running", "step_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} is {value!r}", hint="must be above 0", param=name)
        for name, known in (("precision", get_args(Precision)), ("device", get_args(Device))):
            if getattr(self, name) not in known:
                hint = f"known: {', '.join(known)}"
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}", hint=hint, param=name)


_MAX_WORKERS = 256


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Of a prefill or decode pool: "2" is two instances, "1x4" one instance of four ranks, "1x2+3" one of two ranks and
    three that have experts only."""

    instances: int = 1
    ranks: int = 1
    """Of each instance: the experts of its model are spread over them."""
    expert_ranks: int = 0
    """Ranks of each instance without sequences. If there are any, the others hold no experts."""

    def __post_init__(self) -> None:
        too_small = self.instances < 0 or self.ranks < 1 or self.expert_ranks < 0
        if too_small or self.instances * self.all_ranks > _MAX_WORKERS:
            raise InvalidRequest(f"a pool of {self} workers", hint=f"must be from 0 to {_MAX_WORKERS}", param="pools")

    @classmethod
    def parse(cls, text: str) -> PoolSize:
        found = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9})(?:\+(\d{1,9}))?)?", text, re.ASCII)
        if found is None:
            hint = "a number of instances, or like 1x4: one instance of four ranks; 1x4+2: and two with experts only"
            raise InvalidRequest(f"'{text[:20]}' is no size of a pool", hint=hint, param="pools")
        return cls(*(int(number) for number in found.groups() if number is not None))

    @property
    def num_workers(self) -> int:
        """Those that the router places requests on."""
        return self.instances * self.ranks

    @property
    def all_ranks(self) -> int:
        """Of each instance."""
        return self.ranks + self.expert_ranks

    def __str__(self) -> str:
        ranks = f"x{self.ranks}" if self.all_ranks > 1 else ""
        return f"{self.instances}{ranks}" + (f"+{self.expert_ranks}" if self.expert_ranks else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 4 * 2**20
    stall_s: float = 20.0
    """Seconds with work but without a finished step after which the server reports itself as not ready."""
    response_store_bytes: int | None = None
    """Memory for responses that clients refer to by id. None: only the answers' own items, for an hour; 0: nothing."""
    batch_dir: str = ""
    """Folder of clients' files and batches; empty: there are none."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server from a browser."""
    grpc_port: int | None = None
    """Of gRPC, on the same host; 0: any free one; None: there is no gRPC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Deadlines and queue bounds of the coordinator: every wait has one of these."""

    prefill_ahead_tokens: int = 8192
    """Tokens placed on one prefill worker ahead of time; the rest waits in the coordinator, for any worker."""
    heartbeat_s: float = 0.25
    """Interval of heartbeats that workers are asked for."""
    silence_s: float = 2.0
    """Longest silence of a worker; after it the worker is suspected and its requests are placed again."""
    stall_s: float = 30.0
    """Longest time with work but without a step; after it the worker counts as silent."""
    distrust_s: float = 10.0
    """After this time a suspected worker that was not reaped may register again."""
    queue_s: float = 60.0
    """Longest wait for a worker with room."""
    prefill_s: float = 60.0
    transfer_s: float = 10.0
    token_s: float = 30.0
    """Longest wait for the next token of an answer."""
    rest_s: float = 0.1
    """Backoff before a refused request is placed again; it grows each time."""
    max_losses: int = 8
    """Times that one request may lose its worker before it fails: the request itself may be the cause."""

    def __post_init__(self) -> None:
        assert 0 < self.heartbeat_s < self.silence_s <= self.stall_s
        assert self.prefill_ahead_tokens > 0 and self.max_losses > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Bounds of admission and of the queue in front of a backend."""

    queue_tokens: int = 262_144
    """Tokens of requests without a first token; beyond it, requests are refused."""
    max_wait_s: float = 60.0
    """Longest wait of a request without a TTFT objective."""
    window_s: float = 0.01
    """Work admitted at once while requests compete, in seconds of the backend's time: as little as keeps it busy."""
    wide_tokens: int = 8192
    """Tokens admitted at once per prefill worker while requests do not compete."""
    credit_s: float = 0.25
    """Most backend time that a tenant may save up by asking for less than its share."""
    compete_s: float = 60.0
    """How long tenants or priorities count as competing after two different ones were seen."""
    reserve: float = 0.125
    """Share of the decode slots kept for tenants below their share while requests compete."""

    def __post_init__(self) -> None:
        for name in ("queue_tokens", "max_wait_s", "window_s", "wide_tokens"):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidRequest(f"{name} is {value!r}", hint="must be above 0", param=name)
        if not 0 <= self.reserve < 1:
            raise InvalidRequest(f"reserve is {self.reserve!r}", hint="must be at least 0 and below 1", param="reserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """Disk tier of one cache member."""

    folder: str
    """Each member has its own folder in it."""
    num_bytes: int
    fingerprint: str = "00" * 16
    """Fingerprint of model and layout, in hexadecimal: blocks written under another one are not read."""
    write_bytes_per_s: float = 200e6
    """Long-term bound of the write rate; blocks beyond it are not written, and counted."""

    def __post_init__(self) -> None:
        for name in ("num_bytes", "write_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}", hint="must be above 0", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """A Mooncake Store behind one cache member."""

    master: str
    """HOST:PORT of its master."""
    own_address: str = "127.0.0.1"
    """Where the store's other clients reach this one."""
    fingerprint: str = "00" * 16
    """As that of the disk: blocks stored under another one are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """One member of the cache pool."""

    slot_bytes: int
    """Largest block that fits."""
    num_slots: int
    lease_s: float = 5.0
    """Longest read; afterwards the block may be evicted, which the reader detects."""
    write_s: float = 5.0
    """Longest write; afterwards others may write the same block elsewhere."""
    namespace_slots: int | None = None
    """Largest number of slots of one tenant. None: all of them."""
    disk: DiskConfig | None = None
    store: StoreConfig | None = None

    def __post_init__(self) -> None:
        for name in ("slot_bytes", "num_slots", "lease_s", "write_s", "namespace_slots"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} is {value!r}", hint="must be above 0", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """Of pools that steer themselves. The defaults suit workers that take minutes to start."""

    ttft_s: float = 2.0
    """Objective of the time to first token: the rate of a prefill worker is judged by it."""
    kept_share: float = 0.98
    """Share of requests that are to keep their objectives."""
    least: tuple[int, int, int] = (1, 1, 0)
    """Workers of prefill, decode and cache that there are at any time."""
    most: tuple[int, int, int] = (1024, 1024, 1024)
    most_workers: int = 1024
    """Of prefill and decode together."""
    costs: tuple[float, float, float] = (1.0, 1.0, 0.25)
    """Of a worker-hour of each pool, in any unit."""
    start_s: float = 180.0
    """How long a start probably takes; what starts really took replaces it."""
    start_deadline_s: float = 900.0
    """After this time a start is given up."""
    hold_s: float = 120.0
    """For so long fewer workers must have sufficed before one is stopped."""
    cooldown_s: float = 300.0
    """For so long a change is not reversed, unless the demand has changed by more than the dead band."""
    dead_band: float = 0.1
    """Share of the demand by which it must have changed for that."""
    first_samples_s: float = 30.0
    """What a worker reports in its first seconds does not count."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "start_s", "start_deadline_s", "hold_s", "cooldown_s", "dead_band", "most_workers"):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidRequest(f"{name} is {value!r}", hint="must be above 0", param=name)
        if not 0 < self.kept_share < 1:
            hint = "must be between 0 and 1"
            raise InvalidRequest(f"kept_share is {self.kept_share!r}", hint=hint, param="kept_share")
        fits = self.least[0] + self.least[1] <= self.most_workers
        if not fits or any(not 0 <= low <= high for low, high in zip(self.least, self.most, strict=True)):
            hint = "least <= most for every pool, and the least fit into most_workers"
            raise InvalidRequest(f"bounds from {self.least} to {self.most} workers", hint=hint, param="least")
        if not all(cost > 0 for cost in self.costs):
            raise InvalidRequest(f"costs are {self.costs}", hint="all above 0", param="costs")
