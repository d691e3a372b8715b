"""Configuration: one small frozen dataclass per room; each part receives its own slice, never the whole."""

from __future__ import annotations

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
    """Memory for KV blocks. None: enough for eight full contexts, at most 2 GB."""
    max_running: int = 64
    step_tokens: int = 512
    prefix_reuse: bool = True
    mtp: bool = True
    """Draft with the model's own MTP layer, if it has one: fewer steps, the same text."""
    precision: Precision = "int8"
    """int8: a quarter of the memory, faster, and exact in any batch. float32: the checkpoint's own values,
    and what runs where the 8-bit kernels could not be compiled."""
    threads: int | None = None
    """CPU threads of one step. None: every core this process may use."""
    device: Device = "cpu"
    """cuda: bfloat16, and on Hopper 8 bits where the checkpoint has them; or all in float32, if that is asked for."""

    def __post_init__(self) -> None:
        for name in ("kv_gb", "max_running", "step_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} is {value!r}", hint="must be above 0", param=name)
        for name, known in (("precision", get_args(Precision)), ("device", get_args(Device))):
            if getattr(self, name) not in known:
                hint = f"known: {', '.join(known)}"
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}", hint=hint, param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 4 * 2**20
    stall_s: float = 20.0
    """Work but no step for so long: the server no longer calls itself ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Bounds of the gateway's own waiting: nothing in it waits without one of these."""

    prefill_ahead_tokens: int = 8192
    """Given to one prefill worker at once; the rest waits here, where any worker can take it."""
    heartbeat_s: float = 0.25
    """Longest silence that a worker is asked for."""
    silence_s: float = 2.0
    """Longest silence that is borne: then the worker is suspected and its requests are placed again."""
    stall_s: float = 30.0
    """Work but no step for so long: as good as silent."""
    distrust_s: float = 10.0
    """A suspected life that nobody ended by then may say hello again."""
    queue_s: float = 60.0
    """Longest wait for a worker to be there, or to have room."""
    prefill_s: float = 60.0
    transfer_s: float = 10.0
    token_s: float = 30.0
    """Longest wait for the next token of an answer."""
    rest_s: float = 0.1
    """Before a request that a worker gave back is placed again; longer each time."""
    max_losses: int = 8
    """Times that one request may lose its worker before it is given up: it may be what they die of."""

    def __post_init__(self) -> None:
        assert 0 < self.heartbeat_s < self.silence_s <= self.stall_s
        assert self.prefill_ahead_tokens > 0 and self.max_losses > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Bounds of the waiting before a backend, where the order is decided."""

    queue_tokens: int = 262_144
    """Tokens of requests without a first token; more are refused."""
    max_wait_s: float = 60.0
    """Longest wait of a request that names no longest time to its first token."""
    window_s: float = 0.01
    """How much work is inside at once while requests compete: as little as keeps the backend busy."""
    wide_tokens: int = 8192
    """How much is inside at once, for each prompt that is worked on, while all requests are alike."""
    credit_s: float = 0.25
    """How much of the backend's time a tenant may have saved up by asking for less than its share."""
    compete_s: float = 60.0
    """How long after two different tenants or priorities were seen they are still thought to compete."""
    reserve: float = 0.125
    """Share of the decode slots that is kept for tenants below their share while requests compete."""

    def __post_init__(self) -> None:
        for name in ("queue_tokens", "max_wait_s", "window_s", "wide_tokens"):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidRequest(f"{name} is {value!r}", hint="must be above 0", param=name)
        if not 0 <= self.reserve < 1:
            raise InvalidRequest(f"reserve is {self.reserve!r}", hint="must be at least 0 and below 1", param="reserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """What stands behind one cache member's memory."""

    folder: str
    """Each member has its own folder in it."""
    num_bytes: int
    fingerprint: str = "00" * 16
    """Whose blocks these are, in hexadecimal: what was written for another model or layout is not read."""
    write_bytes_per_s: float = 200e6
    """Bound of what is written in the long run; what does not fit is not copied, and counted."""

    def __post_init__(self) -> None:
        for name in ("num_bytes", "write_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}", hint="must be above 0", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """One member of the cache pool."""

    slot_bytes: int
    """Largest block it takes."""
    num_slots: int
    lease_s: float = 5.0
    """How long a reader may read; afterwards what it reads may be gone, which it notices."""
    write_s: float = 5.0
    """How long a writer may write; afterwards others may write the same block elsewhere."""
    namespace_slots: int | None = None
    """Most slots of one tenant. None: all of them."""
    disk: DiskConfig | None = None

    def __post_init__(self) -> None:
        for name in ("slot_bytes", "num_slots", "lease_s", "write_s", "namespace_slots"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} is {value!r}", hint="must be above 0", param=name)
