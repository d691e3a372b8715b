"""The state of one choice in an engine: tokens, progress, and the KV blocks it holds. Pure data.

Positions within the prompt are computed in prompt form, all others in decode form, also when they are computed again
after a preemption: so a token's KV does not depend on which worker computes it, or when.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from tripool.core import FinishReason, Request, SamplingParams, TokenLogprobs

UNKNOWN = -1
"""In `Seq.tokens`: sampled by a step that is still running."""


class Guide(Protocol):
    """State of one answer in its grammar. Ask for the mask, sample, accept the token once it is final."""

    def mask(self) -> Any:
        """numpy bool [vocab], read-only: the tokens allowed next, including those that end the answer."""
        ...

    def accept(self, token_id: int) -> None: ...

    @property
    def mask_s(self) -> float:
        """Duration of the newest mask: an estimate for the next one."""
        ...

    @property
    def done(self) -> bool:
        """The grammar is complete: only an end can follow."""
        ...

    @property
    def spent(self) -> bool:
        """No token is allowed next: complete without an end token, or stopped by a limit of the grammar engine."""
        ...


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
    """Tokens whose KV is in the blocks of `table`."""
    table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Chain keys of the leading full blocks; a preemption keeps them and frees only the blocks."""
    num_published: int = 0
    """Leading blocks of `table` already published to the prefix index."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache when it was first scheduled; None before."""
    leader: Seq | None = None
    """The request's first choice: the others wait for its prompt and then share its blocks."""
    finish: FinishReason | None = None
    num_pending: int = 0
    """Tokens that a running step samples. They stand as `UNKNOWN` at the end of `tokens`, or not at all if the
    sequence does not go on without them."""
    draft: int | None = None
    """Draft of the token after the newest one, for the next step to verify."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts verified, and how many of them were accepted."""
    carry: object | None = None
    """State of the drafter between two steps, lost with the blocks. Opaque: may hold a tensor."""
    guide: Guide | None = None
    """The request's grammar after the tokens so far; a preemption leaves it as it is."""
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are computed; they leave with the first token."""
    prompt_len: int = 0
    is_background: bool = False
    """Of the request. A step looks at that of every sequence."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end this sequence once it has `min_tokens`."""
    _draws_from: int | float = inf
    """Generated tokens from which on its parameters leave logits untouched and draw by temperature and noise alone."""
    _simple_from: int | float = inf
    """The same, if also no log-probabilities are wanted."""

    def __post_init__(self) -> None:
        params = self.request.params
        self.prompt_len = len(self.request.prompt_ids)
        self.is_background = self.request.slo.background
        self.stop_ids = self.request.stop_ids
        self._draws_from = params.min_tokens if _draws(params) else inf
        self._simple_from = self._draws_from if params.logprobs is None else inf

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def prompt_done(self) -> bool:
        return self.num_computed >= self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still wanted: of the first choice, before its first token."""
        wanted = self.request.params.prompt_logprobs is not None and self.leader is None
        return wanted and len(self.tokens) == self.prompt_len

    def take_prompt_scores(self) -> tuple[TokenLogprobs, ...] | None:
        if not self.prompt_scores:
            return None
        scores, self.prompt_scores = tuple(self.prompt_scores), []
        return scores

    @property
    def waits(self) -> bool:
        """Whether it cannot be admitted yet: its newest token is unknown, or the prompt that it shares with its
        leader is not settled."""
        leader = self.leader
        if self.num_pending or leader is None or leader.finish is not None:
            return self.num_pending > 0
        return not leader.prompt_done or leader.num_pending >= leader.num_generated > 0

    @property
    def draws(self) -> bool:
        """Whether its next token is chosen by nothing but logits, a temperature and noise."""
        return self.guide is None and len(self.tokens) - self.prompt_len >= self._draws_from

    @property
    def is_simple(self) -> bool:
        """Whether that token's id is all that is wanted."""
        return self.guide is None and len(self.tokens) - self.prompt_len >= self._simple_from

    @property
    def needs_result(self) -> bool:
        """Whether its next row depends on a result that is not known yet: its answer is then complete, or the token
        after it is chosen by more than logits and noise."""
        if not self.num_pending:
            return False
        num_generated = len(self.tokens) - self.prompt_len
        return num_generated >= self.max_new_tokens or self.guide is not None or num_generated < self._simple_from

    @property
    def mask_s(self) -> float:
        """Expected duration of the next mask."""
        return 0.0 if self.guide is None else self.guide.mask_s

    @property
    def wants_draft(self) -> bool:
        """Whether two more tokens may follow: the sampled one, and the one that an accepted draft adds."""
        answering = self.prompt_done and self.num_computed == len(self.tokens) - 1
        return self.finish is None and answering and self.num_generated + 2 <= self.max_new_tokens

    def finish_reason(self, position: int) -> FinishReason | None:
        """Whether the token at this position, the newest known, is the last. Before `min_tokens` the sampler picks no
        end, unless a grammar leaves no choice."""
        if self.guide is not None and self.guide.spent:
            # Complete; or cut off by a limit, which is what "length" tells a client.
            return "stop" if self.guide.done else "length"
        if self.tokens[position] in self.stop_ids:
            return "stop"
        return "length" if position + 1 - self.prompt_len >= self.max_new_tokens else None

    def work(self, count: int) -> Work:
        """The next `count` uncomputed tokens, cut at the prompt's end so that a piece has one form."""
        start, tokens, prompt_len = self.num_computed, self.tokens, self.prompt_len
        decode = start >= prompt_len
        piece = tokens[start : start + count] if decode or start + count < prompt_len else tokens[start:prompt_len]
        assert piece, "nothing left to compute"
        return Work(piece, start, self.table, decode)

    def work_stop(self, count: int) -> int:
        """Where such a piece ends."""
        start = self.num_computed
        end = len(self.tokens) if start >= self.prompt_len else self.prompt_len
        return start + count if start + count < end else end


