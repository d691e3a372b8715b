"""One request of a trace, whatever it was read from, and the names of its KV blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tripool.bench.trace import TRACE_BLOCK_TOKENS, TraceRequest
from tripool.cache import namespace_tag

_OWN = 1 << 62
"""Names of blocks that are nobody else's begin here."""


@dataclass(frozen=True, slots=True)
class Ask:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """One per block of the prompt, as in Mooncake's traces; empty: it shares nothing."""
    tenant: str = ""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Of one of those."""


def from_mooncake(requests: Iterable[TraceRequest], block_tokens: int = TRACE_BLOCK_TOKENS) -> Iterator[Ask]:
    for each in requests:
        yield Ask(each.arrival_s, each.input_tokens, each.output_tokens, each.block_ids, block_tokens=block_tokens)


def chain_keys(ask: Ask, serial: int, block_tokens: int, namespace: str) -> list[bytes]:
    """Of the prompt's full blocks of `block_tokens`. A trace's id stands for a block and all before it, as keys do."""
    salt = namespace_tag(namespace)[:8]
    count = ask.input_tokens // block_tokens
    if not ask.block_ids:
        first = _OWN + (serial << 24)
        return [salt + (first + number).to_bytes(8, "little") for number in range(count)]
    assert ask.block_tokens % block_tokens == 0, "a trace's block holds a whole number of ours"
    parts = ask.block_tokens // block_tokens
    names = (block_id * parts + part for block_id in ask.block_ids for part in range(parts))
    return [salt + name.to_bytes(8, "little", signed=True) for name, _ in zip(names, range(count), strict=False)]
