"""The work that both sides do and how it is timed: batches of equal requests, and requests that arrive at random times.

Knows neither engine. A side gives a function that answers a batch, or stamps the tokens of each request (`Stamps`).
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT_TOKENS, ANSWER_TOKENS = 256, 256
AGREE = 0.02
"""Repetitions end when two that follow each other differ by less."""
PROFILED = (1, 64, 256, 512)
"""Batch sizes of our profiles."""
LOADS = (0.6, 0.8, 0.95)
"""Of vLLM's closed-loop rate."""
PROMPTS, ANSWERS = (128, 4096), (32, 512)
"""Bounds of the mixed load's lengths, which are log-uniform."""
IN_FLIGHT = 256
"""Requests at once in the closed loop, and most at once on both sides of the mixed load."""
DRAIN_S = 30.0
"""How long the last requests of a load may take after the last arrival."""

Answers = list[list[int]]


@dataclass(frozen=True)
class Sizes:
    """Lengths of the mixed load and its duration."""

    prompts: tuple[int, int] = PROMPTS
    answers: tuple[int, int] = ANSWERS
    load_s: float = 60.0
    closed_s: float = 18.0
    in_flight: int = IN_FLIGHT

    @classmethod
    def of(cls, *, quick: bool, small: bool) -> Sizes:
        if small:
            return cls((8, 64), (4, 16), load_s=1.0, closed_s=1.0, in_flight=4)
        return cls(load_s=10.0, closed_s=9.0) if quick else cls()

    @property
    def warm_s(self) -> float:
        """A closed loop before the measured one: both sides still compile or capture what they have not met."""
        return self.closed_s / 3

    @property
    def context_tokens(self) -> int:
        return self.prompts[1] + self.answers[1]


@dataclass(frozen=True)
class Arrival:
    id: str
    at_s: float
    """After the load began."""
    prompt: list[int]
    num_tokens: int
    """Length of the answer."""


def batch_prompts(vocab: int, sequences: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    generator = random.Random(sequences)
    return [generator.choices(range(vocab), k=length) for _ in range(sequences)]


def endless(vocab: int, sizes: Sizes, seed: int) -> Iterator[Arrival]:
    """Requests without arrival times, for a closed loop."""
    generator, i = random.Random(seed), 0
    while True:
        prompt_len, num_tokens = (_log_uniform(generator, bounds) for bounds in (sizes.prompts, sizes.answers))
        yield Arrival(f"{seed}-{i}", 0.0, generator.choices(range(vocab), k=prompt_len), num_tokens)
        i += 1


def poisson(vocab: int, sizes: Sizes, rate: float, seed: int) -> list[Arrival]:
    """The arrivals of one load: the same ones on both sides."""
    gaps, now_s, arrivals = random.Random(f"gaps {seed}"), 0.0, []
    for request in endless(vocab, sizes, seed):
        now_s += gaps.expovariate(rate)
        if now_s > sizes.load_s:
            break
        arrivals.append(Arrival(request.id, now_s, request.prompt, request.num_tokens))
    return arrivals


def _log_uniform(generator: random.Random, bounds: tuple[int, int]) -> int:
    return round(math.exp(generator.uniform(*map(math.log, bounds))))


@dataclass
class Stamps:
    """When each request's tokens came, in seconds after the load began."""

    first_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)

    def tokens(self, request_id: str, now_s: float, count: int = 1) -> None:
        self.first_s.setdefault(request_id, now_s)
        self.last_s[request_id] = now_s
        self.num_tokens[request_id] = self.num_tokens.get(request_id, 0) + count

    def closed_row(self, complete: Sequence[str], sizes: Sizes) -> dict[str, Any]:
        """Requests per second, once the first third of the time has filled the batch."""
        from_s = sizes.closed_s / 3
        ended = [self.last_s[name] for name in complete]
        count = sum(from_s <= at_s <= sizes.closed_s for at_s in ended)
        return {"work": "closed", "rate": count / (sizes.closed_s - from_s), "requests": len(complete)}

    def open_row(self, arrivals: Sequence[Arrival], load: float, rate: float) -> dict[str, Any]:
        """Percentiles over all requests that arrived; one without an end counts as infinitely slow."""
        firsts, gaps, unfinished = [], [], 0
        for arrival in arrivals:
            name, complete = arrival.id, self.num_tokens.get(arrival.id, 0) >= arrival.num_tokens
            unfinished += not complete
            firsts.append(self.first_s[name] - arrival.at_s if name in self.first_s else math.inf)
            span_s = self.last_s[name] - self.first_s[name] if complete else math.inf
            gaps.append(span_s / (arrival.num_tokens - 1))
        row: dict[str, Any] = {"work": f"load {load:.0%}", "load": load, "rate": rate, "requests": len(arrivals)}
        return row | latencies(firsts, gaps) | {"unfinished": unfinished}


