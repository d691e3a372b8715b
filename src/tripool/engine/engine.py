"""The engine: a pure scheduler and an executor. A step is schedule → submit → settle.

With MTP, a step begins with the draft tokens of the last one, whose own tokens have gone out by then. A right draft
lets the step give two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tripool.config import EngineConfig, SchedulerConfig
from tripool.core import BLOCK_TOKENS, Request, TokenEvent
from tripool.engine.device import DeviceSpec
from tripool.engine.device_memory import within_memory
from tripool.engine.executor import Pending, cpu_executor
from tripool.engine.memory import CPU_STEP_TOKENS, LargestStep, kv_blocks
from tripool.engine.paged import Paged, Result
from tripool.engine.scheduler import Scheduler
from tripool.errors import InvalidRequest
from tripool.models import Model
from tripool.sequence import Seq, Task
from tripool.text.files import TextFiles


class Engine(Paged):
    def __init__(
        self, name: str, model: Model, text: TextFiles, config: EngineConfig, device_spec: DeviceSpec | None = None
    ) -> None:
        """`device_spec`: the device that the model was loaded on; None: this machine's own memory and cores."""
        mtp, arch = config.mtp and model.mtp is not None, model.arch
        tokens = config.step_tokens or (CPU_STEP_TOKENS if device_spec is None else device_spec.step_tokens(arch))
        tokens = max(tokens, config.max_running * (1 + mtp) + BLOCK_TOKENS)
        if device_spec is None:
            num_blocks = kv_blocks(arch.block_bytes(mtp=mtp), arch.context_tokens, config.kv_gb)
        else:
            largest = LargestStep(config.max_running, tokens, arch.context_tokens)
            num_blocks = device_spec.kv_blocks(model, config.kv_gb, largest, mtp=mtp)
        self._bounds = SchedulerConfig(
            num_blocks=num_blocks,
            max_running=config.max_running,
            step_tokens=tokens,
            prefix_reuse=config.prefix_reuse,
        )
        self.step_tokens, self._device_spec = tokens, device_spec
        scheduler = Scheduler(self._bounds, model=name, context_tokens=arch.context_tokens)
        super().__init__(scheduler, text, name=name, vocab=arch.vocab, max_running=config.max_running)
        build = cpu_executor if device_spec is None else device_spec.executor
        self.executor = build(model, num_blocks, mtp=mtp, guard=self.guarded)
        self._pending: Pending | None = None
        """The last step, until its drafts are proposed."""
        self.weight_bytes = model.num_bytes
        self.kv_bytes, self.block_bytes = self.executor.runner.kv_bytes, self.executor.runner.block_bytes

    def warm(self, progress: Callable[[str], None] | None = None) -> None:
        """See `Runner.warm`. On a GPU also takes the memory of the largest step, so that no step finds too little."""
        bounds, spec = self._bounds, self._device_spec
        with self._within_memory("warming up"):
            self.executor.runner.warm(bounds.max_running, bounds.step_tokens, progress)
        if spec is not None and spec.device.type == "cuda":
            spec.run_largest(self.executor, LargestStep(bounds.max_running, bounds.step_tokens, self.context_tokens))

    def attempt(self, tasks: Sequence[Task], do: Callable[[], Result]) -> Result | None:
        def run() -> Result:
            with self._within_memory("a step"):
                return do()

        return super().attempt(tasks, run)

    def _within_memory(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._device_spec is None else within_memory(what, self._device_spec.device)

    def start(self, seq: Seq) -> None:
        self.executor.attach(seq)
        super().start(seq)

    def export_block(self, block: int, into: memoryview) -> None:
        self.executor.runner.export_block(block, into)

    def import_block(self, block: int, data: memoryview) -> None:
        self.executor.runner.import_block(block, data)

    def check(self, request: Request) -> None:
        params = request.params
        if params.prompt_logprobs is not None and self._device_spec is not None:
            hint = "a server on CPUs computes them"
            raise InvalidRequest("prompt_logprobs are not computed on a GPU", hint=hint, param="prompt_logprobs")
        named = {"prompt": request.prompt_ids, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for where, ids in named.items():
            bad = next((i for i in ids if not 0 <= i < self.vocab), None)
            if bad is not None:
                raise InvalidRequest(
                    f"token {bad} in {where} does not exist", hint=f"ids end at {self.vocab - 1}", param=where
                )

    @torch.inference_mode()
    def compute(self, tasks: list[Task]) -> list[TokenEvent]:
        pending = self.executor.submit(tasks)
        events = self.settle_each(tasks, pending.tokens())
        accepted = {task: row for task in tasks if (row := self.scheduler.verify(task)) is not None}
        if accepted:
            events += self.settle_each(list(accepted.values()), pending.tokens_after(accepted))
        self._pending = pending
        return events

    @torch.inference_mode()
    def draft(self) -> None:
        """Propose the last step's drafts. Comes before the next `schedule`: until then no block changes its owner."""
        pending, self._pending = self._pending, None
        if pending is not None:
            for seq, draft in pending.drafts():
                self.scheduler.propose(seq, draft)
