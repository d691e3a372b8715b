"""Tripool behind the benchmark protocol, through its public Python surface; perplexity through the engine's runner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from worker import serve

import tripool
from tripool import LLM, SamplingParams
from tripool.checkpoints import open_checkpoint
from tripool.engine.runner import Runner, Work
from tripool.kernels import CPU, CPU8, KernelTable
from tripool.models import load_model
from tripool.text import Tokenizer

BITS = {"float32": [32, 32], "int8": [8, 8]}
TEXTS = [Path(__file__).parents[2] / name for name in ("README.md", "docs/decisions.md")]


class Ours:
    def load(self, model: str, threads: int, precision: str) -> dict[str, Any]:
        said: dict[str, Any] = {"version": f"tripool {tripool.__version__} {precision}", "bits": BITS[precision]}
        if precision == "int8":
            torch.set_num_threads(threads)
            said["perplexity_change"] = perplexity(model, CPU8) / perplexity(model, CPU) - 1
        self.llm = LLM(model, threads=threads, precision=precision)
        return said

    def prepare(self, concurrency: int, context_tokens: int) -> None:
        """Admits any mix as it stands."""

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [list(answer.token_ids) for answer in self.llm.generate(prompts, params)]


def perplexity(model: str, kernels: KernelTable) -> float:
    """Over this project's own prose, 512 tokens at a time."""
    with open_checkpoint(model) as checkpoint:
        tokenizer = Tokenizer(checkpoint.text)
        runner = Runner(load_model(checkpoint, kernels=kernels), num_blocks=8)
    loss, count = 0.0, 0
    for path in TEXTS:
        ids = tokenizer.encode(path.read_text())
        for start in range(0, len(ids) - 512, 512):
            part = ids[start : start + 512]
            rows = runner.logits(runner.hidden([Work(part, 0, list(range(8)), False)])).log_softmax(-1)
            loss -= float(rows[:-1].gather(1, torch.tensor(part[1:])[:, None]).sum())
            count += len(part) - 1
    return math.exp(loss / count)


if __name__ == "__main__":
    serve(Ours())
