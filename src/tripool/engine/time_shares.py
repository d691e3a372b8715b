"""Time shares of tenants: keeps steps short while tenants compete, by limiting those above their share. Pure.

A first token waits for the step under way, and then for its own, and each takes as long as all that it computes. A
tenant is *heavy* while more than its share of the time goes into its rows and prompts, and another was active lately:

| the next step | computes of heavy tenants |
|---|---|
| computes a prompt of another tenant | nothing, but never in two consecutive steps |
| does not | rows and prompts alternately: `_PART` of the time that others' first tokens take |

Grammars with slow masks alternate too, whatever their tenants, so that no step lasts much longer for them.

A tenant alone is never heavy, nor are two with equal use. Where more rows hardly make a step longer, as on a GPU, this
changes nothing. It decides only which rows have to wait for another step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp

from tripool.decode import StepFacts, StepTime
from tripool.prefill.scheduler import MASKS_S, NO_LIMITS, StepLimits
from tripool.sequence import Seq, Task

_FADE_S = 0.25
"""Time constant over which the use of each tenant is counted."""
_LATELY_S = 5.0
_MORE = 1.2
"""In shares: where all use the same, none is heavy by chance."""
_PART = 0.5
"""Longest step of heavy tenants, in the time that others' first tokens take."""
_RATE = 0.1
_FIRST_PROMPT_TOKENS = 32
_LEAST_PROMPT_TOKENS = 12
_LEAST_ROWS = 3
"""Fewer are not worth the fixed cost of a step."""
_MANY_TOKENS, _MANY_ROWS = 64, 8
_ROW_TOKENS = 4.0
"""Cost of a row in prompt tokens, before it is learned."""


@dataclass(slots=True)
class _Tenant:
    weight: float
    seen_s: float
    used_s: float = 0.0
    """Decayed: divided by `_FADE_S` it is the share of the time that its work took."""


