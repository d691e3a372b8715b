"""The engine with the host beside the device: while a step runs, the host settles the last one and prepares the next.

`Scheduler.advance` lets sequences go on with a token that is still unknown. A sequence whose next row depends on that
token's value (a grammar, penalties, log-probabilities, the end of its answer) misses one step instead. An answer that
ends with a stop token has one row more, whose result is dropped. Tokens are those of `Engine`, one step at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tripool.core import TokenEvent
from tripool.engine.engine import Engine
from tripool.engine.executor import Pending
from tripool.sequence import Seq, Task


@dataclass(frozen=True, slots=True)
class _Running:
    tasks: list[Task]
    pending: Pending
    began_s: float


class OverlappedEngine(Engine):
    """Without drafts, which depend on settled tokens, and without `detach`, whose sequences must not run ahead."""

    _running: _Running | None = None
    """The step that the device computes."""

    @property
    def busy(self) -> bool:
        return self._running is not None or super().busy

    def step(self) -> list[TokenEvent]:
        """Submits a step, then waits for the one before it. Without a sequence that can go on: only one of them."""
        following = self._submit()
        running, self._running = self._running, following
        return [] if running is None else self._settle(running)

    def detach(self, request_id: str, choice: int) -> Seq:
        raise AssertionError("an engine that hands sequences over runs step by step")

    def _submit(self) -> _Running | None:
        began_s = self._clock()
        tasks = self.scheduler.schedule()
        if not tasks:
            return None
        pending = self.attempt(tasks, lambda: self._started(tasks))
        return None if pending is None else _Running(tasks, pending, began_s)

    @torch.inference_mode()
    def _started(self, tasks: list[Task]) -> Pending:
        pending = self.executor.submit(tasks)
        self.scheduler.advance(tasks)
        return pending

    @torch.inference_mode()
    def _settle(self, running: _Running) -> list[TokenEvent]:
        tasks = running.tasks
        events = self.attempt(tasks, lambda: self.settle_each(tasks, running.pending.tokens()))
        if events is None:
            return []
        self._num_failed_steps = 0
        self.scheduler.timed(tasks, running.began_s, self._clock())
        return events
