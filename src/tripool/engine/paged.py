"""Base of engines with paged KV memory: passes requests and blocks to the scheduler, and contains faults.

A subclass computes a batch (`compute`), checks requests (`check`), writes what is due before blocks change their owner
(`draft`), and copies bytes into a block and out of it.

A fault of one sequence (`guarded`) ends its request, a fault of a batch ends the requests of that batch; only steps
that fail one after another end the engine.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from tripool.cache import next_key
from tripool.core import Request, ServingStats, TokenEvent
from tripool.engine.scheduler import Scheduler
from tripool.errors import DeviceOutOfMemory
from tripool.grammar import GrammarCompiler
from tripool.sequence import Guide, Sampled, Seq, Task
from tripool.text.files import TextFiles

_PROMISES = "TPOT objectives"
_MAX_FAILED_STEPS = 3
"""So many failed steps in a row are a fault of the engine itself."""

Result = TypeVar("Result")
_logger = logging.getLogger("tripool.engine")


class Paged(ABC):
    block_bytes: int
    from_weight_cache = False

    def __init__(
        self,
        scheduler: Scheduler,
        text: TextFiles,
        *,
        name: str,
        vocab: int,
        max_running: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.text, self.name, self.vocab, self.max_running = scheduler, text, name, vocab, max_running
        self.context_tokens, self.block_tokens = scheduler.context_tokens, scheduler.block_tokens
        self.num_blocks = scheduler.pool.num_blocks
        self.keep_more, self.let_go = scheduler.kept.keep_more, scheduler.kept.let_go
        self._clock = clock
        self._grammars = GrammarCompiler(text, vocab)
        self._failed: list[str] = []
        self._num_failed_steps = 0
        """In a row."""

    @abstractmethod
    def compute(self, tasks: list[Task]) -> list[TokenEvent]:
        """Run what was scheduled, choose the next tokens, and settle: see `settle_each`."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raises what makes a request impossible here, before any work."""

    @abstractmethod
    def export_block(self, block: int, into: memoryview) -> None: ...

    @abstractmethod
    def import_block(self, block: int, data: memoryview) -> None: ...

    @abstractmethod
    def draft(self) -> None:
        """Write what is still due in the blocks of the last step; they may change their owner after this."""

    def step(self) -> list[TokenEvent]:
        began_s = self._clock()
        self.draft()
        tasks = self.scheduler.schedule()
        events = self.attempt(tasks, lambda: self.compute(tasks)) if tasks else None
        if events is None:
            return []
        self.timed(tasks, began_s)
        return events

    def timed(self, tasks: Sequence[Task], began_s: float) -> None:
        """A step is settled."""
        self._num_failed_steps = 0
        self.scheduler.timed(tasks, began_s, self._clock())

    def attempt(self, tasks: Sequence[Task], do: Callable[[], Result]) -> Result | None:
        """Run a part of a step. A fault ends the requests of its tasks, and returns None."""
        try:
            return do()
        except Exception as error:
            # Another batch may fit into the memory that this one does not.
            self._num_failed_steps += not isinstance(error, DeviceOutOfMemory)
            if self._num_failed_steps >= _MAX_FAILED_STEPS:
                raise
            _logger.exception("a step failed, and with it the %d sequences in it", len(tasks))
            # Those that were settled already too: their tokens are lost with the step.
            self._fail(task.seq.request.id for task in tasks)
            return None

    def guarded(self, seq: Seq, do: Callable[[], Result]) -> Result | None:
        """Run what concerns one sequence. A fault ends its request and no other, and returns None."""
        try:
            return do()
        except Exception:
            _logger.exception("request %s failed", seq.request.id)
            self._fail([seq.request.id])
            return None

    def settle_each(self, tasks: Sequence[Task], sampled: Iterable[Sampled | None]) -> list[TokenEvent]:
        """As `Scheduler.settle`, each guarded."""
        events: list[TokenEvent] = []
        settle_one = self.scheduler.settle_one
        for task, result in zip(tasks, sampled, strict=True):
            try:  # not by `guarded`: two more calls for each of hundreds
                event = settle_one(task, result)
            except Exception:
                _logger.exception("request %s failed", task.seq.request.id)
                self._fail([task.seq.request.id])
                continue
            if event is not None:
                events.append(event)
        return events

    def take_failed(self) -> list[str]:
        failed, self._failed = self._failed, []
        return failed

    def _fail(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.scheduler.cancel(request_id)
            if request_id not in self._failed:
                self._failed.append(request_id)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def started(self) -> list[str]:
        return [seq.request.id for seq in self.scheduler.prefill.started if seq.leader is None]

    @property
    def num_held_blocks(self) -> int:
        return self.scheduler.pool.num_held

    @property
    def num_waiting_tokens(self) -> int:
        return self.scheduler.num_waiting_tokens

    def stats(self) -> ServingStats:
        scheduler, pool = self.scheduler, self.scheduler.pool
        held_by = scheduler.prefill.held_by
        return ServingStats(
            running=len(scheduler.prefill.running) + len(scheduler.decode.running),
            waiting=len(scheduler.prefill.waiting),
            kv_usage=pool.num_held / pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_drafted=scheduler.num_drafted,
            num_accepted=scheduler.num_accepted,
            held_by=_PROMISES if held_by and scheduler.slo_controller.held_back else held_by,
            slo_ceiling=scheduler.slo_controller.ceiling,
            slo_held_back=scheduler.slo_controller.held_back,
            predicted_step_ms=scheduler.slo_controller.predicted_s * 1000,
            step_error_ms=scheduler.slo_controller.step_time.error_s * 1000,
            num_slos_given_up=scheduler.slo_controller.num_given_up,
        )

    def prepare(self, request: Request) -> Future[Any] | None:
        """From any thread: have its grammar compiled beside the engine. Hold the future until `add` or `attach`, which
        compile by themselves what was not prepared."""
        structure = request.params.structure
        return None if structure is None else self._grammars.prepare(structure, request.namespace)

    def prompt_keys(self, request: Request, num_tokens: int) -> list[bytes]:
        """Keys of the full blocks among a prompt's first tokens."""
        keys: list[bytes] = []
        size, prompt, namespace = self.block_tokens, request.prompt_ids, request.namespace
        num_public = request.public_tokens // size
        for start in range(0, num_tokens // size * size, size):
            tokens = prompt[start : start + size]
            keys.append(next_key(keys, tokens, model=self.name, namespace=namespace, num_public=num_public))
        return keys

    def add(self, request: Request, answered: Mapping[int, Sequence[int]] | None = None) -> None:
        """Accept a request, or refuse it with a typed error before any work. `answered`: see `Scheduler.add`."""
        self.check(request)
        known = answered or dict.fromkeys(range(request.params.n), ())
        self.scheduler.add(request, self._guides(request, known.values()), answered)

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def detach(self, request_id: str, choice: int) -> Seq:
        """Take a sequence that has just answered out of the batch, its blocks complete."""
        self.draft()
        return self.scheduler.detach(request_id, choice)

    def release(self, seq: Seq) -> None:
        self.scheduler.release(seq)

    def attach(
        self,
        request: Request,
        choice: int,
        answer: Sequence[int],
        num_computed: int,
        *,
        num_cached: int = 0,
        shared: Sequence[int] = (),
    ) -> Seq | None:
        """Blocks for a sequence that another engine has computed, or None while there is no room."""
        if not self.scheduler.can_attach(request, choice, num_computed + 1, len(shared)):
            return None
        self.check(request)
        self.draft()
        guides = self._guides(request, [answer])
        guide = None if guides is None else guides[0]
        return self.scheduler.attach(
            request, choice, answer, num_computed, num_cached=num_cached, guide=guide, shared=shared
        )

    def start(self, seq: Seq) -> None:
        self.scheduler.start(seq)

    def keep(self, keys: Sequence[bytes]) -> list[int]:
        self.draft()
        return self.scheduler.kept.keep(keys)

    def _guides(self, request: Request, answers: Iterable[Sequence[int]]) -> Sequence[Guide] | None:
        """One after each of `answers`. They compile lazily, when their sequences are first sampled."""
        structure = request.params.structure
        if structure is None:
            return None
        return self._grammars.guides(structure, request.stop_ids, answers, request.namespace)
