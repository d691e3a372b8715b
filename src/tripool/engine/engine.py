"""The engine: a pure scheduler and an executor. A step is schedule → submit → settle.

With MTP, a step begins with the draft tokens of the last one, whose own tokens have gone out by then. A right draft
lets the step give two tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tripool.config import EngineConfig, SchedulerConfig
from tripool.core import BLOCK_TOKENS, Request, TokenEvent
from tripool.engine.device import DeviceSpec
from tripool.engine.executor import Pending, cpu_executor
from tripool.engine.paged import Paged
from tripool.engine.scheduler import Scheduler
from tripool.errors import InvalidRequest
from tripool.models import Model
from tripool.models.arch import Arch
from tripool.sequence import Seq, Task
from tripool.text.files import TextFiles

_DEFAULT_CONTEXTS = 8
_DEFAULT_KV_BYTES = 2 * 2**30


class Engine(Paged):
    def __init__(
        self, name: str, model: Model, text: TextFiles, config: EngineConfig, device_spec: DeviceSpec | None = None
    ) -> None:
        """`device_spec`: the device that the model was loaded on; None: this machine's own memory and cores."""
        mtp = config.mtp and model.mtp is not None
        num_blocks = kv_blocks(model.arch, config, mtp=mtp)
        self._bounds = SchedulerConfig(
            num_blocks=num_blocks,
            max_running=config.max_running,
            step_tokens=max(config.step_tokens, config.max_running * (1 + mtp) + BLOCK_TOKENS),
            prefix_reuse=config.prefix_reuse,
        )
        scheduler = Scheduler(self._bounds, model=name, context_tokens=model.arch.context_tokens)
        super().__init__(scheduler, text, name=name, vocab=model.arch.vocab, max_running=config.max_running)
        build = cpu_executor if device_spec is None else device_spec.executor
        self.executor = build(model, num_blocks, mtp=mtp, guard=self.guarded)
        self._pending: Pending | None = None
        """The last step, until its drafts are proposed."""
        self.weight_bytes = model.num_bytes
        self.kv_bytes, self.block_bytes = self.executor.runner.kv_bytes, self.executor.runner.block_bytes

    def warm(self, progress: Callable[[str], None] | None = None) -> None:
        """See `Runner.warm`."""
        self.executor.runner.warm(self._bounds.max_running, self._bounds.step_tokens, progress)

    def start(self, seq: Seq) -> None:
        self.executor.attach(seq)
        super().start(seq)

    def export_block(self, block: int, into: memoryview) -> None:
        self.executor.runner.export_block(block, into)

    def import_block(self, block: int, data: memoryview) -> None:
        self.executor.runner.import_block(block, data)

    def check(self, request: Request) -> None:
        params = request.params
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


def kv_blocks(arch: Arch, config: EngineConfig, *, mtp: bool) -> int:
    """What the user gives, or room for a few full contexts within a bound; always at least two blocks."""
    block_bytes = (arch.layers + mtp) * BLOCK_TOKENS * arch.kv_width * 4
    wanted = _DEFAULT_CONTEXTS * -(-arch.context_tokens // BLOCK_TOKENS)
    if config.kv_gb is not None:
        return max(2, int(config.kv_gb * 2**30 / block_bytes))
    return max(2, min(wanted, _DEFAULT_KV_BYTES // block_bytes))
