"""A rank for `bench/experts_exchange.py`: a process that answers questions, one JSON object per line.

python bench/experts_rank.py MODEL THREADS
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tripool import LLM, SamplingParams
from tripool.config import EngineConfig
from tripool.engine.load import load_engine
from tripool.experts.layout import Layout
from tripool.experts.slabs import attach_prompts, attach_slabs
from tripool.kernels.cpu8.exchange import MICROBATCH_ROWS, NativeExchange
from tripool.kernels.cpu8.prompts import NativePrompts
from tripool.kernels.cpu8.sublayers import Moe8
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.weights import MoeWeights, Norm

WITHIN_S = 600.0
PROMPT_TOKENS, LONG_PROMPT = 32, 2000
LINE = 64


class Rank:
    """Answers the questions of the benchmark, one JSON object per line."""

    def __init__(self, model: str, threads: int) -> None:
        self._engine = load_engine(model, EngineConfig(threads=threads, mtp=False))
        self._llm = LLM(self._engine)  # once: it reads the tokenizer
        self._network = network = self._engine.executor.runner.model
        self._layers = [layer for layer in network.expert_sublayers if isinstance(layer, Moe8)]
        steps = [layer for layer in self._layers if network.mtp is None or layer is not network.mtp.layer.mlp]
        self._step_layers = len(steps)
        experts = sum(layer.expert_bytes for layer in steps)
        parts = [part for layer in network._layers for part in (layer.attention, layer.mlp)]
        every = sum(part.num_bytes for part in (*parts, network._head))  # without the MTP layer, which is off
        self._bytes = {"experts": experts, "others": every - experts}
        self._prompts: NativePrompts | None = None
        self._exchange: NativeExchange | None = None
        self._layout: Layout | None = None
        self._stop = threading.Event()
        self._busy: threading.Thread | None = None

    def bare(self) -> dict[str, Any]:
        """From now on there is one layer only: of the model's sizes, without shared expert."""
        struct, rng = self._layers[0].struct, torch.Generator().manual_seed(3)
        hidden, width = struct.norm.width, struct.down[0].in_
        sizes = {"gate": (struct.experts, hidden), "gate_up": (struct.experts, 2 * width, hidden)}
        sizes["down"] = (struct.experts, hidden, width)
        random = {name: 0.1 * torch.randn(*size, generator=rng) for name, size in sizes.items()}
        plan = RoutePlan(
            top_k=struct.top_k, score="softmax", groups=1, top_groups=1, group_top=1, normalise=True, scaling=1.0
        )
        norm = Norm(torch.ones(hidden), 1e-6)
        self._layers = [Moe8(MoeWeights(norm=norm, gate_bias=None, shared=None, plan=plan, **random))]
        return {}

    def shape(self) -> dict[str, Any]:
        struct = self._layers[0].struct
        sizes = {"experts": struct.experts, "top_k": struct.top_k, "hidden": struct.norm.width}
        return {
            "layout": {"layers": len(self._layers), **sizes},
            "bytes": self._bytes,
            "step_layers": self._step_layers,
        }

    def open(self, path: str, rank: int, microbatch_rows: int = MICROBATCH_ROWS) -> dict[str, Any]:
        if self._exchange is not None:
            self._exchange.close()
        self._layout, memory = attach_slabs(Path(path))
        self._exchange = NativeExchange(self._layout, memory, rank, self._layers, microbatch_rows=microbatch_rows)
        return {}

    def map(self, epoch: int, ranks: list[int]) -> dict[str, Any]:
        """`ranks`: of each expert, the same in every layer."""
        assert self._exchange is not None and self._layout is not None
        table = np.tile(np.array(ranks, np.int32), (self._layout.layers, 1))
        self._exchange.install(epoch, table, [True] * self._layout.ranks)
        return {}

    def prompt_layout(self, ranks: int) -> dict[str, Any]:
        arch = self._network.arch
        widths = {"query_width": arch.query_width, "kv_width": arch.kv_width, "attended_width": arch.attended_width}
        sizes = {"ranks": ranks, "rows": 512, "context": LONG_PROMPT, "hidden": arch.hidden}
        return sizes | widths

    def prompts(self, path: str, rank: int, share: bool) -> dict[str, Any]:
        """Compute prompts together with other ranks, or alone."""
        if self._prompts is not None:
            self._prompts.close()
        self._prompts = NativePrompts(*attach_prompts(Path(path)), rank, self._network.stack) if share else None
        return {}

    def close(self) -> dict[str, Any]:
        assert self._exchange is not None
        self._exchange.close()
        return {}

    def layer_us(self, rows: int, count: int) -> dict[str, Any]:
        layer, took = self._layers[0], []
        x = torch.randn(rows, layer.struct.norm.width, generator=torch.Generator().manual_seed(1))
        for _ in range(count):
            y = x.clone()
            began_ns = time.perf_counter_ns()
            layer(y)
            took.append((time.perf_counter_ns() - began_ns) / 1000)
        return {"us": took}

    def hand_over_us(self, path: str, sizes: list[int], rank: int, count: int) -> dict[str, Any]:
        """Two processes take turns, as in an exchange: 0 writes sizes[0] bytes, 1 reads them and writes sizes[1], 0
        reads those. For each copy of this process what it takes more than the same copy right after it: the first one
        fetches lines from the other core, or takes them away from it. A processor's copy instruction moves them faster
        than products can write what they compute, so this is the least that they cost."""
        shared = np.memmap(path, np.uint8, "r+", shape=(LINE + sum(sizes),))
        turn, parts = shared[:8].view(np.int64), (shared[LINE : LINE + sizes[0]], shared[LINE + sizes[0] :])
        own = [np.ones_like(part) for part in parts]
        more_us: dict[int, list[float]] = {0: [], 1: []}

        def copies(number: int, into: bool) -> None:
            target, source = (parts[number], own[number]) if into else (own[number], parts[number])
            began_ns = time.perf_counter_ns()
            np.copyto(target, source)
            first_ns = time.perf_counter_ns()
            np.copyto(target, source)
            more_us[number].append((2 * first_ns - began_ns - time.perf_counter_ns()) / 1000)

        deadline_s = time.monotonic() + WITHIN_S
        for number in range(count):
            if rank == 0:
                copies(0, into=True)
                turn[0] = 2 * number + 1
            while turn[0] != 2 * number + 2 - rank:
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the other rank does not take its turn")
            copies(1 - rank, into=False)
            if rank == 1:
                copies(1, into=True)
                turn[0] = 2 * number + 2
        return {"us": sum(float(np.median(samples)) for samples in more_us.values())}

    def keep_busy(self, kind: str) -> dict[str, Any]:
        """Until `rest`: Python that holds the interpreter, or steps."""
        self._stop.clear()
        work = self._steps if kind == "steps" else self._python
        self._busy = threading.Thread(target=work)
        self._busy.start()
        return {}

    def _python(self) -> None:
        while not self._stop.is_set():
            sum(range(10_000))

    def _steps(self) -> None:
        while not self._stop.is_set():
            self.generate([[7] * PROMPT_TOKENS] * 8, 8)

    def rest(self) -> dict[str, Any]:
        assert self._busy is not None
        self._stop.set()
        self._busy.join(WITHIN_S)
        return {}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        began_s = time.perf_counter()
        began_cpu_s = time.process_time()
        self._llm.generate(prompts, params)
        return {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}


def serve_rank(model: str, threads: int) -> None:
    rank = Rank(model, threads)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(getattr(rank, question.pop("do"))(**question)), flush=True)


if __name__ == "__main__":
    serve_rank(sys.argv[1], int(sys.argv[2]))
