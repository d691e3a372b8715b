"""A fixed batch of requests through the executor that serves (`tripool.engine.executor`), without a scheduler.

Not a benchmark by itself: `engine_cuda.py` and `lite_vs_transformers.py` measure with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import timing  # noqa: F401 (puts the package on the import path)
import torch

from tripool.core import BLOCK_TOKENS, Request, SamplingParams
from tripool.engine.device import DeviceSpec
from tripool.engine.executor import Executor
from tripool.engine.sampler import unguarded
from tripool.models import Model
from tripool.sequence import Sampled, Seq, Task


@dataclass(frozen=True)
class Driven:
    answers: list[list[int]]
    num_steps: int
    """After the one that computes the prompts."""
    first_s: float
    """Until every request has its first token."""
    whole_s: float


class Batch:
    """Requests of known length in blocks of their own. Each answer is as long as its request asks: nothing ends it."""

    def __init__(self, device_spec: DeviceSpec, model: Model, lengths: Sequence[int], *, mtp: bool) -> None:
        """`lengths`: tokens of each request, prompt and answer."""
        # A draft has a row after the last token but one, and blocks without order: a table is followed, not guessed.
        counts = [-(-(length + 1) // BLOCK_TOKENS) for length in lengths]
        blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
        self._tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.executor: Executor = device_spec.executor(model, sum(counts), mtp=mtp, guard=unguarded)

    @torch.inference_mode()
    def run(self, prompts: Sequence[list[int]], counts: Sequence[int], temperature: float = 0.0) -> Driven:
        """Answers of `counts` tokens each."""
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        seqs = [
            Seq(Request(id=str(i), prompt_ids=tuple(prompt), params=params, seed=17 + i), 0, i, count, list(prompt))
            for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]
        for seq, table in zip(seqs, self._tables, strict=True):
            seq.table = table
        began_s, ended_s = time.perf_counter(), []
        while running := [seq for seq in seqs if seq.finish is None]:
            self._step(running)
            ended_s.append(time.perf_counter())
        answers = [seq.tokens[seq.prompt_len :] for seq in seqs]
        return Driven(answers, len(ended_s) - 1, ended_s[0] - began_s, ended_s[-1] - began_s)

    def _step(self, seqs: Sequence[Seq]) -> None:
        tasks = [Task(seq, seq.work(len(seq.tokens)), seq.draft) for seq in seqs]
        pending = self.executor.submit(tasks)
        for task, sampled in zip(tasks, pending.tokens(), strict=True):
            _settle(task, sampled)
        accepted = [task for task in tasks if task.seq.finish is None and task.seq.tokens[-1] == task.draft]
        if accepted:
            for task, sampled in zip(accepted, pending.tokens_after(accepted), strict=True):
                _settle(Task(task.seq, task.seq.work(1)), sampled)
        for seq in seqs:
            seq.draft = None
        for seq, draft in pending.drafts():
            seq.draft = draft


def _settle(task: Task, sampled: Sampled | None) -> None:
    assert sampled is not None
    seq = task.seq
    seq.num_computed = task.work.stop
    seq.tokens.append(sampled.token_id)
    if seq.num_generated == seq.max_new_tokens:
        seq.finish = "length"
