"""Sampling where the logits are: tokens stay on the device, and are copied to the host together.

Rows that need nothing but a temperature and noise are chosen on the device, by the same noise as everywhere
(`engine.noise`). A row whose request wants more (penalties, a grammar, top-k, log-probabilities) is copied to the host
and chosen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from tripool.engine.noise import gumbel, keys_at, stream_base
from tripool.engine.sampler import Guard, Sampler, draw_of, unguarded
from tripool.kernels.cuda.rows import to_device
from tripool.kernels.table import Draw
from tripool.sequence import Sampled, Seq


class DeviceSampler(Sampler):
    def __init__(self, vocab: int, device: torch.device | str) -> None:
        super().__init__(vocab)
        self._device_hashes = self._hashes.to(device)

    def sample(self, logits: torch.Tensor, seqs: Sequence[Seq], guard: Guard = unguarded) -> Sequence[Sampled | None]:
        return self.submit(logits, seqs, guard).tokens()

    def submit(
        self, logits: torch.Tensor, seqs: Sequence[Seq], guard: Guard = unguarded, out: torch.Tensor | None = None
    ) -> Choice:
        """Choose without waiting for the device, and write the tokens to `out`. `logits` may change as soon as this
        returns."""
        others = [i for i, seq in enumerate(seqs) if not seq.is_simple]
        temperatures = [seq.request.params.temperature for seq in seqs]
        tokens = self.chosen(logits, temperatures, _keys(seqs) if any(temperatures) else None, out)
        rows = logits.index_select(0, to_device(others, logits.device)).float() if others else None
        return Choice(tokens, rows, {i: partial(self._sampled, guard, seqs[i]) for i in others})

    def _sampled(self, guard: Guard, seq: Seq, row: torch.Tensor) -> Sampled | None:
        return guard(seq, partial(self._sample_row, row, seq))

    def guess(self, logits: torch.Tensor, seqs: Sequence[Seq]) -> list[int]:
        chosen = self.choose(logits, [draw_of(seq) for seq in seqs])
        return [
            token if seq.is_simple else self._choose(self._widened(row.float().cpu(), seq), seq)
            for token, row, seq in zip(chosen, logits, seqs, strict=True)
        ]

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        temperatures, keys = zip(*draws, strict=True)
        key = torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
        tokens: list[int] = self.chosen(logits, temperatures, key).tolist()
        return tokens

    def chosen(
        self,
        logits: torch.Tensor,
        temperatures: Sequence[float],
        keys: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `choose`, on the device. `keys`: int64, of the noise of each row; None where no temperature is above 0."""
        if keys is None or not any(temperatures):
            return torch.argmax(logits, -1, out=out)
        key = to_device(keys, logits.device)[:, None]
        heat = to_device(temperatures, logits.device, torch.float32)[:, None]
        noise = gumbel(0, self._device_hashes[: logits.shape[1]] + key)
        logits = logits.float()
        return torch.argmax(torch.where(heat > 0, logits / heat.clamp_min(1e-6) + noise, logits), -1, out=out)


class Choice:
    """Chosen tokens on their way to the host, and the rows of logits from which others are chosen there."""

    def __init__(
        self, tokens: torch.Tensor, rows: torch.Tensor | None, by_host: dict[int, partial[Sampled | None]]
    ) -> None:
        self._tokens, self._rows = _to_host(tokens), None if rows is None else _to_host(rows)
        self._by_host = by_host
        self.wait = waiter(tokens)

    def tokens(self) -> list[Sampled | None]:
        self.wait()
        sampled: list[Sampled | None] = [Sampled(token) for token in self._tokens.tolist()]
        for row, (i, choose) in enumerate(self._by_host.items()):
            assert self._rows is not None
            sampled[i] = choose(self._rows[row])
        return sampled


def waiter(result: torch.Tensor) -> Callable[[], object]:
    """Waits until the device has done all that it was given up to now, which is where `result` comes from."""
    if not result.is_cuda:
        return lambda: None
    done = torch.cuda.Event()
    done.record()
    return done.synchronize


def _keys(seqs: Sequence[Seq]) -> torch.Tensor:
    """int64: `noise_key` of the next token of each."""
    bases = [stream_base(seq.request.seed, seq.choice) for seq in seqs]
    return keys_at(torch.tensor(bases), torch.tensor([seq.num_generated for seq in seqs]))


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy that is complete when the device has come to it."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return host.copy_(values, non_blocking=True)
