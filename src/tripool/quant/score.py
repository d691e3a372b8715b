"""Scores a model on tasks, as lm-eval does: choices by their log-likelihood, written answers by exact match.

- acc: share of questions whose right choice is the likeliest, given the question.
- acc_norm: the same with each log-likelihood divided by the choice's length in characters.
- exact_match: share of greedy answers that are a right one, without white space around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tripool.checkpoints import Checkpoint
from tripool.errors import InvalidRequest
from tripool.models import read_arch
from tripool.quant.evaluate import Arithmetic, Side
from tripool.quant.tasks import Question, Task
from tripool.text import Tokenizer

_AT_ONCE = 8
"""Written answers computed together."""


@dataclass(frozen=True, slots=True)
class Score:
    task: str
    num_questions: int
    figures: dict[str, float]
    errors: dict[str, float]
    """Standard errors of the means."""
    samples: list[dict[str, Any]]
    """Per question: log-likelihoods, or the answer; and what it counts."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question in tokens."""

    question: Question
    context: list[int]
    choices: list[list[int]]


@torch.inference_mode()
def score(
    checkpoint: Checkpoint,
    arithmetic: Arithmetic,
    tasks: Sequence[Task],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Score]:
    """`on_progress` gets the number of questions answered, and of all. Tokenises all of them before loading weights."""
    tokenizer, context_tokens = Tokenizer(checkpoint.text), read_arch(checkpoint).context_tokens
    asked = [[_ask(task, question, tokenizer) for question in task.questions] for task in tasks]
    window = 0
    for task, several in zip(tasks, asked, strict=True):
        for one in several:
            longest = max(map(len, one.choices), default=task.max_tokens)
            if len(one.context) + longest > context_tokens:
                problem = f"task '{task.name}': {one.question.text[:60]!r} takes {len(one.context) + longest} tokens"
                raise InvalidRequest(problem, hint=f"the model reads {context_tokens}: shorten it", param="tasks")
            window = max(window, len(one.context) + longest)
    at_once = 1 if all(task.is_choice for task in tasks) else _AT_ONCE
    side = Side(checkpoint, arithmetic, window=window, num_answers=at_once)
    total, scores = sum(map(len, asked)), list[Score]()
    for task, several in zip(tasks, asked, strict=True):
        before = sum(one.num_questions for one in scores)
        samples: list[dict[str, Any]] = []
        for start in range(0, len(several), at_once):
            part = several[start : start + at_once]
            samples += [_choose(side, one) for one in part] if task.is_choice else _write(side, task, part, tokenizer)
            on_progress(before + len(samples), total)
        scores.append(_counted(task, samples))
    return scores


def _ask(task: Task, question: Question, tokenizer: Tokenizer) -> _Asked:
    text, delimiter = task.instruction + question.text, task.delimiter
    if task.chat:
        text, delimiter = tokenizer.render_chat([{"role": "user", "content": text}], add_generation_prompt=True), ""
    # White space at the end of a question belongs to the choice: tokenizers join it to the word that follows.
    bare = text.rstrip() if question.choices else text
    special = not task.chat  # a chat template writes the begin token itself
    context = tokenizer.encode(bare, special=special)
    if not context:
        raise InvalidRequest(f"task '{task.name}' has a question of no tokens", hint="give it a text", param="tasks")
    rest = text[len(bare) :] + delimiter
    choices = [tokenizer.encode(bare + rest + choice, special=special)[len(context) :] for choice in question.choices]
    if not all(choices):
        problem = f"task '{task.name}': a choice of {question.text[:60]!r} adds no token to it"
        raise InvalidRequest(problem, hint="end the question with a space or a colon", param="tasks")
    return _Asked(question, context, choices)


def _choose(side: Side, asked: _Asked) -> dict[str, Any]:
    question = asked.question
    likely = side.log_likelihoods(asked.context, asked.choices)
    by_length = [value / len(choice) for value, choice in zip(likely, question.choices, strict=True)]
    chosen, normed = (values.index(max(values)) for values in (likely, by_length))
    right = question.answer
    return {"log_likelihoods": likely, "acc": float(chosen == right), "acc_norm": float(normed == right)}


def _write(side: Side, task: Task, asked: Sequence[_Asked], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    def ended(answer: list[int]) -> bool:
        text = tokenizer.decode(answer) if task.stop else ""
        return answer[-1] in tokenizer.end_ids or any(stop in text for stop in task.stop)

    samples = []
    written = side.generate([one.context for one in asked], task.max_tokens, ended)
    for one, answer in zip(asked, written, strict=True):
        text = tokenizer.decode(answer[:-1] if answer[-1] in tokenizer.end_ids else answer)
        for stop in task.stop:
            text = text.partition(stop)[0]
        right = _plain(text, task) in {_plain(wanted, task) for wanted in one.question.answers}
        samples.append({"answer": text, "exact_match": float(right)})
    return samples


def _plain(text: str, task: Task) -> str:
    return text.strip().casefold() if task.ignore_case else text.strip()


def _counted(task: Task, samples: list[dict[str, Any]]) -> Score:
    count = len(samples)
    figures = {name: sum(one[name] for one in samples) / count for name in task.figures}
    errors = {name: math.sqrt(mean * (1 - mean) / max(count - 1, 1)) for name, mean in figures.items()}
    return Score(task.name, count, figures, errors, samples)
