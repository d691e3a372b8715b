"""Sampling where the logits are, with one transfer to the host per call: the chosen tokens come back together.

Rows that need nothing but a temperature and noise are chosen on the device, by the same noise as everywhere
(`engine.noise`). A row whose request wants more (penalties, a grammar, top-k, log-probabilities) is copied to the host
and chosen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from tripool.engine.noise import gumbel
from tripool.engine.sampler import Guard, Sampler, draw_of, unguarded
from tripool.kernels.table import Draw
from tripool.sequence import Sampled, Seq


class DeviceSampler(Sampler):
    def __init__(self, vocab: int, device: torch.device | str) -> None:
        super().__init__(vocab)
        self._device_hashes = self._hashes.to(device)

    def sample(self, logits: torch.Tensor, seqs: Sequence[Seq], guard: Guard = unguarded) -> Sequence[Sampled | None]:
        chosen = self.choose(logits, [draw_of(seq) for seq in seqs])
        return [
            Sampled(token) if seq.is_simple else guard(seq, partial(self._sample_row, row.float().cpu(), seq))
            for token, row, seq in zip(chosen, logits, seqs, strict=True)
        ]

    def guess(self, logits: torch.Tensor, seqs: Sequence[Seq]) -> list[int]:
        chosen = self.choose(logits, [draw_of(seq) for seq in seqs])
        return [
            token if seq.is_simple else self._choose(self._widened(row.float().cpu(), seq), seq)
            for token, row, seq in zip(chosen, logits, seqs, strict=True)
        ]

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        logits = logits.float()
        if any(temperature for temperature, _ in draws):
            temperatures, keys = zip(*draws, strict=True)
            key = torch.from_numpy(np.array(keys, np.uint64).view(np.int64)).to(logits.device)[:, None]
            heat = torch.tensor(temperatures, dtype=torch.float32).to(logits.device)[:, None]
            noise = gumbel(0, self._device_hashes[: logits.shape[1]] + key)
            logits = torch.where(heat > 0, logits / heat.clamp_min(1e-6) + noise, logits)
        return self._likeliest(logits)

    def _likeliest(self, logits: torch.Tensor) -> list[int]:
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens
