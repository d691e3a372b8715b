"""One choice of one request on its way through an engine: tokens, progress and the blocks it holds. Pure data.

Positions below the prompt's end are computed in prompt form, all others in decode form, also when they are computed
again after a preemption: a token's KV is then the same whoever computes it and whenever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tripool.core import FinishReason, Request, TokenLogprobs


@dataclass(slots=True, eq=False)
class Seq:
    request: Request
    choice: int
    order: int
    """Arrival number. Lower is older; an older sequence may take blocks from a younger one, never the reverse."""
    max_new_tokens: int
    tokens: list[int]
    """Prompt, then everything generated so far."""
    num_computed: int = 0
    """Tokens whose KV stands in the blocks of `table`."""
    table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Chain keys of the leading full blocks; they outlive a preemption, which only loses the blocks."""
    num_published: int = 0
    """Leading blocks of `table` already offered to the prefix index."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache at the first admission; None before it."""
    leader: Seq | None = None
    """The request's first choice: the others wait for its prompt and then share its blocks."""
    finish: FinishReason | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def prompt_done(self) -> bool:
        return self.num_computed >= self.prompt_len

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end this sequence once `min_tokens` are there."""
        params = self.request.params
        ends = frozenset() if params.ignore_eos else self.request.end_ids
        return ends | frozenset(params.stop_token_ids)

    @property
    def waits_for_leader(self) -> bool:
        return self.leader is not None and self.leader.finish is None and not self.leader.prompt_done

    def work(self, count: int) -> Work:
        """The next `count` uncomputed tokens, cut at the prompt's end so that a piece has one form."""
        start = self.num_computed
        decode = start >= self.prompt_len
        stop = min(start + count, len(self.tokens) if decode else self.prompt_len)
        assert stop > start, "nothing left to compute"
        return Work(self.tokens[start:stop], start, self.table, decode)


@dataclass(slots=True)
class Work:
    """Tokens to run at consecutive positions. KV of position p lives in block table[p // 64], slot p % 64."""

    tokens: list[int]
    start: int
    table: list[int]
    decode: bool
    """False: prompt form. True: decode form (for MLA the absorbed one)."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True, eq=False)
class Task:
    """A sequence's share of one step."""

    seq: Seq
    work: Work

    @property
    def samples(self) -> bool:
        """Whether the last row yields a new token: only when nothing known is left to compute."""
        return self.work.stop == len(self.seq.tokens)


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None = None
