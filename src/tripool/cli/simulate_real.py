"""`tripool simulate --compare-real`: the same requests on this machine's own server and in simulation, side by side.

The server is `tripool serve` of the bundled model, over HTTP. Its step times are measured first, on other requests:
prompts alone, and batches of several sizes. Then the trace is replayed, scaled to what the machine can bear, and
simulated with the real admission control and scheduler on those step times.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tripool.bench.endpoint import BodyMaker, find_model, make_prompts
from tripool.bench.prompts import Piece, TokenPrompts
from tripool.bench.run import Run
from tripool.bench.samples import Sample
from tripool.bench.wire import Address, CannotConnect, HttpClient
from tripool.bench.workload import Shot, at_times, poisson_arrivals, trace_shots
from tripool.cli.files import write_file
from tripool.cli.simulate import Asked
from tripool.cli.simulate_trace import trace_options
from tripool.cli.trace_files import read_trace
from tripool.config import EngineConfig, SchedulerConfig
from tripool.core import BLOCK_TOKENS, Request, SamplingParams
from tripool.decode import StepFacts
from tripool.errors import InvalidRequest
from tripool.simulate.request_table import Arrival, RequestTable
from tripool.simulate.rng import Rng
from tripool.simulate.supernode.colocated import simulate_colocated
from tripool.simulate.supernode.measures import tpot_s, ttft_s

_MODEL = "tiny"
_START_WITHIN_S = 120.0
_PROMPTS = (16, 128, 384)
_BATCHES = (1, 2, 4, 8, 16)
_LONG = 320
_ANSWER, _SHORT = 48, 16
_ROUNDS = 5
_ARRIVALS = 12
_REQUESTS = 150
_INPUT, _OUTPUT = 96.0, 48.0
_LOAD = 0.5
"""Load as a share of the machine's maximum."""
_CONTEXT = 2048
_KV_BLOCKS = 8 * _CONTEXT // BLOCK_TOKENS
_BARS = (("output tokens per second", "tokens/s", 0.10), ("TTFT p50", "ms", 0.20), ("TPOT p50", "ms", 0.20))


Shooter = Callable[[list[Shot], int], Awaitable[list[Sample]]]
"""Sends requests, so many at once, and measures them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of this machine's engine, as its clients see them."""

    batches: tuple[tuple[int, float], ...]
    """Seconds of a step by rows, at short contexts; accepted drafts make it shorter."""
    context_token_s: float
    prompt_token_s: float
    later_token_s: float
    """Per prompt token, work left for the next step: drafts are made after the tokens are sent."""
    request_s: float
    """Delay of a step by an arriving request: parsing, answering and the client run on the same cores."""
    first_s: float
    """Time to a first token without any prompt."""

    @property
    def around_s(self) -> float:
        """The part of it outside of steps."""
        return max(0.0, self.first_s - self.batches[0][1] - self.request_s)

    def mean(self, other: Measured) -> Measured:
        batches = (
            (size, (mine + theirs) / 2) for (size, mine), (_, theirs) in zip(self.batches, other.batches, strict=True)
        )
        names = ("context_token_s", "prompt_token_s", "later_token_s", "request_s", "first_s")
        return Measured(tuple(batches), *((getattr(self, name) + getattr(other, name)) / 2 for name in names))

    def rows_s(self, rows: float) -> float:
        """Linear between two measured batches, and extrapolated beyond the last."""
        sizes = [size for size, _ in self.batches]
        at = min(max(1, bisect_right(sizes, rows)), len(sizes) - 1)
        (low, low_s), (high, high_s) = self.batches[at - 1], self.batches[at]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)

    def step_s(self, facts: StepFacts, before: StepFacts, newcomers: int) -> float:
        rows = max(1, facts.rows)
        short = _PROMPTS[0] + _ANSWER / 2
        more = max(0.0, facts.context_tokens - facts.rows * short)
        prompts_s = facts.prompt_tokens * self.prompt_token_s + before.prompt_tokens * self.later_token_s
        step_s = self.rows_s(rows) + more * self.context_token_s + prompts_s + newcomers * self.request_s
        return max(1e-6, step_s)


