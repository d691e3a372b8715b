"""How much of a trace's prompts was asked before: what a cache that forgets nothing would find. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tripool.simulate.traces.ask import Ask


@dataclass(frozen=True, slots=True)
class Reuse:
    num_requests: int
    blocks: float
    """Share of all prompt blocks that stand in the longest known prefix of their prompt."""
    tokens: float
    input_tokens: float
    output_tokens: float
    """Means."""
    span_s: float
    most_blocks: int
    """All prompts' blocks together."""


def ideal_reuse(asks: Iterable[Ask]) -> Reuse:
    seen: set[tuple[str, int]] = set()
    count = known_blocks = all_blocks = known_tokens = prompts = answers = 0
    first_s: float | None = None
    last_s = 0.0
    for ask in asks:
        count += 1
        prompts += ask.input_tokens
        answers += ask.output_tokens
        first_s, last_s = ask.arrival_s if first_s is None else first_s, ask.arrival_s
        known = 0
        while known < len(ask.block_ids) and (ask.tenant, ask.block_ids[known]) in seen:
            known += 1
        seen.update((ask.tenant, block_id) for block_id in ask.block_ids[known:])
        known_blocks += known
        all_blocks += len(ask.block_ids) or -(-ask.input_tokens // ask.block_tokens)
        # The last token is always computed: something has to be sampled from.
        known_tokens += min(known * ask.block_tokens, ask.input_tokens - 1)
    return Reuse(
        count, known_blocks / max(1, all_blocks), known_tokens / max(1, prompts), prompts / max(1, count),
        answers / max(1, count), last_s - (first_s or 0.0), all_blocks,
    )  # fmt: skip
