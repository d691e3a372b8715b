"""How many workers the present load needs, pool by pool: loads over what one worker was measured to bear. Pure.

| pool | load | what one worker bears |
|---|---|---|
| prefill | uncached tokens per second | the rate at which a step still begins and ends within the TTFT objective |
| decode | contexts | the ceiling that its SLO controller learned, or its slots |
| decode | share of KV memory held | all of it |
| cache | blocks read lately, and what is computed again because it was evicted | all its blocks |

Beside the tokens per second stand their bursts: what arrives within a TTFT objective varies.

Contexts that wait for a decode worker say that there are too few, not how many are needed: each hour of waiting adds to
them. Then the load is arrivals times how long one runs, and as much of what waits as is to be worked off.

A worker's first samples do not count: its caches are cold and its SLO controller trusts no batch that it has not seen.
A report without requests counts: no traffic is data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, exp, sqrt

from tripool.control.scaling import Load, Pool, Worker

_SPREAD_S = 600.0
"""Over which bursts are remembered."""
_CEILING_S = 120.0
_FLOW_S = 60.0
"""Over which arrivals and departures are counted."""
_MOST_RATIO = 3.0
"""Of arrivals over departures: more is believed when it lasts."""
_WORK_OFF_S = 300.0
"""In which contexts that wait are to be worked off."""
_STEPS = 1.5
"""A prompt waits for half a step on average, then is computed in one."""
_FULL = 0.9
"""Share of KV memory that is used before answers preempt each other."""
_FEW = 0.25
"""Share of a worker's slots below which its ceiling is not trusted to be its last word."""


