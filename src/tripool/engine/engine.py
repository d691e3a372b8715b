"""One engine: the pure scheduler, a runner and a sampler. A step is three verbs: schedule → run → settle."""

from __future__ import annotations

import torch

from tripool.config import EngineConfig, SchedulerConfig
from tripool.core import BLOCK_TOKENS, Request, TokenEvent
from tripool.engine.colocated import Scheduler
from tripool.engine.runner import Runner
from tripool.engine.sampler import Sampler
from tripool.errors import InvalidRequest
from tripool.models import Model
from tripool.sequence import Sampled, Task
from tripool.text.files import TextFiles

_DEFAULT_CONTEXTS = 8
_DEFAULT_KV_BYTES = 2 * 2**30


class Engine:
    def __init__(self, name: str, model: Model, text: TextFiles, config: EngineConfig) -> None:
        self.name = name
        self.text = text
        self._vocab = model.arch.vocab
        num_blocks = _num_blocks(model, config)
        scheduling = SchedulerConfig(
            num_blocks=num_blocks,
            max_running=config.max_running,
            step_tokens=max(config.step_tokens, config.max_running + BLOCK_TOKENS),
            prefix_reuse=config.prefix_reuse,
        )
        self.scheduler = Scheduler(scheduling, model=name, context_tokens=model.arch.context_tokens)
        self._runner = Runner(model, num_blocks=num_blocks)
        self._sampler = Sampler(model.arch.vocab)
        self.context_tokens = self.scheduler.context_tokens
        self.weight_bytes = model.num_bytes
        self.kv_bytes = self._runner.kv_bytes

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request) -> None:
        """Accept a request, or refuse it with a typed error before any work."""
        params = request.params
        named = {"prompt": request.prompt_ids, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for where, ids in named.items():
            bad = next((i for i in ids if not 0 <= i < self._vocab), None)
            if bad is not None:
                raise InvalidRequest(
                    f"token {bad} in {where} does not exist", hint=f"ids end at {self._vocab - 1}", param=where
                )
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def step(self) -> list[TokenEvent]:
        tasks = self.scheduler.schedule()
        return self.scheduler.settle(tasks, self._run(tasks)) if tasks else []

    @torch.inference_mode()
    def _run(self, tasks: list[Task]) -> list[Sampled | None]:
        hidden = self._runner.hidden([task.work for task in tasks])
        last_rows, row = [], -1
        for task in tasks:
            row += len(task.work.tokens)
            if task.samples:
                last_rows.append(row)
        if not last_rows:
            return [None] * len(tasks)
        if len(last_rows) < len(hidden):
            hidden = hidden[last_rows]
        sampled = iter(self._sampler.sample(self._runner.logits(hidden), [t.seq for t in tasks if t.samples]))
        return [next(sampled) if task.samples else None for task in tasks]


def _num_blocks(model: Model, config: EngineConfig) -> int:
    """What the user gives, or room for a few full contexts within a bound; always at least two blocks."""
    arch = model.arch
    block_bytes = arch.layers * BLOCK_TOKENS * arch.kv_width * 4
    wanted = _DEFAULT_CONTEXTS * -(-arch.context_tokens // BLOCK_TOKENS)
    if config.kv_gb is not None:
        return max(2, int(config.kv_gb * 2**30 / block_bytes))
    return max(2, min(wanted, _DEFAULT_KV_BYTES // block_bytes))
