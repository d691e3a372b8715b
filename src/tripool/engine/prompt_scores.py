"""Log-probabilities of a prompt's own tokens, from the hidden states of its rows.

A prompt is computed in chunks, and each chunk leaves its scores in the sequence: row p says how likely token p + 1 was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tripool.core import TokenLogprobs
from tripool.sequence import Seq, Task

_ROWS = 32
"""Rows of logits in memory at once: a few megabytes for a large vocabulary."""


def score_prompts(
    tasks: Sequence[Task], hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """`hidden`: final states of all rows, in the order of the tasks. A chunk computed again replaces its scores."""
    row = 0
    for task in tasks:
        seq, work = task.seq, task.work
        if seq.scores_prompt and not work.decode:
            del seq.prompt_scores[work.start :]
            count = min(work.stop, seq.prompt_len - 1) - work.start
            for first in range(0, count, _ROWS):
                some = min(_ROWS, count - first)
                _score(seq, work.start + first, logits_of(hidden[row + first : row + first + some]))
        row += task.num_rows


def _score(seq: Seq, position: int, logits: torch.Tensor) -> None:
    """`logits`: of consecutive rows from this position on."""
    logprobs = logits.nan_to_num(nan=float("-inf")).log_softmax(-1)
    following = torch.tensor(seq.tokens[position + 1 : position + 1 + len(logprobs)])
    chosen = logprobs.gather(1, following[:, None])[:, 0].tolist()
    best = logprobs.topk(min(seq.request.params.prompt_logprobs or 0, logprobs.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    scored = zip(chosen, pairs, strict=True)
    seq.prompt_scores += [TokenLogprobs(score, tuple(zip(*top, strict=True))) for score, top in scored]
