"""Compares two checkpoints on one text: perplexity of each, and agreement of the second with the first.

- perplexity: exp of the mean loss over every token of the text except the first of each window.
- next-token agreement: share of the same positions at which both predict the same token, given the text.
- KL: mean of KL(A ‖ B) over the same positions, in nats.
- greedy agreement: both continue greedily from the start of each window; share of A's tokens before the first that
  differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from tripool.checkpoints import Checkpoint
from tripool.core import BLOCK_TOKENS
from tripool.engine.runner import Runner, Work
from tripool.kernels import CPU, CPU8, KernelTable
from tripool.models import load_model
from tripool.quant.watched import W8A8

Arithmetic = Literal["float32", "int8", "w8a8"]
"""float32: weights are dequantised. int8: the 8-bit kernels. w8a8: the layout's definition in float32: integer weights,
inputs quantised per token.
"""

TABLES: dict[Arithmetic, KernelTable] = {"float32": CPU, "int8": CPU8, "w8a8": W8A8}
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    perplexity_a: float
    perplexity_b: float
    next_token_agreement: float
    mean_kl: float
    greedy_agreement: float
    num_tokens: int
    num_greedy_tokens: int

    @property
    def perplexity_change(self) -> float:
        return self.perplexity_b / self.perplexity_a - 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"perplexity_change": self.perplexity_change}


class Side:
    """One loaded checkpoint that computes logits."""

    def __init__(self, checkpoint: Checkpoint, arithmetic: Arithmetic, *, window: int, num_answers: int) -> None:
        self.name = checkpoint.name
        model = load_model(checkpoint, kernels=TABLES[arithmetic])
        self.vocab = model.arch.vocab
        self._blocks = -(-window // BLOCK_TOKENS)
        self._runner = Runner(model, num_blocks=max(num_answers, 1) * self._blocks)

    def logits(self, window: Sequence[int]) -> torch.Tensor:
        """Logits after each token of the window."""
        work = Work(list(window), 0, self._table(0), False)
        return self._runner.logits(self._runner.hidden([work]))

    def log_likelihoods(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[float]:
        """Of each continuation after the context, which is read once."""
        before = len(context) - 1
        if before:
            self._runner.hidden([Work(list(context[:-1]), 0, self._table(0), False)])
        found = []
        for tokens in continuations:
            work = Work([context[-1], *tokens[:-1]], before, self._table(0), False)
            said = self._runner.logits(self._runner.hidden([work])).log_softmax(-1)
            found.append(float(said.gather(1, torch.tensor(tokens)[:, None]).double().sum()))
        return found

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Greedy continuation of each prompt, without stopping early."""
        return self.generate(prompts, count, lambda answer: False)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, ended: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """Greedy continuation of each prompt by `count` tokens, or until it has `ended`."""
        work = [Work(list(prompt), 0, self._table(i), False) for i, prompt in enumerate(prompts)]
        answers: list[list[int]] = [[] for _ in prompts]
        last = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        hidden, going = self._runner.hidden(work)[last], list(range(len(prompts)))
        for step in range(count):
            for i, token in zip(going, self._runner.logits(hidden).argmax(-1).tolist(), strict=True):
                answers[i].append(token)
            going = [i for i in going if not ended(answers[i])]
            if step + 1 == count or not going:
                break
            places = [(i, len(prompts[i]) + step) for i in going]
            work = [Work(answers[i][-1:], place, self._table(i), True) for i, place in places]
            hidden = self._runner.hidden(work)
        return answers

    def _table(self, answer: int) -> list[int]:
        return list(range(answer * self._blocks, (answer + 1) * self._blocks))


@torch.inference_mode()
def compare(
    a: Side,
    b: Side,
    windows: Sequence[Sequence[int]],
    *,
    starts: Sequence[int] | None = None,
    num_answers: int = 16,
    answer_tokens: int = 32,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """`starts`: the first counted token of each window; tokens before it are context only. None: all but the first."""
    assert a.vocab == b.vocab, "checked by the caller"
    loss_a = loss_b = kl = 0.0
    same = count = 0
    for i, window in enumerate(windows):
        start = max(starts[i], 1) if starts else 1
        said_a, said_b = (side.logits(window)[start - 1 : -1].log_softmax(-1) for side in (a, b))
        wanted = torch.tensor(window[start:])[:, None]
        loss_a -= float(said_a.gather(1, wanted).double().sum())
        loss_b -= float(said_b.gather(1, wanted).double().sum())
        same += int((said_a.argmax(-1) == said_b.argmax(-1)).sum())
        kl += float((said_a.exp() * (said_a - said_b)).double().sum())
        count += len(wanted)
        on_progress(i + 1, len(windows))
    equal, total = _greedy(a, b, windows[:num_answers], answer_tokens)
    return Comparison(
        perplexity_a=math.exp(loss_a / count),
        perplexity_b=math.exp(loss_b / count),
        next_token_agreement=same / count,
        mean_kl=kl / count,
        greedy_agreement=equal / max(total, 1),
        num_tokens=count,
        num_greedy_tokens=total,
    )


def _greedy(a: Side, b: Side, windows: Sequence[Sequence[int]], count: int) -> tuple[int, int]:
    """(tokens of A that B generated too before the first difference, tokens of A)."""
    prompts = [window[:PROMPT_TOKENS] for window in windows]
    if not prompts:
        return 0, 0
    equal = 0
    for one, other in zip(a.greedy(prompts, count), b.greedy(prompts, count), strict=True):
        equal += next((i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y), count)
    return equal, count * len(prompts)