class _Server:
    """A child process, from its first response until it is closed."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "tripool", "serve", _MODEL, "--port", str(self.port), "--open"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def compare_with_real(asked: Asked, json_file: Path | None) -> bool:
    """Whether all differences are within their bounds."""
    console = Console()
    server = _Server()
    try:
        measured, shots, samples, ids = asyncio.run(_measure(server, asked))
    finally:
        server.close()
    config = SchedulerConfig(num_blocks=_KV_BLOCKS, max_running=EngineConfig().max_running)
    arrivals = [_arrival(shot, each) for shot, each in zip(shots, ids, strict=True)]
    table = simulate_colocated(arrivals, config, measured.step_s, measured.around_s, _CONTEXT)
    rows = _rows(_numbers(samples), _simulated(table))
    _show(console, measured, rows, len(shots))
    write_file(json_file, json.dumps({"rows": rows}, indent=1) + "\n")
    return all(bool(row["ok"]) for row in rows)


def _arrival(shot: Shot, prompt_ids: list[int]) -> Arrival:
    params = SamplingParams(max_tokens=shot.output_tokens, ignore_eos=True)
    return Arrival(shot.due_s or 0.0, Request(id=str(shot.index), prompt_ids=tuple(prompt_ids), params=params, seed=0))


async def _measure(server: _Server, asked: Asked) -> tuple[Measured, list[Shot], list[Sample], list[list[int]]]:
    address = Address.parse(f"http://127.0.0.1:{server.port}")
    client = HttpClient(address)
    try:
        model = await _when_ready(server, client, address)
        prompts = await make_prompts(client, "completions", model, asked.seed or 0)
        assert isinstance(prompts, TokenPrompts)
        bodies = BodyMaker("completions", model, prompts, asked.seed or 0, ignore_eos=True)

        async def shoot(shots: list[Shot], concurrency: int | None = None) -> list[Sample]:
            found = await Run(client, bodies, timeout_s=120.0).go(shots, concurrency=concurrency)
            bad = next((sample for sample in found.samples if not sample.ok), None)
            if bad is not None:
                raise InvalidRequest(f"the server failed: {bad.error}: {bad.detail}", hint="try `tripool doctor`")
            return sorted(found.samples, key=lambda sample: sample.index)

        before = await _calibrate(shoot, "before")
        shots = _scaled(asked, before)
        samples = await shoot(shots)
        # Again: a machine's speed drifts, and the replay lies between the two.
        after = await _calibrate(shoot, "after")
        return before.mean(after), shots, samples, [prompts.ids(shot.pieces) for shot in shots]
    finally:
        client.close()


async def _when_ready(server: _Server, client: HttpClient, address: Address) -> str:
    deadline_s = time.monotonic() + _START_WITHIN_S
    while True:
        try:
            return await find_model(client, address, None)
        except CannotConnect:
            if server.ended() or time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(0.2)


async def _calibrate(shoot: Shooter, when: str) -> Measured:
    """On prompts that are not used at any other time."""
    await shoot(_alike(f"{when} warm", 16, _PROMPTS[-1], 8), 16)
    firsts: dict[int, list[float]] = {size: [] for size in _PROMPTS}
    rests: dict[int, list[float]] = {size: [] for size in _PROMPTS}
    for number in range(_ROUNDS):
        for size in _PROMPTS:
            (sample,) = await shoot(_alike(f"{when} alone {number}", 1, size, _SHORT), 1)
            firsts[size].append(sample.ttft_s or 0.0)
            rests[size].append(sum(sample.gaps_s()))
    alone, after = ([median(found[size]) for size in _PROMPTS] for found in (firsts, rests))
    more = _PROMPTS[-1] - _PROMPTS[0]
    prompt_token_s, later_token_s = (max(0.0, (found[-1] - found[0]) / more) for found in (alone, after))
    batches = []
    for size in _BATCHES:
        batches.append((size, await _pace_s(shoot, when, size, _PROMPTS[0])))
    long_s = await _pace_s(shoot, when, 8, _LONG)
    short_s = dict(batches)[8]
    context_token_s = max(0.0, (long_s - short_s) / (8 * (_LONG - _PROMPTS[0])))
    first_s = alone[0] - _PROMPTS[0] * prompt_token_s
    request_s = await _disturbance_s(shoot, when) - _PROMPTS[0] * (prompt_token_s + later_token_s)
    return Measured(
        tuple(batches), context_token_s, prompt_token_s, later_token_s, max(0.0, min(request_s, first_s)), first_s
    )


async def _disturbance_s(shoot: Shooter, when: str) -> float:
    """Delay of one answer by each short request that arrives meanwhile."""
    found = []
    for number in range(_ROUNDS):
        (alone,) = await shoot(_alike(f"{when} undisturbed {number}", 1, _PROMPTS[0], _LONG), 1)
        pending_requests = _alike(f"{when} arrival {number}", _ARRIVALS, _PROMPTS[0], 1)
        (disturbed,), _ = await asyncio.gather(
            shoot(_alike(f"{when} disturbed {number}", 1, _PROMPTS[0], _LONG), 1), shoot(pending_requests, 1)
        )
        found.append((sum(disturbed.gaps_s()) - sum(alone.gaps_s())) / _ARRIVALS)
    return median(found)


async def _pace_s(shoot: Shooter, when: str, batch: int, prompt: int) -> float:
    """Time per token with so many answers at once. Excludes the time when only the last of them is left."""
    tpots = []
    for number in range(_ROUNDS):
        samples = await shoot(_alike(f"{when} pace {batch} {prompt} {number}", batch, prompt, _ANSWER), batch)
        began_s = max(sample.events_s[0] for sample in samples)
        for sample in samples:
            later = [at_s for at_s in sample.events_s if at_s >= began_s]
            share = (sample.tokens - 1) / max(1, len(sample.events_s) - 1)
            if len(later) > 1:
                tpots.append((later[-1] - later[0]) / ((len(later) - 1) * share))
    return median(tpots)


def _alike(name: str, count: int, prompt: int, answer: int) -> list[Shot]:
    return [Shot(index, None, (Piece(f"{name} {prompt} {index}", prompt),), answer) for index in range(count)]


def _scaled(asked: Asked, measured: Measured) -> list[Shot]:
    """The trace's first requests, with lengths and rate that this machine can bear; or synthetic ones."""
    work_s = _INPUT * measured.prompt_token_s + _OUTPUT * measured.rows_s(8) / 8 + measured.batches[0][1]
    rate = _LOAD / work_s
    if asked.trace is None:
        rng = Rng(asked.seed or 0)
        shots = []
        for index in range(asked.max_requests or _REQUESTS):
            prompt = min(_PROMPTS[-1], max(4, round(rng.lognormal(_INPUT, 0.5))))
            answer = min(4 * _ANSWER, max(4, round(rng.lognormal(_OUTPUT, 0.5))))
            shots.append(Shot(index, None, (Piece(f"synthetic {index}", prompt),), answer))
        return at_times(shots, poisson_arrivals(len(shots), rate=rate, seed=asked.seed or 0))
    options = replace(trace_options(asked), max_requests=asked.max_requests or _REQUESTS)
    requests = list(read_trace(asked.trace, options).requests())
    mean = sum(request.input_tokens + request.output_tokens for request in requests) / len(requests)
    scaled = trace_shots(requests, scale_tokens=(_INPUT + _OUTPUT) / mean)
    span_s = max(1e-9, requests[-1].arrival_s)
    speed = len(scaled) / rate / span_s
    return [_bounded(replace(shot, due_s=(shot.due_s or 0.0) * speed)) for shot in scaled]


