"""Decodes a fixed batch on a device to a fixed length, without the host in the loop.

One captured step runs the newest tokens, chooses the next ones and writes the next step's inputs, so replays follow one
another. It serves nobody: no request joins, leaves or ends early. The engine's executor is what serves
(`engine/executor.py`); making the bundled model's draft lessons needs thousands of answers at once instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tripool.core import BLOCK_TOKENS
from tripool.engine.device_runner import DeviceRunner
from tripool.engine.graph_capture import GraphCapture
from tripool.engine.noise import gumbel, keys_at, token_hashes
from tripool.kernels.cuda.rows import DeviceRows, PagedRows
from tripool.models import Batch
from tripool.sequence import Work


class DecodeLoop:
    def __init__(self, runner: DeviceRunner, tables: Sequence[Sequence[int]], *, count: int) -> None:
        """`tables`: blocks of each request, enough for its prompt and `count` tokens."""
        device, requests = runner.device, len(tables)
        self._runner, self._count = runner, count
        self._tables = [list(table) for table in tables]
        width = max(map(len, self._tables))
        padded = [table + table[:1] * (width - len(table)) for table in self._tables]
        self._table = torch.tensor(padded, dtype=torch.int32).to(device)
        columns = [torch.zeros(requests, dtype=torch.int64, device=device) for _ in range(4)]
        self._tokens, self._position, self._num_out, self._bases = columns
        self._answer = torch.zeros(requests, count, dtype=torch.int64, device=device)
        self._hashes = token_hashes(runner.model.arch.vocab).to(device)
        self._temperature = torch.zeros(requests, dtype=torch.float32, device=device)
        self._replay = GraphCapture(device)(self._step) if device.type == "cuda" else self._step

    def sample_with(self, temperature: Sequence[float], bases: Sequence[int]) -> None:
        """Noise of these streams (`noise.stream_base`) from now on; temperature 0 takes the likeliest."""
        self._temperature.copy_(torch.tensor(temperature, dtype=torch.float32))
        self._bases.copy_(torch.tensor(bases))

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], *, chunk_tokens: int = 32768) -> list[list[int]]:
        """The answers, `count` tokens each. Prompts are computed in batches of a bounded number of tokens."""
        start = 0
        while start < len(prompts):
            end, tokens = start + 1, len(prompts[start])
            while end < len(prompts) and tokens + len(prompts[end]) <= chunk_tokens:
                tokens += len(prompts[end])
                end += 1
            self._prefill(slice(start, end), [list(prompt) for prompt in prompts[start:end]])
            start = end
        for _ in range(self._count - 1):
            self._replay()
        answers: list[list[int]] = self._answer.tolist()
        return answers

    def _prefill(self, part: slice, prompts: list[list[int]]) -> None:
        runner = self._runner
        hidden = runner.hidden([Work(p, 0, table, False) for p, table in zip(prompts, self._tables[part], strict=True)])
        lengths = torch.tensor([len(p) for p in prompts])
        last = (lengths.cumsum(0) - 1).to(runner.device)
        self._num_out[part] = 0
        first = self._choose(runner.logits(hidden[last]), part)
        self._tokens[part], self._answer[part, 0] = first, first
        self._position[part] = lengths.to(runner.device)
        self._num_out[part] = 1

    def _choose(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        """The next token of each request, from logits [requests, tokens]."""
        logits, heat = logits.float(), self._temperature[part, None]
        keys = keys_at(self._bases[part], self._num_out[part])
        noisy = logits / heat.clamp_min(1e-6) + gumbel(0, self._hashes + keys[:, None])
        return torch.where(heat > 0, noisy, logits).argmax(-1)

    @torch.inference_mode()
    def _step(self) -> torch.Tensor:
        hidden = self._runner.model.hidden(self._batch(), self._runner.kv)
        chosen = self._choose(self._runner.model.logits(hidden), slice(None))
        # Past the end only while the step is captured, which runs it on whatever is there.
        self._answer.scatter_(1, self._num_out.clamp_max(self._count - 1)[:, None], chosen[:, None])
        self._tokens.copy_(chosen)
        self._position += 1
        self._num_out += 1
        return self._num_out

    def _batch(self) -> Batch:
        position = self._position
        column = (position // BLOCK_TOKENS).clamp_max(self._table.shape[1] - 1)
        blocks = self._table.gather(1, column[:, None])[:, 0]
        slots = blocks.long() * BLOCK_TOKENS + position % BLOCK_TOKENS
        rows = PagedRows(self._table, (position + 1).int(), 1)
        order = torch.arange(len(position), device=position.device)
        return Batch(self._tokens, position, slots, 0, [], [], native=DeviceRows((), rows, order))
