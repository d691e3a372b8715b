"""ServeGen's client sets: each client with its rate, its burstiness and its lengths over the day, drawn anew. Pure.

A set is a folder of pairs. `chunk-N-trace.csv`: start of a window in seconds, requests per second, coefficient of
variation, `Gamma` or `Weibull` (empty: silent), and that pattern's shape and scale. `chunk-N-dataset.json`: start of a
window -> how often each length occurs, for prompts and answers. Times between two requests of a client are drawn from
its pattern's shape, stretched to its rate.
"""

from __future__ import annotations

import json
from ast import literal_eval
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate
from math import gamma
from re import fullmatch
from typing import Any

from tripool.bench.trace import BadTrace, TraceRequest
from tripool.simulate.rng import Rng


@dataclass(frozen=True, slots=True)
class Window:
    begin_s: float
    rate: float
    """Requests per second."""
    pattern: str
    shape: float


@dataclass(frozen=True, slots=True)
class Lengths:
    values: tuple[int, ...]
    sums: tuple[float, ...]
    """Of the shares of all values up to this one."""

    def draw(self, rng: Rng) -> int:
        at = bisect_right(self.sums, rng.uniform(0.0, self.sums[-1]))
        return max(1, self.values[min(at, len(self.values) - 1)])


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    windows: tuple[Window, ...]
    lengths: tuple[tuple[float, Lengths, Lengths], ...]
    """(from when on, prompts, answers)"""


def parse_clients(files: Mapping[str, str]) -> list[Client]:
    """From file names (folders in them do not matter) to contents."""
    parts: dict[int, dict[str, tuple[str, str]]] = {}
    for path, text in files.items():
        found = fullmatch(r"(?:.*/)?chunk-(\d+)-(trace\.csv|dataset\.json)", path)
        if found:
            parts.setdefault(int(found[1]), {})[found[2]] = path, text
    clients = []
    for number, pair in sorted(parts.items()):
        if len(pair) == 2:
            windows, lengths = _windows(*pair["trace.csv"]), _lengths(*pair["dataset.json"])
            if windows and lengths:
                clients.append(Client(f"client-{number}", windows, lengths))
    if not clients:
        hint = "chunk-N-trace.csv and chunk-N-dataset.json, as ServeGen publishes them"
        raise BadTrace("no client with both its files", hint=hint)
    return clients


def _windows(path: str, text: str) -> tuple[Window, ...]:
    windows = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines())), 1):
        try:
            begin, rate, _, pattern, shape, _ = line.split(",")
            window = Window(float(begin), float(rate), pattern, float(shape or 0))
        except ValueError:
            raise BadTrace(f"{path}, line {number}: {line[:80]!r}", hint="six columns, see ServeGen") from None
        if window.rate > 0 and (pattern not in ("Gamma", "Weibull") or not window.shape > 0):
            raise BadTrace(f"{path}, line {number}: pattern {pattern!r}", hint="Gamma or Weibull, and its shape")
        windows.append(window)
    return tuple(windows)


def _lengths(path: str, text: str) -> tuple[tuple[float, Lengths, Lengths], ...]:
    try:
        tree = json.loads(text)
        found = []
        for begin in sorted(tree, key=float):
            prompts, answers = (_table(tree[begin][name]) for name in ("input_tokens", "output_tokens"))
            if prompts is not None and answers is not None:
                found.append((float(begin), prompts, answers))
    except (AttributeError, KeyError, SyntaxError, TypeError, ValueError) as error:
        raise BadTrace(f"{path}: {error}", hint="windows with input_tokens and output_tokens, see ServeGen") from None
    return tuple(found)


def _table(said: object) -> Lengths | None:
    """`{length: share}`, as an object or, as published, as the text of one. None: a window without requests."""
    table: Any = literal_eval(said) if isinstance(said, str) else said
    pairs = sorted((int(float(length)), float(share)) for length, share in table.items() if float(share) > 0)
    if not pairs:
        return None
    return Lengths(tuple(length for length, _ in pairs), tuple(accumulate(share for _, share in pairs)))


def draw_clients(
    clients: list[Client], *, seed: int, begin_s: float = 0.0, length_s: float = 3600.0, scale: float = 1.0
) -> Iterator[TraceRequest]:
    """Requests of all clients from `begin_s` of their day on; `scale` times their rates."""
    streams = (
        _stream(client, Rng(seed * 2**20 + number), begin_s, length_s, scale) for number, client in enumerate(clients)
    )
    return merge(*streams, key=lambda request: request.arrival_s)


def mean_rate(clients: list[Client], begin_s: float, length_s: float) -> float:
    total = 0.0
    for client in clients:
        for window, end_s in _spans(client):
            total += window.rate * max(0.0, min(end_s, begin_s + length_s) - max(window.begin_s, begin_s))
    return total / length_s


def _spans(client: Client) -> Iterator[tuple[Window, float]]:
    windows = client.windows
    width_s = windows[1].begin_s - windows[0].begin_s if len(windows) > 1 else 600.0
    for number, window in enumerate(windows):
        yield window, windows[number + 1].begin_s if number + 1 < len(windows) else window.begin_s + width_s


def _stream(client: Client, rng: Rng, begin_s: float, length_s: float, scale: float) -> Iterator[TraceRequest]:
    starts = [start for start, _, _ in client.lengths]
    for window, end_s in _spans(client):
        end_s = min(end_s, begin_s + length_s)
        if window.rate <= 0 or end_s <= begin_s:
            continue
        at_s = max(window.begin_s, begin_s)
        while (at_s := at_s + _gap_s(window, window.rate * scale, rng)) < end_s:
            _, prompts, answers = client.lengths[max(0, bisect_right(starts, at_s) - 1)]
            yield TraceRequest(at_s - begin_s, prompts.draw(rng), answers.draw(rng), tenant=client.name)


def _gap_s(window: Window, rate: float, rng: Rng) -> float:
    shape = window.shape
    if window.pattern == "Gamma":
        return rng.gamma(shape) / (shape * rate)
    return rng.weibull(shape) / (gamma(1.0 + 1.0 / shape) * rate)