def latencies(firsts_s: Sequence[float], gaps_s: Sequence[float]) -> dict[str, float | None]:
    """Percentiles of the time to the first token and of each answer's mean time per token after it."""
    row: dict[str, float | None] = {}
    for label, values in (("ttft", firsts_s), ("tpot", gaps_s)):
        for share in (0.5, 0.99):
            value = percentile(values, share)
            row[f"{label}_p{share * 100:.0f}_ms"] = value * 1e3 if math.isfinite(value) else None
    return row


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.inf


def repeated_s(run: Callable[[], object], most: int) -> tuple[list[float], bool]:
    """Seconds of each call, and whether the last two agree."""
    spans: list[float] = []
    while len(spans) < most:
        began_s = time.perf_counter()
        run()
        spans.append(time.perf_counter() - began_s)
        if len(spans) > 1 and abs(spans[-1] / spans[-2] - 1) < AGREE:
            return spans, True
    return spans, False


def batch_row(
    answer: Callable[[list[list[int]], int], Answers], vocab: int, sequences: int, *, small: bool, most: int
) -> dict[str, Any]:
    """Time a batch of equal requests: whole, and with one token each, which gives the time per step."""
    prompt_len, count = (16, 24) if small else (PROMPT_TOKENS, ANSWER_TOKENS)
    prompts = batch_prompts(vocab, sequences, prompt_len)
    began_s = time.perf_counter()
    answers = answer(prompts, count)
    warm_s = time.perf_counter() - began_s
    assert [len(tokens) for tokens in answers] == [count] * sequences
    wholes, agreed = repeated_s(lambda: answer(prompts, count), most)
    answer(prompts, 1)
    firsts, _ = repeated_s(lambda: answer(prompts, 1), 2 * most)
    whole_s, first_s = min(wholes), min(firsts)
    return {
        "work": f"x{sequences}", "sequences": sequences, "tok_s": sequences * count / whole_s,
        "first_ms": first_s * 1e3, "step_ms": (whole_s - first_s) / (count - 1) * 1e3, "whole_s": wholes,
        "firsts_s": firsts, "agreed": agreed, "warm_s": warm_s, "distinct_last": len({a[-1] for a in answers}),
    }  # fmt: skip


class Report:
    """Rows of one side's process: written after each one, so that a process that is stopped loses one row only."""

    def __init__(self, file: Path | None, **common: Any) -> None:
        self._file, self._common, self.rows = file, common, list[dict[str, Any]]()

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(self._common | row | {"measured_s": time.time()})
        plain = {name: value for name, value in row.items() if isinstance(value, (str, int, float))}
        texts = [f"{name} {value:.4g}" if type(value) is float else f"{name} {value}" for name, value in plain.items()]
        print(f"{' '.join(map(str, self._common.values()))}: {', '.join(texts)}", flush=True)
        if self._file:
            self._file.write_text(json.dumps(self.rows, indent=1) + "\n")
