"""Configuration: one small frozen dataclass per room; each part receives its own slice, never the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tripool.core import BLOCK_TOKENS
from tripool.errors import InvalidRequest

Precision = Literal["float32", "int8"]


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
    precision: Precision = "float32"
    """float32: the checkpoint's own values. int8: faster, a quarter of the memory, and exact in any batch."""
    threads: int | None = None
    """CPU threads of one step. None: every core this process may use."""

    def __post_init__(self) -> None:
        for name in ("kv_gb", "max_running", "step_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} is {value!r}", hint="must be above 0", param=name)
        if self.precision not in get_args(Precision):
            hint = f"known: {', '.join(get_args(Precision))}"
            raise InvalidRequest(f"precision is {self.precision!r}", hint=hint, param="precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 4 * 2**20
