"""From scripts to documents: which turn the teacher answers next, and what becomes of its answer.

Pure but for the tokenizer: workers in other processes run these functions on what the sampler hands them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiny.distil.clean import judge, trimmed
from tiny.distil.script import TEACHER, Ask, Script, Turn
from tripool.text import Tokenizer

Message = dict[str, str]
Document = dict[str, Any]
"""{"kind", "messages", "cut"}: one line of the corpus."""


@dataclass(frozen=True, slots=True)
class Job:
    """A script that waits for the teacher: what was said so far, up to the user's turn."""

    script: Script
    messages: tuple[Message, ...]
    ask: Ask

    @property
    def turn(self) -> Turn:
        return self.script.turns[len(self.messages) // 2]


@dataclass(slots=True)
class Outcome:
    documents: list[Document] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, why an answer was dropped), with "kept" for those that were not."""


def render(messages: Sequence[Message], asked: str) -> str:
    """SmolLM2's chat template, with its own system prompt first and the last turn as the teacher is asked it."""
    parts = [{"role": "system", "content": TEACHER}, *messages[:-1], {"role": "user", "content": asked}]
    said = "".join(f"<|im_start|>{part['role']}\n{part['content']}<|im_end|>\n" for part in parts)
    return f"{said}<|im_start|>assistant\n"


def begin(scripts: Sequence[Script], tokenizer: Tokenizer) -> Outcome:
    outcome = Outcome()
    for script in scripts:
        _go_on(script, (), tokenizer, outcome)
    return outcome


def finish(answered: Sequence[tuple[Job, list[int], bool]], tokenizer: Tokenizer) -> Outcome:
    """Answers as (job, tokens, cut)."""
    outcome = Outcome()
    for job, ids, cut in answered:
        kind, turn = job.script.kind, job.turn
        before = [message["content"] for message in job.messages]
        judged = judge(tokenizer.decode(ids), turn, cut=cut, before=before)
        outcome.reasons[kind, judged.reason or "kept"] += 1
        if judged.reason:
            if _has_teacher(job):
                outcome.documents.append(_document(job.script, job.messages[:-1], cut=False))
        elif not cut or turn.items:  # of a list only whole lines are left
            said = (*job.messages, {"role": "assistant", "content": judged.text})
            _go_on(job.script, said, tokenizer, outcome)
        elif trimmed(judged.text):
            said = (*job.messages, {"role": "assistant", "content": judged.text})
            outcome.documents.append(_document(job.script, said, cut=True))
    return outcome


def _has_teacher(job: Job) -> bool:
    """Whether an earlier turn was the teacher's, so that the talk up to there is worth keeping."""
    return any(turn.answer is None for turn in job.script.turns[: len(job.messages) // 2])


def _go_on(script: Script, messages: tuple[Message, ...], tokenizer: Tokenizer, outcome: Outcome) -> None:
    """Say what is ours until it is the teacher's turn or the end."""
    for turn in script.turns[len(messages) // 2 :]:
        messages = (*messages, {"role": "user", "content": turn.user})
        if turn.answer is None:
            ids = tokenizer.encode(render(messages, turn.asked or turn.user), special=False)
            outcome.jobs.append(Job(script, messages, Ask(ids, turn.max_tokens, turn.temperature)))
            return
        messages = (*messages, {"role": "assistant", "content": turn.answer})
    outcome.documents.append(_document(script, messages, cut=False))


def _document(script: Script, messages: tuple[Message, ...], *, cut: bool) -> Document:
    system = [{"role": "system", "content": script.system}] if script.system else []
    return {"kind": script.kind, "messages": [*system, *messages], "cut": cut}