class TimeShares:
    def __init__(self, times: StepTime) -> None:
        self._times = times
        self._tenants: dict[str, _Tenant] = {}
        self._now_s = 0.0
        self._first_s = 0.0
        """Duration of steps with a first token of another tenant."""
        self._stood_still = False
        """Whether the last step computed nothing of heavy tenants."""
        self._had_rows = False
        """Whether their last step had rows, not prompts."""
        self._prompt_token_s = self._row_s = 0.0
        """Means over large steps: above the marginal cost, but never 0, as a fitted cost may be."""
        self._last_run: dict[int, int] = {}
        """By a sequence's order: the last step with its row."""
        self._num_steps = 0

    def settled(self, now_s: float, step_s: float, tasks: Sequence[Task], facts: StepFacts) -> None:
        """A step of `step_s` ended now. `facts`: those of its tasks."""
        fade = exp(-max(0.0, now_s - self._now_s) / _FADE_S)
        self._now_s = now_s
        for tenant in self._tenants.values():
            tenant.used_s *= fade
        masks_s: dict[str, float] = {}
        slos = {slo.tenant: slo for slo in [task.seq.request.slo for task in tasks]}
        for name, slo in slos.items():
            tenant = self._tenants.setdefault(name, _Tenant(slo.weight, now_s))
            tenant.seen_s, tenant.weight = now_s, slo.weight
        costs = dict.fromkeys(slos, 0.0)
        for task in tasks if len(slos) > 1 else ():  # a tenant alone has the whole step
            costs[task.seq.request.slo.tenant] += self._cost(task)
        for task in tasks:
            if task.seq.guide is not None and task.work.stop >= task.seq.prompt_len:
                name = task.seq.request.slo.tenant
                masks_s[name] = masks_s.get(name, 0.0) + task.seq.mask_s
        total, rest_s = sum(costs.values()), max(0.0, step_s - sum(masks_s.values()))
        part = min(1.0, _FADE_S / step_s) if step_s > 0 else 1.0
        for name, cost in costs.items():
            own_s = rest_s * cost / total if total else rest_s
            self._tenants[name].used_s += part * (own_s + masks_s.get(name, 0.0))
        if len(costs) == 1 and facts.prompt_tokens and any(task.work.stop == task.seq.prompt_len for task in tasks):
            self._first_s = _nearer(self._first_s, step_s)
        self._learn(step_s, facts.prompt_tokens, facts.rows + facts.drafts)
        for name in [name for name, tenant in self._tenants.items() if tenant.seen_s < now_s - _LATELY_S]:
            del self._tenants[name]

    def _learn(self, step_s: float, prompt: int, rows: int) -> None:
        if prompt >= _MANY_TOKENS:
            self._prompt_token_s = _nearer(self._prompt_token_s, step_s / (prompt + _ROW_TOKENS * rows))
        elif rows >= _MANY_ROWS and not prompt:
            self._row_s = _nearer(self._row_s, step_s / rows)

    def _cost(self, task: Task) -> float:
        times, work, count = self._times, task.work, len(task.work.tokens)
        if not (times.row_s > 0 and times.prompt_token_s > 0):
            return count * (_ROW_TOKENS if work.decode else 1.0)
        if work.decode:
            drafts = times.draft_s if task.draft is not None else 0.0
            return drafts + count * (times.row_s + times.context_token_s * work.stop)
        return count * (times.prompt_token_s + times.prompt_read_s * (work.start + work.stop) / 2)

    @property
    def active(self) -> bool:
        """Whether several tenants were active lately."""
        return len(self._tenants) > 1

    def heavy(self) -> frozenset[str]:
        if not self.active:
            return frozenset()
        per_weight = _MORE * _FADE_S / sum(tenant.weight for tenant in self._tenants.values())
        return frozenset(name for name, t in self._tenants.items() if t.used_s > per_weight * t.weight)

    def next(self, decoding: Sequence[Seq], prompts: Iterable[Seq]) -> StepLimits:
        """`prompts`: those running, and those that may start in this step."""
        tenants = self.heavy() if len(self._tenants) > 1 else None
        if not tenants:
            self._stood_still = False
            return NO_LIMITS
        prompts = list(prompts)
        own = [seq for seq in prompts if seq.request.slo.tenant in tenants]
        rows = [seq for seq in decoding if seq.request.slo.tenant in tenants]
        others_wait = any(seq.num_generated == 0 for seq in prompts if seq.request.slo.tenant not in tenants)
        self._stood_still = others_wait and not self._stood_still
        if self._stood_still:
            return StepLimits(tenants)
        times = self._times
        first_s = self._first_s or times.fixed_s + times.row_s + _FIRST_PROMPT_TOKENS * times.prompt_token_s
        room_s = _PART * first_s - times.fixed_s
        self._had_rows = bool(rows) and not (own and self._had_rows)
        if not self._had_rows:
            start = own[0].num_computed if own else 0
            token_s = (times.prompt_token_s or self._prompt_token_s) + times.prompt_read_s * start
            return StepLimits(tenants, prompt_tokens=_fit(room_s, token_s, _LEAST_PROMPT_TOKENS))
        context = sum(len(seq.tokens) for seq in rows) / len(rows)
        drafts = sum(seq.draft is not None for seq in rows) / len(rows)
        row_s = (times.row_s or self._row_s) + drafts * times.draft_s + context * times.context_token_s
        row_s += sum(seq.mask_s for seq in rows) / len(rows)
        return StepLimits(tenants, rows=_fit(room_s, row_s, _LEAST_ROWS))

    def left_out(self, turn: StepLimits, decoding: Sequence[Seq]) -> set[Seq]:
        """Rows of heavy tenants and slow grammars that have to wait for another step: those computed last."""
        masks_s = sum([seq.guide.mask_s for seq in decoding if seq.guide is not None])
        if not turn.tenants and masks_s <= MASKS_S:
            return set()
        self._num_steps += 1
        heavy = [seq for seq in decoding if turn.is_heavy(seq)]
        if len(heavy) > turn.rows:
            heavy.sort(key=self._ran_last)
        waiting = set(heavy[turn.rows :])
        if masks_s > MASKS_S:
            waiting |= self._slow([seq for seq in decoding if seq.mask_s and seq not in waiting])
        for seq in decoding:
            if seq not in waiting:
                self._last_run[seq.order] = self._num_steps
        if len(self._last_run) > 64 + 4 * len(decoding):
            live = {seq.order for seq in decoding}
            self._last_run = {order: step for order, step in self._last_run.items() if order in live}
        return waiting

    def _slow(self, guided: list[Seq]) -> set[Seq]:
        """The rows for whose masks the step has no time; never all."""
        guided.sort(key=self._ran_last)
        left_s = MASKS_S
        for position, seq in enumerate(guided):
            if left_s <= 0:
                return set(guided[position:])
            left_s -= seq.mask_s
        return set()

    def _ran_last(self, seq: Seq) -> int:
        return self._last_run.get(seq.order, 0)


def _fit(room_s: float, each_s: float, least: int) -> int:
    return max(least, int(room_s / each_s)) if each_s > 0 else least


def _nearer(mean: float, value: float) -> float:
    return mean + _RATE * (value - mean) if mean else value