def _bounded(shot: Shot) -> Shot:
    """A prompt beyond what was measured is cut: the comparison is of queues and batches, not of extrapolation."""
    pieces, left = [], 2 * _PROMPTS[-1]
    for piece in shot.pieces:
        if left > 0:
            pieces.append(replace(piece, num_tokens=min(piece.num_tokens, left)))
            left -= piece.num_tokens
    return replace(shot, pieces=tuple(pieces), output_tokens=min(shot.output_tokens, 8 * _ANSWER))


def _numbers(samples: Sequence[Sample]) -> tuple[float, float, float]:
    span_s = max(sample.end_s for sample in samples) - min(sample.sent_s for sample in samples)
    firsts = [sample.ttft_s for sample in samples if sample.ttft_s is not None]
    tpots = [sample.tpot_s for sample in samples if sample.tpot_s is not None]
    return sum(sample.tokens for sample in samples) / span_s, 1e3 * median(firsts), 1e3 * median(tpots)


def _simulated(table: RequestTable) -> tuple[float, float, float]:
    done = table.done
    span_s = max(table.last_s[number] for number in done) - min(table.arrived_s[number] for number in done)
    firsts = [ttft_s(table, number) for number in done]
    tpots = [tpot_s(table, number) for number in done if table.output_tokens[number] > 1]
    tokens = sum(table.output_tokens[number] for number in done)
    return tokens / span_s, 1e3 * median(firsts), 1e3 * median(tpots)


def _rows(real: Sequence[float], simulated: Sequence[float]) -> list[dict[str, float | str | bool]]:
    rows: list[dict[str, float | str | bool]] = []
    for (name, unit, bar), one, other in zip(_BARS, real, simulated, strict=True):
        off = (other - one) / one
        rows.append(
            {"name": name, "unit": unit, "real": one, "simulated": other, "difference": off, "bar": bar,
             "ok": abs(off) <= bar}
        )  # fmt: skip
    return rows


def _show(console: Console, measured: Measured, rows: list[dict[str, float | str | bool]], count: int) -> None:
    steps = ", ".join(f"{1e3 * seconds:.2f} ms with {size}" for size, seconds in measured.batches)
    summary = (
        f"measured: a token takes {steps} at once; a prompt token {1e6 * measured.prompt_token_s:.0f} us, and "
        f"{1e6 * measured.later_token_s:.0f} us of the next step; a request's arrival "
        f"{1e3 * measured.request_s:.1f} ms, and {1e3 * measured.around_s:.1f} ms around a first token"
    )
    console.print(summary, soft_wrap=True)
    table = Table("", "real", "simulated", "difference", "bound", title=f"{count} requests over HTTP and in simulation")
    for row in rows:
        mark = "[green]✓[/]" if row["ok"] else "[red]✗[/]"
        table.add_row(f"{mark} {row['name']}, {row['unit']}", f"{row['real']:,.2f}", f"{row['simulated']:,.2f}",
                      f"{row['difference']:+.1%}", f"{row['bar']:.0%}")  # fmt: skip
    console.print(table)
