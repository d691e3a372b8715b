"""Ways to push token lists through a runner: whole, in chunks, and in mixed batches over scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tripool.core import BLOCK_TOKENS
from tripool.engine.runner import Runner, Work


@dataclass
class Track:
    """One sequence on its way: positions below `prompt_end` take the prompt form, the others the decode form."""

    tokens: Sequence[int]
    table: list[int]
    prompt_end: int
    computed: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.computed == len(self.tokens)

    def next(self, count: int) -> Work:
        decode = self.computed >= self.prompt_end
        stop = min(self.computed + count, len(self.tokens) if decode else self.prompt_end)
        return Work(list(self.tokens[self.computed : stop]), self.computed, self.table, decode)


def deal_tables(lengths: Sequence[int], num_blocks: int, rng: random.Random) -> list[list[int]]:
    """Block tables without order or neighbours: a shuffled pool dealt out one block at a time."""
    pool = list(range(num_blocks))
    rng.shuffle(pool)
    tables: list[list[int]] = [[] for _ in lengths]
    wanted = [-(-n // BLOCK_TOKENS) for n in lengths]
    assert sum(wanted) <= num_blocks
    for round_ in range(max(wanted)):
        for table, want in zip(tables, wanted, strict=True):
            if round_ < want:
                table.append(pool.pop())
    return tables


def advance(runner: Runner, tracks: Sequence[Track], work: Sequence[Work]) -> None:
    """One call of the runner; its rows go back to their tracks as logits."""
    logits = runner.logits(runner.hidden(list(work)))
    for track, piece, rows in zip(tracks, work, logits.split([len(w.tokens) for w in work]), strict=True):
        track.rows.append(rows)
        track.computed += len(piece.tokens)


def chunked(runner: Runner, tokens: Sequence[int], table: list[int], chunk: int, *, decode: bool) -> torch.Tensor:
    """Logits of every position, computed `chunk` tokens at a time in one form."""
    track = Track(tokens, table, prompt_end=0 if decode else len(tokens))
    while not track.done:
        advance(runner, [track], [track.next(chunk)])
    return torch.cat(track.rows)


def mixed(runner: Runner, tracks: Sequence[Track], rng: random.Random) -> None:
    """Everything to its end in random company: other members, other order, other piece sizes at every call."""
    while any(not t.done for t in tracks):
        waiting = [t for t in tracks if not t.done]
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        work = [t.next(rng.randint(1, 4) if t.computed >= t.prompt_end else rng.randint(1, 90)) for t in chosen]
        advance(runner, chosen, work)


def greedy(
    runner: Runner, prompts: Sequence[Sequence[int]], tables: Sequence[list[int]], count: int
) -> list[list[int]]:
    """All prompts in one batch, then `count` tokens each by steps of one token, always the likeliest."""
    work = [Work(list(p), 0, table, False) for p, table in zip(prompts, tables, strict=True)]
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        hidden = runner.hidden(work)
        last = torch.tensor([len(w.tokens) for w in work]).cumsum(0) - 1
        chosen = runner.logits(hidden[last]).argmax(-1).tolist()
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
        work = [Work([t], w.start + len(w.tokens), w.table, True) for w, t in zip(work, chosen, strict=True)]
    return answers
