"""The teacher: many rows of answers growing together, a slot for each, refilled when one ends.

A step feeds every row its last token and draws the next; a round is some steps without a word to the host. Every row
has its own length, so one CUDA graph serves all rounds. Rows that have ended stay quiet until their slot is refilled.
Knows token ids alone: what they say and what is kept is others' business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
import torch.nn.functional as F

from tiny.distil import plain
from tiny.distil.script import Ask, Said
from tiny.distil.weights import Layer, Weights

PREFILL_TOKENS = 1 << 17
"""Prompt tokens computed at once, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How every row draws; its temperature is its own."""

    penalty: float = 1.18
    """On tokens that the answer already holds, as far as `penalised` names them."""
    min_p: float = 0.1
    end_ids: frozenset[int] = frozenset()
    penalised: torch.Tensor | None = field(default=None, compare=False)
    """bool [vocab]; None: every token."""
    seed: int = 0
    heat: float = 1.0
    """Factor on every row's temperature."""


class Teacher:
    """`rows` slots. `fill` puts prompts into free ones, `run` grows all by a round, `collect` hands out what ended."""

    def __init__(self, weights: Weights, sampling: Sampling, *, rows: int, places: int, steps: int, fast: bool) -> None:
        self._weights = weights
        self._sampling = sampling
        self._ops: ModuleType = _fast_ops() if fast else plain
        self._draw = _fast_draw() if fast else plain.draw
        self.rows, self.places, self.steps = rows, places, steps
        device, shape = weights.embed.device, weights.shape
        self._device = device
        size = (weights.arch.layers, rows, shape.kv_heads, places, shape.head_dim)
        self._keys = torch.zeros(size, dtype=weights.embed.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._token = torch.zeros(rows, dtype=torch.int64, device=device)
        self._length = torch.zeros(rows, dtype=torch.int32, device=device)
        self._left = torch.zeros(rows, dtype=torch.int32, device=device)
        self._alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._seen = torch.zeros(rows, weights.arch.vocab, dtype=torch.bool, device=device)
        self._said = torch.zeros(rows, places + 1, dtype=torch.int32, device=device)
        self._count = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seed = torch.tensor([sampling.seed], dtype=torch.int64, device=device)
        self._ends = torch.tensor(sorted(sampling.end_ids), dtype=torch.int64, device=device)
        penalised = sampling.penalised
        self._penalised = torch.ones(weights.arch.vocab, dtype=torch.bool) if penalised is None else penalised
        self._penalised = self._penalised.to(device)
        self._busy: set[int] = set()
        self._round: Callable[[], None] = self._graph() if fast and device.type == "cuda" else self._steps

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(self.rows) if slot not in self._busy]

    @torch.inference_mode()
    def fill(self, asks: Sequence[tuple[int, Ask]]) -> None:
        """Prompts into free slots. All but a prompt's last token are computed here, the last one by the next step."""
        by_length = sorted(asks, key=lambda pair: len(pair[1].ids))
        while by_length:
            widest = [len(ask.ids) for _, ask in by_length]
            count = next((n for n, width in enumerate(widest, 1) if n * width > PREFILL_TOKENS), len(widest) + 1) - 1
            now, by_length = by_length[: max(count, 1)], by_length[max(count, 1) :]
            self._prefill([slot for slot, _ in now], [ask for _, ask in now])

    @torch.inference_mode()
    def run(self) -> None:
        """Start a round. On CUDA this returns at once; `collect` waits."""
        self._round()

    def collect(self) -> list[Said]:
        """Answers that ended in the last round; their slots are free again."""
        alive = self._alive.tolist()
        slots = [slot for slot in sorted(self._busy) if not alive[slot]]
        if not slots:
            return []
        rows = torch.tensor(slots, device=self._device)
        counts = self._count[rows].tolist()
        said = self._said[rows, : max(counts)].tolist()
        self._busy.difference_update(slots)
        return [self._ended(slot, row[:count]) for slot, row, count in zip(slots, said, counts, strict=True)]

    def _ended(self, slot: int, ids: list[int]) -> Said:
        finished = ids[-1] in self._sampling.end_ids
        return Said(slot, ids[:-1] if finished else ids, not finished)

    def _prefill(self, slots: list[int], asks: list[Ask]) -> None:
        """Right-padded: what comes after a prompt's end is never looked at, and overwritten as its answer grows."""
        device, width = self._device, max(2, max(len(ask.ids) for ask in asks))
        padded = torch.tensor([[*ask.ids, *[0] * (width - len(ask.ids))] for ask in asks], device=device)
        rows = torch.tensor(slots, device=device)
        lengths = torch.tensor([len(ask.ids) for ask in asks], dtype=torch.int32, device=device)
        limits = [min(ask.max_tokens, self.places - len(ask.ids)) for ask in asks]
        assert min(limits) > 0 and self._busy.isdisjoint(slots)
        x = F.embedding(padded[:, :-1], self._weights.embed)
        for number, layer in enumerate(self._weights.layers):
            x = self._prefill_layer(x, layer, number, rows)
        self._token[rows] = padded.gather(1, lengths[:, None].long() - 1)[:, 0]
        self._length[rows] = lengths - 1
        self._left[rows] = torch.tensor(limits, dtype=torch.int32, device=device)
        self._temperature[rows] = torch.tensor([self._sampling.heat * ask.temperature for ask in asks], device=device)
        self._seen[rows] = False
        self._alive[rows] = True
        self._count[rows] = 0
        self._busy.update(slots)

    def _prefill_layer(self, x: torch.Tensor, layer: Layer, number: int, rows: torch.Tensor) -> torch.Tensor:
        weights, shape, eps = self._weights, self._weights.shape, self._weights.arch.norm_eps
        count, width, hidden = x.shape
        normed = F.rms_norm(x, (hidden,), layer.norm_in, eps)
        parts = F.linear(normed, layer.qkv).view(count, width, -1, shape.head_dim).transpose(1, 2)
        q, k, v = parts.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        turns = weights.turns[0][:width], weights.turns[1][:width]
        q, k = plain.turn(q, *turns), plain.turn(k, *turns)
        self._keys[number, rows, :, :width] = k
        self._values[number, rows, :, :width] = v
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(count, width, -1), layer.out)
        gate, up = F.linear(F.rms_norm(x, (hidden,), layer.norm_mlp, eps), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _one_step(self) -> None:
        """Every tensor it changes is a row's state, changed in place: a graph can replay it."""
        weights, eps = self._weights, self._weights.arch.norm_eps
        hidden = weights.arch.hidden
        x = F.embedding(self._token, weights.embed)
        counts = torch.where(self._alive, self._length + 1, 0)
        for number, layer in enumerate(weights.layers):
            keys, values = self._keys[number], self._values[number]
            qkv = F.linear(F.rms_norm(x, (hidden,), layer.norm_in, eps), layer.qkv)
            self._ops.turn_and_store(qkv, weights.turns, self._length, keys, values)
            x = torch.addmm(x, self._ops.attend(qkv, keys, values, counts), layer.out.T)
            gate, up = F.linear(F.rms_norm(x, (hidden,), layer.norm_mlp, eps), layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate) * up, layer.down.T)
        logits = F.linear(F.rms_norm(x, (hidden,), weights.norm, eps), weights.head)
        log_min_p = math.log(self._sampling.min_p) if self._sampling.min_p > 0 else -1e9
        drawn = self._draw(
            logits, self._seen, self._temperature, self._seed, penalty=self._sampling.penalty, log_min_p=log_min_p
        )
        self._take(drawn)

    def _take(self, drawn: torch.Tensor) -> None:
        alive = self._alive
        # Rows that have ended write into the last column, which nobody reads.
        self._said.scatter_(1, torch.where(alive, self._count, self.places)[:, None], drawn[:, None].to(torch.int32))
        self._count.add_(alive.to(torch.int64))
        self._seen.scatter_(1, drawn[:, None], self._penalised[drawn][:, None] | self._seen.gather(1, drawn[:, None]))
        self._token.copy_(torch.where(alive, drawn, self._token))
        self._length.add_(alive.to(torch.int32))
        self._left.sub_(alive.to(torch.int32))
        ended = (drawn[:, None] == self._ends).any(dim=1)
        alive.logical_and_(~ended & (self._left > 0))
        self._seed.add_(1)

    def _steps(self) -> None:
        for _ in range(self.steps):
            self._one_step()

    @torch.inference_mode()
    def _graph(self) -> Callable[[], None]:
        """One step as a CUDA graph, captured while no row is alive: nothing is said and no length grows."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._one_step()
            self._one_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._one_step()

        def replay() -> None:
            for _ in range(self.steps):
                graph.replay()

        return replay


def _fast_ops() -> ModuleType:
    from tiny.distil import gqa_decode

    return gqa_decode


def _fast_draw() -> Callable[..., torch.Tensor]:
    from tiny.distil.draw import draw

    return draw
