"""Sampling: from logits to tokens. A row's token depends on its own logits, history and noise key only.

Order: penalties and bias change logits; banned tokens, and those the grammar does not allow, go to -inf; temperature;
top-k, then top-p, then min-p keep a set; Gumbel noise picks from it. Temperature 0 takes the largest. Log-probabilities
are those of the untouched logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import log

import torch

from tripool.core import SamplingParams, TokenLogprobs
from tripool.engine.noise import draw, gumbel, noise_key, token_hashes
from tripool.kernels.cpu8.draw import draw as fast_draw
from tripool.kernels.cpu8.draw import largest as fast_largest
from tripool.kernels.cpu8.library import variants
from tripool.kernels.table import Draw
from tripool.sequence import Sampled, Seq

_FIRST_CANDIDATES = 256
"""Tokens that top-p sorts first; nearly always enough, and much cheaper than the whole vocabulary."""

_LARGEST = 1e30
"""Bound of a logit's magnitude before sampling: divided by any temperature it is still finite."""

Guard = Callable[[Seq, Callable[[], Sampled]], Sampled | None]
"""Runs the sampling of one sequence. None: it failed, and only its own request ends."""


def unguarded(seq: Seq, choose: Callable[[], Sampled]) -> Sampled | None:
    return choose()


class Sampler:
    def __init__(self, vocab: int) -> None:
        self._hashes = token_hashes(vocab)
        self._fast = bool(variants())

    def sample(self, logits: torch.Tensor, seqs: Sequence[Seq], guard: Guard = unguarded) -> Sequence[Sampled | None]:
        """logits float32 [rows, vocab], a row per sequence. Rows may be changed in place."""
        return [guard(seq, partial(self._sample_row, row, seq)) for row, seq in zip(logits, seqs, strict=True)]

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """What each draw chooses from its row of logits, which may be those of the first ids only. Rows may be changed
        in place."""
        if not any(temperature for temperature, _ in draws):
            return self._likeliest(logits)
        return [self._drawn(_bounded(row), *draw) for row, draw in zip(logits, draws, strict=True)]

    def guess(self, logits: torch.Tensor, seqs: Sequence[Seq]) -> list[int]:
        """Draft tokens: what `sample` would choose from these logits, which may be those of the first ids only.

        History, settings and noise are those of the verifying step, so a good draft is accepted at any temperature.
        """
        return [self._choose(self._widened(row, seq), seq) for row, seq in zip(logits, seqs, strict=True)]

    def draws(self, seqs: Sequence[Seq]) -> list[Draw] | None:
        """The draws by which `guess` chooses; None if a sequence needs more than its logits and noise."""
        if not all(seq.draws for seq in seqs):
            return None
        return [draw_of(seq) for seq in seqs]

    def choices(self, seqs: Sequence[Seq], drafted: Sequence[Seq]) -> list[Draw] | None:
        """The draws by which `sample` chooses for each sequence, then those for the token after each draft; None if a
        sequence needs more than its logits and noise."""
        if not all(seq.is_simple for seq in seqs):
            return None
        return [draw_of(seq) for seq in seqs] + [draw_of(seq, ahead=1) for seq in drafted]

    def draws_ahead(self, seq: Seq, count: int) -> list[Draw] | None:
        """The draws of a sequence's next `count` tokens; None if it needs more than its logits and noise."""
        if not seq.is_simple:
            return None
        return [draw_of(seq, ahead) for ahead in range(count)]

    def _widened(self, row: torch.Tensor, seq: Seq) -> torch.Tensor:
        """Logits of the whole vocabulary, where any id of it may be penalised, banned or allowed."""
        row = _bounded(row)
        if not _adjusts(seq) or len(row) == len(self._hashes):
            return row
        return torch.cat((row, row.new_full((len(self._hashes) - len(row),), float("-inf"))))

    def _sample_row(self, row: torch.Tensor, seq: Seq) -> Sampled:
        params = seq.request.params
        row = _bounded(row)
        logprobs = None if params.logprobs is None else row.log_softmax(-1)
        token = self._choose(row, seq)
        return Sampled(token, None if logprobs is None else _report(logprobs, token, params.logprobs or 0))

    def _choose(self, row: torch.Tensor, seq: Seq) -> int:
        adjust(row, seq)
        return int(row.argmax()) if seq.request.params.temperature == 0 else self._draw(row, seq)

    def _likeliest(self, logits: torch.Tensor) -> list[int]:
        """The first largest of each row. Without C kernels by numpy, which is much faster than torch for one row."""
        if self._fast:
            return fast_largest(logits)
        tokens: list[int] = logits.numpy().argmax(-1).tolist()
        return tokens

    def _draw(self, row: torch.Tensor, seq: Seq) -> int:
        params, key = seq.request.params, _key(seq)
        if _keeps_all(params):
            return self._drawn(row, params.temperature, key)
        row = row / params.temperature
        kept = keep(row, params)
        return int(kept[(row[kept] + gumbel(key, self._hashes[kept])).argmax()])

    def _drawn(self, row: torch.Tensor, temperature: float, key: int) -> int:
        if temperature == 0:
            return int(row.argmax())
        return fast_draw(row, temperature, key) if self._fast else draw(row, temperature, key, self._hashes)


