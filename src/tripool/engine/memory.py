"""Sizes of an engine's KV memory and of its steps, by what a device has. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.core import BLOCK_TOKENS
from tripool.errors import DeviceOutOfMemory
from tripool.sequence import Work

_DEFAULT_CONTEXTS = 8
_DEFAULT_KV_BYTES = 2 * 2**30
_MARGIN = 50
"""A fiftieth of the device stays free: graphs that are captured while serving, and fragmentation."""
_LEAST_MARGIN_BYTES = 2**30
_LEAST_KV_TOKENS = 1024
_FULL_ROWS = 256
"""Rows at which a product computes for as long as it reads its weights: operations per byte of the bfloat16 products of
GPUs from the A100 (156) to the H100 (295)."""
CPU_STEP_TOKENS = 512
"""More would make running answers wait for longer."""
_LEAST_STEP_TOKENS, MOST_STEP_TOKENS = 2048, 8192
_TOKENS_PER_GB = 64
"""Of a device's memory: activations of a step stay a few per cent of it."""

SMALLER = (
    "end other programs that use the GPU, or give less: --kv-gb, --max-running, --step-tokens; "
    "or serve the checkpoint in INT8 (tripool quantize)"
)


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Memory of a device. What torch holds without using it counts as free."""

    free: int
    total: int

    def __str__(self) -> str:
        return f"{in_gb(self.free)} of {in_gb(self.total)} are free"


def in_gb(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GB"


def refused(what: str, needed_bytes: int, memory: DeviceBytes) -> DeviceOutOfMemory:
    return DeviceOutOfMemory(f"{what}: {in_gb(needed_bytes)} needed, {memory}", hint=SMALLER)


def kv_blocks(block_bytes: int, context_tokens: int, kv_gb: float | None) -> int:
    """What the user gives, or room for a few full contexts within a bound; always at least two blocks.

    `block_bytes`: see `Arch.block_bytes`.
    """
    if kv_gb is not None:
        return max(2, int(kv_gb * 2**30 / block_bytes))
    wanted = _DEFAULT_CONTEXTS * -(-context_tokens // BLOCK_TOKENS)
    return max(2, min(wanted, _DEFAULT_KV_BYTES // block_bytes))


def kv_blocks_beside(step_bytes: int, memory: DeviceBytes, block_bytes: int) -> int:
    """Blocks in what is free once the weights are loaded, less the largest step and a margin. One block more is
    allocated, for padding rows."""
    beside = step_bytes + max(_LEAST_MARGIN_BYTES, memory.total // _MARGIN) + block_bytes
    num_blocks = (memory.free - beside) // block_bytes
    if num_blocks * BLOCK_TOKENS < _LEAST_KV_TOKENS:
        needed_bytes = beside + _LEAST_KV_TOKENS // BLOCK_TOKENS * block_bytes
        raise refused(f"no room for KV beside weights and a step of {in_gb(step_bytes)}", needed_bytes, memory)
    return num_blocks


def default_step_tokens(total_bytes: int, experts: int = 1, top_k: int = 1) -> int:
    """Tokens of a step at which every expert gets as many rows as its products need to be bound by arithmetic, as a
    power of two, within what the device's memory takes. More would only make the steps longer that decoding
    sequences wait for."""
    wanted = max(_LEAST_STEP_TOKENS, _FULL_ROWS * experts // top_k)
    most = min(MOST_STEP_TOKENS, max(_LEAST_STEP_TOKENS, _TOKENS_PER_GB * total_bytes // 2**30))
    return min(1 << (wanted - 1).bit_length(), 1 << (most.bit_length() - 1))


@dataclass(frozen=True, slots=True)
class LargestStep:
    """Bounds of an engine's steps."""

    max_running: int
    step_tokens: int
    context_tokens: int

    @property
    def _stop(self) -> int:
        """The MTP layer's rows are one position further."""
        return max(1, self.context_tokens - 1)

    def prompts(self, block: int, gathered: int) -> list[Work]:
        """As many rows as a step has, beside contexts of `gathered` tokens, all in one block."""
        readers = min(max(1, self.max_running // 2), -(-gathered // self._stop))
        work = [_rows(1, self._stop - 1, block)] * readers
        left = max(1, self.step_tokens - readers)
        while left and len(work) < max(2, self.max_running):
            work.append(_rows(min(left, self._stop), 0, block))
            left -= len(work[-1].tokens)
        return work

    def decodes(self, block: int, queries: int) -> list[Work]:
        """Every sequence at the end of its context."""
        return [_rows(queries, max(0, self._stop - queries), block, decode=True)] * self.max_running


def _rows(count: int, start: int, block: int, *, decode: bool = False) -> Work:
    return Work([0] * count, start, [block] * -(-(start + count) // BLOCK_TOKENS), decode)
