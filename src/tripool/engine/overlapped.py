"""The engine with the host beside the device: while a step runs, the host settles the last one and prepares the next.

`Scheduler.advance` lets sequences go on with a token that is still unknown. A sequence whose next row depends on that
token's value (a grammar, penalties, log-probabilities, the end of its answer) misses one step instead. An answer that
ends with a stop token has one row more, whose result is dropped. Tokens are those of `Engine`, one step at a time.

Drafts depend on settled tokens. With an MTP layer, `DraftSwitch` decides by measured times which steps verify drafts,
one after another as in `Engine`, and which overlap without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tripool.config import EngineConfig
from tripool.core import TokenEvent
from tripool.decode import DraftSwitch
from tripool.engine.device import DeviceSpec
from tripool.engine.device_executor import DeviceExecutor
from tripool.engine.engine import Engine
from tripool.engine.executor import Pending
from tripool.models import Model
from tripool.sequence import Seq, Task
from tripool.text.files import TextFiles


@dataclass(frozen=True, slots=True)
class _Running:
    tasks: list[Task]
    pending: Pending
    began_s: float


class OverlappedEngine(Engine):
    """Without `detach`, whose sequences must not run ahead."""

    executor: DeviceExecutor

    def __init__(self, name: str, model: Model, text: TextFiles, config: EngineConfig, device_spec: DeviceSpec) -> None:
        super().__init__(name, model, text, config, device_spec)
        self._running: _Running | None = None
        """The step that the device computes."""
        self.draft_switch = DraftSwitch() if self.executor.drafter is not None else None
        self._drafts = self.draft_switch is not None
        """Whether steps verify drafts."""
        self._ended_s: float | None = None
        """When the last step was settled, if it was of the same kind as the next."""
        self._num_accepted = 0
        """Drafts, up to then."""

    @property
    def busy(self) -> bool:
        return self._running is not None or super().busy

    def step(self) -> list[TokenEvent]:
        """Submits a step, then waits for the one before it. Without a sequence that can go on: only one of them."""
        decoding = self.scheduler.decode.running
        if self.draft_switch is not None and decoding and self.draft_switch.choose(len(decoding)) != self._drafts:
            self._change()
        if self._drafts and self._running is None:
            return super().step()
        following = None if self._drafts else self._submit()
        running, self._running = self._running, following
        return [] if running is None else self._settle(running)

    def detach(self, request_id: str, choice: int) -> Seq:
        raise AssertionError("an engine that hands sequences over runs step by step")

    def timed(self, tasks: Sequence[Task], began_s: float) -> None:
        super().timed(tasks, began_s)
        if self.draft_switch is None:
            return
        last_s, self._ended_s = self._ended_s, self._clock()
        accepted, self._num_accepted = self.scheduler.num_accepted - self._num_accepted, self.scheduler.num_accepted
        if last_s is not None and all(task.samples and task.work.decode for task in tasks):
            self.draft_switch.measured(len(tasks), len(tasks) + accepted, self._ended_s - last_s)
        if not self.scheduler.busy:
            self._ended_s = None

    def _change(self) -> None:
        """From drafts to steps that overlap, or back: the MTP layer has missed what was computed in between."""
        self.draft()
        self._drafts, self._ended_s = not self._drafts, None
        for seq in self.scheduler.holders():
            seq.draft = seq.carry = None

    def _submit(self) -> _Running | None:
        began_s = self._clock()
        tasks = self.scheduler.schedule()
        if not tasks:
            return None
        pending = self.attempt(tasks, lambda: self._started(tasks))
        return None if pending is None else _Running(tasks, pending, began_s)

    @torch.inference_mode()
    def _started(self, tasks: list[Task]) -> Pending:
        pending = self.executor.submit_ahead(tasks)
        self.scheduler.advance(tasks)
        return pending

    @torch.inference_mode()
    def _settle(self, running: _Running) -> list[TokenEvent]:
        tasks = running.tasks
        events = self.attempt(tasks, lambda: self.settle_each(tasks, running.pending.tokens()))
        if events is None:
            return []
        self.timed(tasks, running.began_s)
        return events
