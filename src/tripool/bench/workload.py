"""Workloads: lists of shots from a trace or synthetic, with arrival times for an open loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import shake_128
from math import log1p
from struct import unpack

from tripool.bench.prompts import Piece, Pieces
from tripool.bench.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to send. `due_s`, since the start, is None in a closed loop: then it is sent when another has
    ended.
    """

    index: int
    due_s: float | None
    pieces: Pieces
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


def trace_shots(requests: Sequence[TraceRequest], *, speed: float = 1.0, scale_tokens: float = 1.0) -> list[Shot]:
    """`speed` 2 sends twice as fast. `scale_tokens` shrinks blocks and remainders alike, so shared prefixes
    stay shared.
    """
    shots = []
    for index, request in enumerate(requests):
        block_tokens = request.block_tokens
        scaled_block = max(1, round(block_tokens * scale_tokens))
        rest = request.input_tokens - block_tokens * (len(request.block_ids) - 1)
        pieces = [Piece(f"block {block_id}", scaled_block) for block_id in request.block_ids]
        if pieces and rest <= block_tokens:
            pieces[-1] = replace(pieces[-1], num_tokens=max(1, round(rest * scale_tokens)))
        elif (beyond := rest - block_tokens) > 0:  # what has no id is not shared: an unfilled block, or all
            pieces.append(Piece(f"end {index}", max(1, round(beyond * scale_tokens))))
        output_tokens = max(1, round(request.output_tokens * scale_tokens))
        shots.append(Shot(index, request.arrival_s / speed, tuple(pieces), output_tokens))
    return shots


def random_shots(num_requests: int, *, input_tokens: int, output_tokens: int) -> list[Shot]:
    """Prompts without common prefixes."""
    pieces = (((Piece(f"request {index}", input_tokens)),) for index in range(num_requests))
    return [Shot(index, None, own, output_tokens) for index, own in enumerate(pieces)]


def poisson_arrivals(num_requests: int, *, rate: float, seed: int) -> list[float]:
    """Times of a Poisson process: gaps are independent and exponential with mean 1 / rate."""
    draws = unpack(f"<{num_requests}Q", shake_128(f"{seed}/arrivals".encode()).digest(8 * num_requests))
    times_s, now_s = [], 0.0
    for draw in draws:
        now_s -= log1p(-(draw >> 11) / 2**53) / rate  # 53 bits: the resolution of a float below 1
        times_s.append(now_s)
    return times_s


def at_times(shots: Sequence[Shot], due_s: Sequence[float]) -> list[Shot]:
    return [replace(shot, due_s=due) for shot, due in zip(shots, due_s, strict=True)]


def without_times(shots: Sequence[Shot]) -> list[Shot]:
    """For a closed loop."""
    return [replace(shot, due_s=None) for shot in shots]