@dataclass(slots=True, init=False)
class Work:
    """Tokens to run at consecutive positions. The KV of position p is in block table[p // 64], slot p % 64."""

    tokens: list[int]
    start: int
    table: list[int]
    decode: bool
    """False: prompt form. True: decode form (for MLA the absorbed one)."""
    stop: int

    def __init__(self, tokens: list[int], start: int, table: list[int], decode: bool) -> None:
        """Written out: one is made for every sequence of every step."""
        self.tokens, self.start, self.table, self.decode = tokens, start, table, decode
        self.stop = start + len(tokens)


@dataclass(slots=True, eq=False, init=False)
class Task:
    """A sequence's share of one step."""

    seq: Seq
    work: Work
    """Known tokens."""
    draft: int | None
    """Runs as one more row; counts as computed only if the row before it yields the same token."""
    samples: bool
    """Whether the work's last row yields a new token: only when no known token is left to compute."""
    in_flight: bool
    """Submitted, and its sequence goes on before it is settled (`Scheduler.advance`)."""

    def __init__(self, seq: Seq, work: Work, draft: int | None = None) -> None:
        self.seq, self.work, self.draft, self.in_flight = seq, work, draft, False
        self.samples = work.stop == len(seq.tokens)

    @property
    def rows(self) -> Work:
        """What the device runs: the work, then the draft."""
        work = self.work
        if self.draft is None:
            return work
        return Work([*work.tokens, self.draft], work.start, work.table, work.decode)

    @property
    def num_rows(self) -> int:
        return len(self.work.tokens) + (self.draft is not None)


@dataclass(slots=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None = None


def _draws(params: SamplingParams) -> bool:
    penalised = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    keeps_all = params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0
    return not penalised and not params.logit_bias and (params.temperature == 0 or keeps_all)