class Demand:
    """`ttft_s`: the objective; `first_samples_s`: how long a worker's own reports do not count."""

    def __init__(self, ttft_s: float, first_samples_s: float) -> None:
        self._ttft_s, self._first_samples_s = ttft_s, first_samples_s
        self._window = max(1, ceil(ttft_s))
        """Seconds whose tokens count together as a burst."""
        self._rest: list[float] = []
        """Seconds that fill no window yet."""
        self.tokens_per_s = 0.0
        """Of the last report."""
        self._burst_variance = 0.0
        """Of the tokens of a window."""
        self.worker_tokens_per_s: float | None = None
        """Of one prefill worker, at the TTFT objective."""
        self.worker_contexts: float | None = None
        """Of one decode worker, within the TPOT objectives."""
        self.lost_tokens_per_s = self.wasted = 0.0
        """What is computed again because it was evicted: tokens, and the prefill workers that they need."""
        self.workers: dict[Pool, float] = {"prefill": 0.0, "decode": 0.0, "cache": 0.0}
        """What the load of the last report needs, in workers."""
        self.burst = 0.0
        """Prefill workers that one standard deviation of what arrives within a TTFT objective needs beside."""
        self._begun = self._ended = self._run_s = self._span_s = 0.0
        """Lately: contexts that began and that ended, how long all together ran, and in how much time."""
        self.bound: dict[Pool, str] = {"prefill": "", "decode": "", "cache": ""}
        """By which measure."""
        self._last_s: float | None = None

    def observe(self, load: Load, workers: Sequence[Worker]) -> None:
        passed_s = float(len(load.prompt_tokens) or 1) if self._last_s is None else load.now_s - self._last_s
        assert passed_s > 0.0, "time stands still"
        self._last_s = load.now_s
        self._arrivals(load.prompt_tokens, passed_s)
        if load.prompt_cost_s is not None:
            self.worker_tokens_per_s = rate_within(load.prompt_cost_s, self._ttft_s)
        self.lost_tokens_per_s = _nearer(self.lost_tokens_per_s, load.lost_hit_tokens / passed_s, passed_s, _SPREAD_S)
        ready = [worker for worker in workers if worker.stage == "ready"]
        decode = [worker for worker in ready if worker.pool == "decode"]
        running, keep = sum(worker.contexts for worker in decode), exp(-passed_s / _FLOW_S)
        self._begun = self._begun * keep + load.first_tokens
        self._ended = self._ended * keep + load.answers
        self._run_s = self._run_s * keep + running * passed_s
        self._span_s = self._span_s * keep + passed_s
        self._ceilings(decode, load.now_s, passed_s)
        self._count(load, ready)

    def _arrivals(self, tokens: Sequence[float], passed_s: float) -> None:
        self.tokens_per_s = sum(tokens) / passed_s
        seconds, size = [*self._rest, *tokens], self._window
        mean = sum(seconds) / max(1, len(seconds)) * size
        for begin in range(0, len(seconds) - size + 1, size):
            off = sum(seconds[begin : begin + size]) - mean
            self._burst_variance = _nearer(self._burst_variance, off * off, size, _SPREAD_S)
        self._rest = seconds[len(seconds) - len(seconds) % size :]

    def _ceilings(self, workers: Iterable[Worker], now_s: float, passed_s: float) -> None:
        """What one bears: the mean over those that have seen enough."""
        known = [
            float(min(worker.slots, worker.ceiling))
            for worker in workers
            if worker.ceiling is not None
            and now_s - worker.since_s >= self._first_samples_s
            and (worker.contexts >= _FEW * worker.slots or worker.ceiling >= worker.slots)
        ]
        if known:
            mean = sum(known) / len(known)
            before = self.worker_contexts
            self.worker_contexts = mean if before is None else _nearer(before, mean, passed_s, _CEILING_S)

    def _count(self, load: Load, ready: Sequence[Worker]) -> None:
        rate = self.worker_tokens_per_s
        if rate is not None:
            self.burst = sqrt(self._burst_variance) / self._window / rate
            self.workers["prefill"] = self.tokens_per_s / rate
            self.bound["prefill"] = f"{self.tokens_per_s:.0f} tokens/s over {rate:.0f} per worker"
        decode = [worker for worker in ready if worker.pool == "decode"]
        running = sum(worker.contexts for worker in decode)
        slots = max((worker.slots for worker in decode), default=0)
        bears = min(self.worker_contexts or slots, slots) if slots else self.worker_contexts
        contexts = self._contexts(running, load.waiting_contexts)
        if bears:
            self.workers["decode"] = contexts / bears
            self.bound["decode"] = f"{contexts:.0f} contexts over {bears:.0f} per worker"
        held = sum(worker.memory for worker in decode) / _FULL * (contexts / running if running else 1.0)
        if held > self.workers["decode"]:
            self.workers["decode"] = held
            self.bound["decode"] = f"the KV of {contexts:.0f} contexts fills {held:.2f} workers"
        members = [worker for worker in ready if worker.pool == "cache"]
        wasted = self.lost_tokens_per_s / rate if rate else 0.0
        self.wasted = wasted
        self.workers["cache"] = sum(worker.memory for worker in members)
        self.bound["cache"] = f"{self.lost_tokens_per_s:.0f} tokens/s of evicted hits: {wasted:.2f} prefill workers"

    def _contexts(self, running: int, waiting: int) -> float:
        """That would run if there were workers enough: arrivals times how long each runs."""
        if not waiting or self._ended < 1.0 or not self._run_s:
            return running + waiting
        answer_s = self._run_s / self._ended
        offered = min(self._begun, _MOST_RATIO * self._ended) * answer_s / self._span_s
        return min(running + waiting, max(running, offered) + waiting * min(1.0, answer_s / _WORK_OFF_S))

    def check(self) -> None:
        assert all(value >= 0.0 for value in self.workers.values())
        assert self._burst_variance >= 0.0 and len(self._rest) < self._window
        assert self.worker_contexts is None or self.worker_contexts > 0.0
        assert self.worker_tokens_per_s is None or self.worker_tokens_per_s > 0.0


def rate_within(cost_s: tuple[float, float], ttft_s: float) -> float:
    """Tokens per second of a prefill worker whose steps take `cost_s` (of a step, per token) when every step takes
    what arrived during the one before, and a prompt's wait and step last as long as the objective.

    Where not even an empty step does, nothing helps: then the rate of an endless one."""
    step_s, token_s = cost_s
    assert step_s >= 0.0 and token_s > 0.0
    share = 1.0 - _STEPS * step_s / ttft_s
    return max(share, 0.05) / token_s


def _nearer(mean: float, value: float, passed_s: float, over_s: float) -> float:
    return mean + (1.0 - exp(-passed_s / over_s)) * (value - mean)
