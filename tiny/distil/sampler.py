"""The loop: keeps the teacher's slots full, hands its answers to workers, and gives out documents as they come.

While the device grows a round, workers make prompts and judge answers, so the device waits for neither.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import torch

from tiny.distil.flow import Document, Job, Outcome
from tiny.distil.lists import words
from tiny.distil.script import Said
from tiny.distil.teacher import Teacher
from tiny.distil.workers import begin_batch, finish_batch
from tripool.text import Tokenizer

SCRIPTS_AT_ONCE = 256
ANSWERS_AT_ONCE = 128


def penalised_tokens(tokenizer: Tokenizer, vocab: int) -> torch.Tensor:
    """bool [vocab]: whole words that carry meaning. Names, parts of words, digits and function words may come again."""
    free = set(words("function_words"))
    texts = (tokenizer.token_text(token) for token in range(vocab))
    return torch.tensor([bool(re.fullmatch(r" [a-z]{3,}", text)) and text.strip() not in free for text in texts])


@dataclass(slots=True)
class Tally:
    """What has come of it so far."""

    tokens: int = 0
    answers: int = 0
    cut: int = 0
    rounds: int = 0
    idle_slots: int = 0
    """Slots left empty for want of prompts, summed over rounds."""
    waited_s: float = 0.0
    """For the device. Little of it means that the host is what holds the run back."""
    too_long: int = 0
    """Talks let go because a row has no place for another answer."""
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)


class Sampler:
    def __init__(self, teacher: Teacher, workers: Executor, *, seed: int) -> None:
        self._teacher, self._workers, self._seed = teacher, workers, seed
        self._next_script = 0
        self._ready: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._beginning: set[Future[Outcome]] = set()
        self._finishing: set[Future[Outcome]] = set()
        self.tally = Tally()

    def documents(self, *, go_on: Callable[[], bool]) -> Iterator[list[Document]]:
        """A list for every round, until `go_on` says no; answers that are then still growing are let go."""
        self._order_scripts()
        while go_on():
            if not self._ready and not self._running:
                yield self._take(wait=True)
                continue
            self._fill()
            self._teacher.run()
            made = self._take(wait=False)
            self._order_scripts()
            self._hand_over(self._collect())
            yield made
        for future in self._beginning:
            future.cancel()
        yield [document for future in self._finishing for document in future.result().documents]

    def _fill(self) -> None:
        free = self._teacher.free
        fresh = [(slot, self._ready.popleft()) for slot in free[: len(self._ready)]]
        self._running.update(fresh)
        self._teacher.fill([(slot, job.ask) for slot, job in fresh])
        self.tally.rounds += 1
        self.tally.idle_slots += len(free) - len(fresh)

    def _collect(self) -> list[Said]:
        began_s = time.monotonic()
        ended = self._teacher.collect()
        self.tally.waited_s += time.monotonic() - began_s
        return ended

    def _hand_over(self, ended: list[Said]) -> None:
        answered = [(self._running.pop(said.slot), said.ids, said.cut) for said in ended]
        self.tally.answers += len(ended)
        self.tally.tokens += sum(len(said.ids) + (not said.cut) for said in ended)
        self.tally.cut += sum(said.cut for said in ended)
        for first in range(0, len(answered), ANSWERS_AT_ONCE):
            self._finishing.add(self._workers.submit(finish_batch, answered[first : first + ANSWERS_AT_ONCE]))

    def _order_scripts(self) -> None:
        """Prompts for a whole batch in stock, beside those that are being made."""
        stock = len(self._ready) + SCRIPTS_AT_ONCE // 2 * len(self._beginning)
        while stock < 2 * self._teacher.rows:
            count = min(SCRIPTS_AT_ONCE, 4 * self._teacher.rows)
            self._beginning.add(self._workers.submit(begin_batch, self._seed, self._next_script, count))
            self._next_script += count
            stock += count // 2

    def _take(self, *, wait: bool) -> list[Document]:
        """What the workers have done. A follow-up goes before new prompts: its talk is already half made."""
        made: list[Document] = []
        for group, first in ((self._beginning, False), (self._finishing, True)):
            done = {future for future in group if future.done()}
            if wait and not done and group:
                done = {next(iter(group))}
            group.difference_update(done)
            for future in done:
                outcome = future.result()
                made += outcome.documents
                self.tally.reasons.update(outcome.reasons)
                jobs = [job for job in outcome.jobs if len(job.ask.ids) + job.ask.max_tokens <= self._teacher.places]
                self.tally.too_long += len(outcome.jobs) - len(jobs)
                (self._ready.extendleft if first else self._ready.extend)(jobs)
        return made