def _bounded(row: torch.Tensor) -> torch.Tensor:
    """Make finite, in place. NaN is never chosen while there is a number."""
    return row.nan_to_num_(nan=-_LARGEST).clamp_(-_LARGEST, _LARGEST)


def adjust(row: torch.Tensor, seq: Seq) -> None:
    """Apply penalties, bias and bans, in place. Finite logits stay finite, except banned tokens: -inf."""
    params = seq.request.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(seq.tokens)))
        values = row[seen]
        # Bounded again: a tiny penalty divides beyond what a float holds.
        penalty = params.repetition_penalty
        row[seen] = _bounded(torch.where(values > 0, values / penalty, values * penalty))
    if (params.frequency_penalty or params.presence_penalty) and seq.num_generated:
        counts = Counter(seq.tokens[seq.prompt_len :])
        tokens = torch.tensor(list(counts))
        times = torch.tensor(list(counts.values()), dtype=row.dtype)
        row[tokens] -= params.frequency_penalty * times + params.presence_penalty
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias))
        row[tokens] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype)
    if seq.num_generated < params.min_tokens:
        row[sorted(seq.stop_ids)] = float("-inf")
    if seq.guide is not None:
        _confine(row, torch.from_numpy(seq.guide.mask()))


def _confine(row: torch.Tensor, allowed: torch.Tensor) -> None:
    """The grammar overrides bans: if all that it allows is banned, the bans are dropped."""
    row.masked_fill_(~allowed, float("-inf"))
    if row.max() == float("-inf"):
        row[allowed] = 0.0


def keep(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Tokens that remain candidates, likeliest first if they were sorted."""
    if params.top_k == 0 and params.top_p == 1.0:
        return torch.where(row >= row.max() + _log(params.min_p))[0]
    order = _top(row, params)
    values = row[order]
    if params.top_p < 1.0:
        # Without top_k the mass is of the whole vocabulary, of which `order` may be only the head.
        total = torch.logsumexp(values if params.top_k else row, -1)
        before = (values - total).exp().cumsum(-1).roll(1)
        inside = before < params.top_p
        inside[0] = True  # the likeliest always: top_p may be 0 in float32
        order, values = order[inside], values[inside]
    if params.min_p > 0.0:
        order = order[values >= values[0] + _log(params.min_p)]
    return order


def _keeps_all(params: SamplingParams) -> bool:
    return params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0


def _key(seq: Seq, ahead: int = 0) -> int:
    return noise_key(seq.request.seed, seq.choice, seq.num_generated + ahead)


def draw_of(seq: Seq, ahead: int = 0) -> Draw:
    temperature = seq.request.params.temperature
    return temperature, _key(seq, ahead) if temperature else 0


def _top(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The likeliest tokens in order: `top_k` of them, or enough to contain the top-p set."""
    vocab = len(row)
    if params.top_k:
        return row.topk(min(params.top_k, vocab)).indices
    head = row.topk(min(_FIRST_CANDIDATES, vocab))
    if (head.values - torch.logsumexp(row, -1)).exp().sum() >= params.top_p:
        return head.indices
    return row.argsort(descending=True, stable=True)


def _report(logprobs: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    best = logprobs.topk(min(top, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprobs(float(logprobs[token]), tuple(pairs))


def _adjusts(seq: Seq) -> bool:
    """Whether `adjust` may change anything."""
    p = seq.request.params
    changed = p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty or p.logit_bias
    return bool(changed) or seq.guide is not None or seq.num_generated < p.min_tokens


def _log(p: float) -> float:
    return log(p) if p > 0 else float("-inf")
