"""Engines without a device: the real scheduler, tokens that mean nothing, steps that take as long as a model says.

A serving worker drives such an engine as it drives any other. A step takes virtual time: the instance begins it
(`begin`), declares it over when its time has passed, and the worker's next call of `step` completes it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tripool.config import SchedulerConfig
from tripool.core import Request, ServingStats, Stages, TokenEvent
from tripool.decode import StepFacts
from tripool.engine.fast_forward import fast_forward, quiet_steps
from tripool.engine.scheduler import Scheduler
from tripool.sequence import Sampled, Seq, Task
from tripool.simulate.timeline import FS, Timeline

MODEL = "simulated"
_NO_FACTS = StepFacts()
_REPORT_FS = 10 * FS
"""Longest that the tokens of a running answer are held back."""

KeysOf = Callable[[Request], Sequence[bytes]]
"""Keys of a prompt's full blocks. A trace names them: prompts have no tokens of their own."""


def token_of(seq: Seq) -> int:
    return seq.request.seed


@lru_cache(maxsize=2**10)
def _stats(running: int, ceiling: int | None) -> ServingStats:
    return ServingStats(running=running, slo_ceiling=ceiling)


class ModelledEngine:
    """What both roles share; a `PoolEngine` together with `step`. Blocks have a key, and no bytes."""

    name = MODEL
    vocab = 2**31
    block_bytes = 1
    started: tuple[str, ...] = ()
    """When a request's first step began is not reported: a worker asks for it after the step."""

    def __init__(self, config: SchedulerConfig, timeline: Timeline, context_tokens: int) -> None:
        self.config, self._timeline = config, timeline
        self.scheduler = Scheduler(config, model=MODEL, context_tokens=context_tokens)
        self.context_tokens = self.scheduler.context_tokens
        kept = self.scheduler.kept
        self._decoding, prefill = self.scheduler.decode.running, self.scheduler.prefill
        self._prefilling, self._waiting = prefill.running, prefill.waiting
        self.release = self.scheduler.release
        self.keep, self.keep_more, self.let_go = kept.keep, kept.keep_more, kept.let_go
        self.max_running, self.num_blocks = config.max_running, config.num_blocks
        self.block_tokens = config.block_tokens
        self.tasks: list[Task] | None = None
        """Of the step that runs, unless it is skipped."""
        self.over_s: float | None = None
        """How long the step took that is over and not completed yet."""
        self._ceiling: int | None = None

    @property
    def busy(self) -> bool:
        return bool(self._decoding or self._prefilling or self._waiting) or self.has_results

    @property
    def has_results(self) -> bool:
        """Whether `step` has something to complete or to report."""
        return self.over_s is not None

    @property
    def num_held_blocks(self) -> int:
        return self.scheduler.pool.num_held

    @property
    def num_waiting_tokens(self) -> int:
        return self.scheduler.num_waiting_tokens if self._waiting or self._prefilling else 0

    def stats(self) -> ServingStats:
        """The ceiling is that of the last completed step: one that is computed later would depend on skipped steps."""
        return _stats(len(self._prefilling) + len(self._decoding), self._ceiling)

    def check(self, request: Request) -> None:
        pass

    def prepare(self, request: Request) -> None:
        return None

    def take_failed(self) -> Sequence[str]:
        return ()

    def prompt_keys(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        return ()

    def add(self, request: Request, answered: Mapping[int, Sequence[int]] | None = None) -> None:
        self.scheduler.add(request, answered=answered)

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def detach(self, request_id: str, choice: int) -> Seq:
        return self.scheduler.detach(request_id, choice)

    def attach(
        self, request: Request, choice: int, answer: Sequence[int], num_computed: int, **blocks: Any
    ) -> Seq | None:
        """`blocks`: as in `Scheduler.attach`."""
        return self.scheduler.attach(request, choice, answer, num_computed, **blocks)

    def start(self, seq: Seq) -> None:
        self.scheduler.start(seq)

    def export_block(self, block: int, into: memoryview) -> None:
        pass

    def import_block(self, block: int, data: memoryview) -> None:
        pass

    def _settle(self, tasks: list[Task]) -> list[TokenEvent]:
        sampled = [Sampled(task.seq.request.seed) if task.samples else None for task in tasks]  # as `token_of`
        return self.scheduler.settle(tasks, sampled)


class PrefillEngine(ModelledEngine):
    def __init__(self, config: SchedulerConfig, timeline: Timeline, context_tokens: int, keys_of: KeysOf) -> None:
        super().__init__(config, timeline, context_tokens)
        self._keys_of = keys_of
        self._hands_over = False

    def prompt_keys(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        return self._keys_of(request)[: num_tokens // self.block_tokens]

    def add(self, request: Request, answered: Mapping[int, Sequence[int]] | None = None) -> None:
        self.scheduler.add(request, answered=answered)
        self.scheduler.prefill.waiting[-1].keys.extend(self._keys_of(request))

    def detach(self, request_id: str, choice: int) -> Seq:
        self._hands_over = True
        return self.scheduler.detach(request_id, choice)

    def begin(self) -> tuple[int, int] | None:
        """Schedules a step: the tokens that it computes and the context that they read. None: nothing fits."""
        if not (self._waiting or self._prefilling or self._decoding):
            return None
        tasks = self.scheduler.schedule()
        if not tasks:
            return None
        self.tasks = tasks
        facts = StepFacts.of(tasks)
        # Tokens that were answered before a loss are computed again, as the prompt is.
        return facts.prompt_tokens + facts.rows, int(facts.prompt_reads + facts.context_tokens)

    def step(self) -> list[TokenEvent]:
        if self.over_s is None or self.tasks is None:
            return []
        tasks, step_s, now_s = self.tasks, self.over_s, self._timeline.now_s
        self.tasks = self.over_s = None
        events = self._settle(tasks)
        if not self._hands_over:  # once it does, no SLO binds its steps, and their time is of no use
            self.scheduler.timed(tasks, now_s - step_s, now_s)
        return events


@dataclass(slots=True)
class TokenRun(TokenEvent):
    """A token together with those of the same choice right before it."""

    earlier: tuple[int, ...] = ()

    def of_request(self, request_id: str, stages: Stages | None) -> TokenRun:
        facts = (self.choice, self.index, self.token_id, self.finish_reason, None, self.num_cached_tokens)
        return TokenRun(request_id, *facts, stages=stages, earlier=self.earlier)


@dataclass(slots=True, eq=False)
class _Answer:
    seq: Seq
    num_reported: int
    reported_fs: int


class DecodeEngine(ModelledEngine):
    """One rank of a decode instance. Its scheduler may lag behind while steps are quiet (`fast_forward_to`).

    Tokens are reported when an answer ends, and every few seconds, as runs. The SLO controller learns from every step
    in which something happens. Both happen at the same times whether quiet steps are skipped or taken one by one.
    """

    def __init__(self, config: SchedulerConfig, timeline: Timeline, context_tokens: int) -> None:
        super().__init__(config, timeline, context_tokens)
        self.synced = 0
        """Step of the instance up to which the scheduler has come."""
        self.skipping = False
        """Whether the step that runs is one of those that are skipped."""
        self.noisy = False
        """Whether something happens in the step that runs."""
        self.reports = False
        """Whether the next call of `step` reports tokens of answers that go on."""
        self._fresh = False
        """Whether a sequence has started that the SLO controller has not seen: the next step is not quiet."""
        self._facts = _NO_FACTS
        """Of a noisy step."""
        self._answers: dict[str, _Answer] = {}

    @property
    def rows(self) -> int:
        return len(self._decoding)

    @property
    def context(self) -> int:
        return sum([len(seq.tokens) for seq in self._decoding])

    @property
    def prompt_work(self) -> tuple[int, int]:
        """Tokens that the step computes again after a preemption, and the context that they read."""
        return self._facts.prompt_tokens, int(self._facts.prompt_reads)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def fast_forward_to(self, step: int) -> None:
        if step > self.synced and self._decoding:
            fast_forward(self.scheduler, self.config, step - self.synced, token_of, model=MODEL)
        self.synced = step

    def quiet(self) -> int:
        """How many steps come next in which nothing happens."""
        return 0 if self._fresh else quiet_steps(self.scheduler, self.config)

    def begin(self, *, noisy: bool | None = None) -> None:
        """The step after `synced` runs from now on, or has been running since that one ended. `noisy`: whether
        something happens in it, where that is known."""
        self.noisy = self.quiet() == 0 if noisy is None else noisy
        self._fresh = self.skipping = False
        busy = self._decoding or self._waiting or self._prefilling
        self.tasks = self.scheduler.schedule() if busy else []
        self._facts = StepFacts.of(self.tasks) if self.noisy else _NO_FACTS

    def pass_quietly(self, step: int) -> None:
        """Quiet steps are over, up to this one: nothing comes of them."""
        if self.tasks is None:
            self.fast_forward_to(step)
        else:
            self._settle(self.tasks)
        self.tasks, self.synced, self.skipping = None, step, False

    @property
    def has_results(self) -> bool:
        return self.over_s is not None or self.reports

    def step(self) -> list[TokenEvent]:
        events = self._complete() if self.over_s is not None else []
        if self.reports:
            self.reports = False
            found = [name for name, answer in self._answers.items() if answer.seq.num_generated > answer.num_reported]
            events += [self._run(name, None) for name in found]
        return events

    def _complete(self) -> list[TokenEvent]:
        assert self.over_s is not None
        tasks, step_s, now_s = self.tasks or [], self.over_s, self._timeline.now_s
        self.tasks = self.over_s = None
        facts, self._facts = self._facts, _NO_FACTS
        events = self._settle(tasks)
        slo_controller = self.scheduler.slo_controller
        if self.noisy and tasks:
            slo_controller.settled(now_s, step_s, facts, 0, [task.seq for task in tasks])
        self._ceiling = slo_controller.ceiling
        return [self._run(event.request_id, event) for event in events if event.finish_reason]

    # ---- sequences --------------------------------------------------------------------------------------------------

    def attach(
        self, request: Request, choice: int, answer: Sequence[int], num_computed: int, **blocks: Any
    ) -> Seq | None:
        seq = super().attach(request, choice, answer, num_computed, **blocks)
        if seq is not None:
            self._answers[request.id] = _Answer(seq, len(answer), self._timeline.now_fs)
        return seq

    def start(self, seq: Seq) -> None:
        super().start(seq)
        self._fresh = True

    def cancel(self, request_id: str) -> None:
        super().cancel(request_id)
        self._answers.pop(request_id, None)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    @property
    def has_due(self) -> bool:
        """Whether an answer's tokens have been held back for long."""
        late_fs = self._timeline.now_fs - _REPORT_FS
        return any(answer.reported_fs <= late_fs for answer in self._answers.values())

    def _run(self, name: str, last: TokenEvent | None) -> TokenRun:
        answer = self._answers[name] if last is None else self._answers.pop(name)
        seq, before = answer.seq, answer.num_reported
        generated, token = seq.num_generated, token_of(seq)
        answer.num_reported, answer.reported_fs = generated, self._timeline.now_fs
        finish, cached = last.finish_reason if last else None, min(seq.num_cached or 0, seq.prompt_len)
        earlier = (token,) * (generated - before - 1)
        return TokenRun(name, seq.choice, generated - 1, token, finish, None, cached, earlier=earlier)
