"""Decoding a batch whose members are known to its end, with the host nowhere in the loop.

One captured step does everything: run the newest token and its draft, choose, see whether the draft came true, let the
MTP layer speak about what follows, and write down the answer and the next step's inputs. Replays follow one another
without a word to the host, which looks in now and then to see whether all are done.

A draft is taken if it is what the network chose. A rejected one leaves KV behind that nobody sees before the next step
writes that slot again. Who is done keeps running in place: its rows cost little, and no shape changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tripool.core import BLOCK_TOKENS
from tripool.engine.device_runner import DeviceRunner, captured
from tripool.engine.noise import gumbel, keys_at, token_hashes
from tripool.kernels.cuda.rows import DeviceRows, PagedRows
from tripool.models import Batch
from tripool.sequence import Work

_LOOK_EVERY = 16
"""Steps between two looks at the device, where it is not known when a batch ends."""


class DecodeLoop:
    def __init__(self, runner: DeviceRunner, tables: Sequence[Sequence[int]], *, count: int, mtp: bool = False) -> None:
        """`tables`: blocks of each request, enough for its prompt, `count` tokens and, with `mtp`, one more."""
        model, device = runner.model, runner.device
        assert not mtp or model.mtp is not None
        self._runner, self._count, self._mtp = runner, count, mtp
        self._queries = 2 if mtp else 1
        self._tables = [list(table) for table in tables]
        width = max(map(len, self._tables))
        padded = [table + table[:1] * (width - len(table)) for table in self._tables]
        self._table = torch.tensor(padded, dtype=torch.int32).to(device)
        requests = len(padded)
        self._tokens = torch.zeros(requests, self._queries, dtype=torch.int64, device=device)
        self._position = torch.zeros(requests, dtype=torch.int64, device=device)
        self._answer = torch.zeros(requests, count + 2, dtype=torch.int64, device=device)
        self._num_out = torch.zeros(requests, dtype=torch.int64, device=device)
        self._ahead = torch.arange(self._queries, device=device)
        self._hashes = token_hashes(model.arch.vocab).to(device)
        self._temperature: torch.Tensor | None = None
        self._bases = torch.zeros(requests, dtype=torch.int64, device=device)
        self._replay = captured(self._step) if device.type == "cuda" else self._step
        self.num_steps = 0

    def sample_with(self, temperature: Sequence[float], bases: Sequence[int]) -> None:
        """Noise of these streams (`noise.stream_base`) from now on; without it, always the likeliest."""
        device, told = self._runner.device, torch.tensor(temperature, dtype=torch.float32)
        self._bases.copy_(torch.tensor(bases))
        if self._temperature is not None:
            self._temperature.copy_(told)
            return
        self._temperature = told.to(device)
        self._replay = captured(self._step) if device.type == "cuda" else self._step

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], *, chunk_tokens: int = 32768) -> list[list[int]]:
        """The answers, `count` tokens each."""
        self._num_out.zero_()
        self._start(prompts, chunk_tokens)
        self.num_steps = 0
        if not self._mtp:
            for _ in range(self._count - 1):
                self._replay()
            self.num_steps = self._count - 1
        while self._mtp and self.num_steps < self._count - 1:
            for _ in range(min(_LOOK_EVERY, self._count - 1 - self.num_steps)):
                self._replay()
                self.num_steps += 1
            if int(self._num_out.min()) >= self._count:
                break
        answers: list[list[int]] = self._answer[:, : self._count].tolist()
        return answers

    def _start(self, prompts: Sequence[Sequence[int]], chunk_tokens: int) -> None:
        """Prompts in batches of a bounded number of tokens; the first token of each answer, and its draft."""
        at = 0
        while at < len(prompts):
            end, tokens = at + 1, len(prompts[at])
            while end < len(prompts) and tokens + len(prompts[end]) <= chunk_tokens:
                tokens += len(prompts[end])
                end += 1
            self._prefill(range(at, end), [list(prompt) for prompt in prompts[at:end]])
            at = end

    def _prefill(self, members: range, prompts: list[list[int]]) -> None:
        runner, device = self._runner, self._runner.device
        tables = [self._tables[i] for i in members]
        part = slice(members.start, members.stop)
        hidden = runner.hidden([Work(p, 0, table, False) for p, table in zip(prompts, tables, strict=True)])
        lengths = torch.tensor([len(p) for p in prompts])
        last = (lengths.cumsum(0) - 1).to(device)
        zeros = self._num_out[part]
        first = self._choose(runner.logits(hidden[last]), zeros, part)
        self._tokens[part, 0], self._answer[part, 0] = first, first
        self._position[part] = lengths.to(device)
        self._num_out[part] = 1
        if self._mtp:
            self._tokens[part, 1] = self._first_drafts(prompts, tables, hidden, first, part)

    def _first_drafts(
        self, prompts: list[list[int]], tables: list[list[int]], hidden: torch.Tensor, first: torch.Tensor, part: slice
    ) -> torch.Tensor:
        """The MTP layer over each prompt's later tokens, in prompt form, and over the first new one, as any other."""
        work: list[Work] = []
        for prompt, table, token in zip(prompts, tables, first.tolist(), strict=True):
            pieces = [Work(prompt[1:], 1, table, False)] if len(prompt) > 1 else []
            work += [*pieces, Work([token], len(prompt), table, True)]
        lasts = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
        logits = self._runner.draft_logits(work, hidden, lasts.tolist())
        return self._choose(logits, self._num_out[part], part)

    def _choose(self, logits: torch.Tensor, index: torch.Tensor, part: slice) -> torch.Tensor:
        """logits [requests, tokens], for the answer's token number `index` of each request."""
        logits = logits.float()
        if self._temperature is None:
            return logits.argmax(-1)
        heat = self._temperature[part, None]
        keys = keys_at(self._bases[part], index)
        noise = gumbel(0, self._hashes[: logits.shape[1]] + keys[:, None])
        noisy = logits / heat.clamp_min(1e-6) + noise
        return torch.where(heat > 0, noisy, logits).argmax(-1)

    @torch.inference_mode()
    def _step(self) -> torch.Tensor:
        model, kv, every = self._runner.model, self._runner.kv, slice(None)
        hidden = model.hidden(self._batch(self._tokens, self._position, 0), kv)
        logits = model.logits(hidden).unflatten(0, (-1, self._queries))
        chosen = torch.stack(
            [self._choose(logits[:, i], self._num_out + i, every) for i in range(self._queries)], dim=1
        )
        live = (self._num_out < self._count).long()
        if self._mtp:
            hit = (chosen[:, 0] == self._tokens[:, 1]).long()
            draft = self._draft(chosen, hidden, hit)
            newest = chosen.gather(1, hit[:, None])[:, 0]
            following = torch.stack((newest, draft), dim=1)
            taken = live * (1 + hit)
        else:
            following, taken = chosen, live
        places = self._num_out[:, None] + self._ahead
        kept = torch.where(live[:, None] > 0, chosen, self._answer.gather(1, places.clamp_max(self._count + 1)))
        self._answer.scatter_(1, places.clamp_max(self._count + 1), kept)
        self._tokens.copy_(torch.where(live[:, None] > 0, following, self._tokens))
        self._position += taken
        self._num_out += taken
        return self._num_out

    def _draft(self, chosen: torch.Tensor, hidden: torch.Tensor, hit: torch.Tensor) -> torch.Tensor:
        """What the MTP layer says after the newest token: the first chosen one, or the second where the draft hit."""
        model = self._runner.model
        assert model.mtp is not None
        final = model.mtp_hidden(self._batch(chosen, self._position + 1, 1), hidden, self._runner.kv)
        rows = final.unflatten(0, (-1, 2))
        newest = rows.gather(1, hit[:, None, None].expand(-1, 1, rows.shape[2]))[:, 0]
        return self._choose(model.mtp.head(newest), self._num_out + 1 + hit, slice(None))

    def _batch(self, tokens: torch.Tensor, position: torch.Tensor, first: int) -> Batch:
        positions = position[:, None] + self._ahead
        blocks = self._table.gather(1, (positions // BLOCK_TOKENS).clamp_max(self._table.shape[1] - 1))
        slots = blocks.long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
        lengths = (position + self._queries).int()
        rows = PagedRows(self._table, lengths, self._queries, first)
        order = torch.arange(tokens.numel(), device=tokens.device)
        return Batch(
            tokens.flatten(), positions.flatten(), slots.flatten(), 0, [], [], native=DeviceRows((), rows, order)
        )
