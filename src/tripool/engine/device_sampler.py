"""Sampling where the logits are. One look at the device per step: the chosen tokens come back together.

Greedy rows and rows that are only heated are chosen on the device, by the same noise as everywhere (`engine.noise`). A
row whose request wants more (penalties, a grammar, top-k, log-probabilities) is brought to the host and chosen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tripool.engine.noise import gumbel, keys_at, stream_base
from tripool.engine.sampler import Guard, Sampler, is_simple, unguarded
from tripool.sequence import Sampled, Seq


class DeviceSampler(Sampler):
    def __init__(self, vocab: int, device: torch.device | str) -> None:
        super().__init__(vocab)
        self._device_hashes = self._hashes.to(device)

    def sample(self, logits: torch.Tensor, seqs: Sequence[Seq], guard: Guard = unguarded) -> Sequence[Sampled | None]:
        chosen = self._on_device(logits, seqs)
        return [
            Sampled(token) if is_simple(seq) else guard(seq, partial(self._sample_row, row.float().cpu(), seq))
            for token, row, seq in zip(chosen, logits, seqs, strict=True)
        ]

    def guess(self, logits: torch.Tensor, seqs: Sequence[Seq]) -> list[int]:
        chosen = self._on_device(logits, seqs)
        return [
            token if is_simple(seq) else self._choose(self._widened(row.float().cpu(), seq), seq)
            for token, row, seq in zip(chosen, logits, seqs, strict=True)
        ]

    def _likeliest(self, logits: torch.Tensor) -> list[int]:
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens

    def _on_device(self, logits: torch.Tensor, seqs: Sequence[Seq]) -> list[int]:
        logits = logits.float()
        heats = [seq.request.params.temperature for seq in seqs]
        if any(heats):
            bases = [stream_base(seq.request.seed, seq.choice) for seq in seqs]
            told = torch.tensor([bases, [seq.num_generated for seq in seqs]]).to(logits.device)
            heat = torch.tensor(heats, dtype=torch.float32).to(logits.device)[:, None]
            noise = gumbel(0, self._device_hashes[: logits.shape[1]] + keys_at(told[0], told[1])[:, None])
            logits = torch.where(heat > 0, logits / heat.clamp_min(1e-6) + noise, logits)
        return self._likeliest(logits)
