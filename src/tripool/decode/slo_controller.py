"""SLO controller: bounds the running batch and the prompt tokens of a step by the requests' TPOT objectives. Pure.

An objective is on the mean time per token of one answer after its first. Each answer has an account: the objective for
the tokens it has, less the time they took. A positive account may be spent on prompts of others.

| question | answer |
|---|---|
| `slots`: how many waiting sequences may start | as many as keep the steady step within the strictest pace |
| `prompt_tokens`: how many may the next step compute | what the answer with the lowest account allows |

The strictest pace is that of any class that runs, waits or ended a moment ago: making room for it again would take
about as long as an answer. Nothing is preempted for an objective, and no wait for one is unbounded: the head of the
queue starts after `_PATIENCE_S`, prompts that stood still get a small chunk, and an answer that could not keep its
objective even alone runs as it comes, and is counted.

The time is the one given to `settled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log2

from tripool.core import Request
from tripool.decode.step_time import StepFacts, StepTime
from tripool.sequence import Seq

_MARGINS = (0.02, 0.4)
"""Least and most share of an objective kept in reserve, besides the usual error of predictions."""
_MISSED, _KEPT = 0.04, 0.0002
"""What a late answer adds to its class's margin, and what another takes from it: stable where one in two hundred is
late."""
_CLOSE = 0.99
"""An answer that used this share of its objective counts as late: clients measure with their own clocks."""
_FLOOR = 0.7
"""An answer that is behind requires no faster pace than this share of its objective: others wait meanwhile."""
_RECOVERY_TOKENS = 16
_RESERVE = 2.0
"""Kept in an account for the next slow step, in tokens."""
_FIRST_ROWS = 4
_FIRST_CHUNK = 64
_REACH = 2
"""The learned line is trusted up to this factor beyond the largest step seen, and at first up to the two above."""
_LEAST_CHUNK = 16
"""Fewer prompt tokens than this are not worth their share of a step."""
_PATIENT_STEPS = 16
"""Longest that prompts stand still, in steps."""
_PATIENCE_S = 5.0
"""Longest that an objective delays the head of the queue; the head's own TTFT objective may be shorter."""
_RATE = 0.05
"""Weight of one more answer in the running means."""
_IDLE_LEARNING = 16
"""Without an objective, every so many-th step is learned from: enough to know the machine when one comes."""


@dataclass(slots=True)
class _Account:
    """One answer with an objective."""

    tpot_s: float
    max_tokens: int
    num_tokens: int
    """As of its last step."""
    first_s: float | None = None
    """Time of its first token, or of the first one computed here."""
    num_before: int = 0
    """Tokens that it had then."""
    given_up: bool = False

    def slack_s(self, now_s: float) -> float:
        if self.first_s is None:
            return 0.0
        return self.tpot_s * (self.num_tokens - self.num_before) - (now_s - self.first_s)


@dataclass(slots=True)
class _Head:
    """The sequence that is held back at the head of the queue."""

    name: tuple[str, int]
    since_s: float
    insisted: bool = False


class SloController:
    def __init__(self) -> None:
        self.step_time = StepTime()
        self._accounts: dict[int, _Account] = {}
        """By a sequence's order, from when it joins until it leaves."""
        self._classes: Counter[float] = Counter()
        """Their objectives, in seconds per token."""
        self._recent: dict[float, float] = {}
        """Classes without an open answer, and until when they count."""
        self._margins: dict[int, float] = {}
        """Learned from late answers, by rough class."""
        self._now_s = 0.0
        self._num_steps = 0
        self._tokens_per_row = 1.0
        self._drafts_per_row = 0.0
        self._mean_answer_tokens = 0.0
        self._mean_prompt_tokens = 0.0
        self._mean_answer_s = 0.0
        self._still_steps = 0
        self._head: _Head | None = None
        self.computes_prompts = True
        """False: they arrive computed, from another process."""
        self.ceiling: int | None = None
        """Sequences like the present ones that may run at once; None: no objective is open."""
        self.held_back = False
        """Whether a sequence waits now only because of an objective."""
        self.predicted_s = 0.0
        """Of the last step."""
        self.num_given_up = 0
        """Objectives that could not be kept any more, or never could."""
        self.num_forced = 0
        """Sequences started and chunks computed against the objectives, because they had waited long enough."""

    @property
    def active(self) -> bool:
        return bool(self._accounts)

    # ---- facts ------------------------------------------------------------------------------------------------------

    def joined(self, seq: Seq) -> None:
        tpot_ms = seq.request.slo.tpot_ms
        if tpot_ms is not None:
            tpot_s = tpot_ms / 1000
            self._accounts[seq.order] = _Account(tpot_s, seq.max_new_tokens, seq.num_generated)
            self._classes[tpot_s] = self._classes.get(tpot_s, 0) + 1

    def left(self, seq: Seq) -> None:
        """Finished, cancelled or handed over."""
        if seq.finish in ("stop", "length"):
            prompt = seq.prompt_len - (seq.num_cached or 0) if self.computes_prompts else 0
            self._mean_prompt_tokens = _nearer(self._mean_prompt_tokens, prompt)
            self._mean_answer_tokens = _nearer(self._mean_answer_tokens, seq.num_generated)
        account = self._accounts.pop(seq.order, None)
        if account is None:
            return
        if account.first_s is not None:
            self._mean_answer_s = _nearer(self._mean_answer_s, self._now_s - account.first_s)
            self._learn_margin(account)
        count = self._classes[account.tpot_s] - 1
        if count:
            self._classes[account.tpot_s] = count
        else:
            self._classes.pop(account.tpot_s)
            self._recent[account.tpot_s] = self._now_s + self._mean_answer_s
        if not self._accounts:
            self.ceiling, self.held_back, self._head = None, False, None

    def settled(
        self, now_s: float, step_s: float, facts: StepFacts, accepted: int, seqs: Iterable[Seq], *, learn: bool = False
    ) -> None:
        """A step of `seqs` ended now. `step_s`: since the last one ended, if there was work all the time.

        `learn`: learn step times also without an objective.
        """
        self._now_s = now_s
        self._num_steps += 1
        if not self._accounts and not learn and self._num_steps % _IDLE_LEARNING:
            return
        self.predicted_s = self.step_time.learn(facts, step_s)
        if facts.rows:
            self._tokens_per_row += _RATE * (1 + accepted / facts.rows - self._tokens_per_row)
            self._drafts_per_row += _RATE * (facts.drafts / facts.rows - self._drafts_per_row)
        if self._recent:
            self._recent = {tpot_s: until_s for tpot_s, until_s in self._recent.items() if until_s > now_s}
        for seq in seqs:
            account = self._accounts.get(seq.order)
            if account is not None:
                self._update(account, seq, now_s, step_s)

    def _learn_margin(self, account: _Account) -> None:
        num_tokens = account.num_tokens - account.num_before
        if num_tokens > 0 and not account.given_up:
            late = account.slack_s(self._now_s) < (1 - _CLOSE) * account.tpot_s * num_tokens
            rough, (low, high) = _rough(account.tpot_s), _MARGINS
            margin = self._margins.get(rough, low) + (_MISSED if late else -_KEPT)
            self._margins[rough] = min(high, max(low, margin))

    def _update(self, account: _Account, seq: Seq, now_s: float, step_s: float) -> None:
        generated = len(seq.tokens) - seq.prompt_len
        if account.first_s is None:
            if account.num_tokens:  # it began elsewhere
                account.first_s, account.num_before = now_s - step_s, account.num_tokens
            elif generated:
                account.first_s, account.num_before = now_s, generated
        account.num_tokens = generated
        if account.first_s is None or account.given_up or self.step_time.num_learned < _FIRST_ROWS:
            return
        alone_s = self.step_time.alone_s(len(seq.tokens))
        left = account.max_tokens - account.num_tokens
        if account.slack_s(now_s) + left * (account.tpot_s - alone_s / self._tokens_per_row) < 0:
            account.given_up = True
            self.num_given_up += 1

    # ---- decisions --------------------------------------------------------------------------------------------------

    def slots(self, running: Sequence[Seq], waiting: Iterable[Seq], slots: int) -> int:
        """How many of `waiting`, in their order, may start now; at most `slots`."""
        rows = len(running)
        context = self._context_of(running)
        pace_s = self._pace_s(running)
        self._set_ceiling(rows, context, pace_s)
        self.held_back = False
        granted = 0
        for seq in waiting:
            if granted == slots:
                break
            context += self._context_of((seq,))
            fits = self._fits(rows + granted + 1, context, pace_s)
            if not fits and (granted or not self._insists(seq.request, seq.choice)):
                self.held_back = self.active
                break
            granted += 1
        return granted

    def may_arrive(self, running: Sequence[Seq], request: Request, choice: int, num_tokens: int) -> bool:
        """Whether a sequence may start that arrives computed and has not joined yet."""
        tpot_ms = request.slo.tpot_ms
        pace_s = self._pace_s(running)
        if tpot_ms is not None:
            pace_s = min(pace_s, self._pace_of(tpot_ms / 1000))
        context = self._context_of(running)
        self._set_ceiling(len(running), context, pace_s)
        context += num_tokens + self._mean_answer_tokens / 2
        fits = self._fits(len(running) + 1, context, pace_s) or self._insists(request, choice)
        self.held_back = not fits and self.active
        return fits

    def prompt_tokens(self, decoding: Sequence[Seq], num_drafts: int, start: int) -> int | None:
        """Most that a step may compute beside these rows; None: no objective bounds it. `start`: of the chunk."""
        accounts = [self._accounts[seq.order] for seq in decoding if seq.order in self._accounts]
        limit_s = min(map(self._limit_s, accounts), default=inf)
        if limit_s == inf:
            self._still_steps = 0
            return None
        times = self.step_time
        base_s = times.predict_s(StepFacts(len(decoding), num_drafts, sum(len(seq.tokens) for seq in decoding)))
        token_s = times.prompt_token_s + times.prompt_read_s * start
        bound = max(_FIRST_CHUNK, _REACH * times.most_prompt_tokens)
        room_s = limit_s - base_s
        tokens = bound if room_s > bound * token_s else int(room_s / token_s) if room_s > 0 else 0
        if tokens >= _LEAST_CHUNK:
            self._still_steps = 0
            return tokens
        self._still_steps += 1
        if self._still_steps < _PATIENT_STEPS:
            return 0
        self._still_steps = 0
        self.num_forced += 1
        return _LEAST_CHUNK

    # ---- predictions ------------------------------------------------------------------------------------------------

    def _fits(self, rows: int, context: float, pace_s: float) -> bool:
        if rows == 1 or pace_s == inf:
            return True
        reach = max(_FIRST_ROWS, _REACH * self.step_time.most_rows)
        return rows <= reach and self._steady_s(rows, context) <= pace_s

    def _insists(self, request: Request, choice: int) -> bool:
        """Whether the head of the queue has been held back for long enough."""
        if self._head is None or self._head.name != (request.id, choice):
            self._head = _Head((request.id, choice), self._now_s)
        ttft_ms = request.slo.ttft_ms
        patience_s = min(_PATIENCE_S, inf if ttft_ms is None else ttft_ms / 1000)
        if self._now_s - self._head.since_s < patience_s:
            return False
        self.num_forced += not self._head.insisted
        self._head.insisted = True
        return True

    def _set_ceiling(self, rows: int, context: float, pace_s: float) -> None:
        if pace_s == inf or not self._accounts or not self.step_time.num_learned:
            self.ceiling = None
            return
        times = self.step_time
        each = context / rows if rows else self._mean_prompt_tokens + self._mean_answer_tokens / 2
        one_s = self._steady_s(1, each) - times.fixed_s
        reach = max(_FIRST_ROWS, _REACH * times.most_rows)
        self.ceiling = max(1, int(min(reach, (pace_s - times.fixed_s) / one_s))) if one_s > 0 else reach

    def _steady_s(self, rows: int, context: float) -> float:
        """Duration of a step of so many rows if prompts keep arriving: each row that ends makes room for one."""
        times = self.step_time
        step_s = times.fixed_s + rows * (times.row_s + self._drafts_per_row * times.draft_s)
        step_s += context * times.context_token_s
        if self._mean_answer_tokens > 0 and self.computes_prompts:
            prompt = self._mean_prompt_tokens
            prompt_s = prompt * times.prompt_token_s + prompt * prompt / 2 * times.prompt_read_s
            step_s += rows * self._tokens_per_row * prompt_s / self._mean_answer_tokens
        return step_s

    def _context_of(self, seqs: Iterable[Seq]) -> float:
        """Tokens of all together, each in the middle of its answer or further."""
        middle, context = self._mean_answer_tokens / 2, 0.0
        for seq in seqs:
            count, least = len(seq.tokens), seq.prompt_len + middle
            context += count if count > least else least
        return context

    def _usable_s(self, tpot_s: float) -> float:
        """Longest step that keeps the objective for the tokens that it gives."""
        margin = self._margins.get(_rough(tpot_s), _MARGINS[0])
        return tpot_s * self._tokens_per_row * (1 - margin) - self.step_time.error_s

    def _pace_of(self, tpot_s: float) -> float:
        """Pace of a class; infinite if a single row could not keep it."""
        usable_s = self._usable_s(tpot_s)
        return usable_s if usable_s >= self.step_time.fixed_s + self.step_time.row_s else inf

    def _pace_s(self, running: Sequence[Seq]) -> float:
        """Longest that steps may take from now on."""
        pace_s, least_s = inf, self.step_time.fixed_s + self.step_time.row_s
        usable: dict[float, float] = {}
        for classes in (self._classes, self._recent):
            for tpot_s in classes:
                usable_s = usable[tpot_s] = self._usable_s(tpot_s)
                if least_s <= usable_s < pace_s:  # as `_pace_of`
                    pace_s = usable_s
        accounts, now_s = self._accounts, self._now_s
        for seq in running:
            account = accounts.get(seq.order)
            if account is not None and account.first_s is not None and not account.given_up:
                own_s = usable_s = usable[account.tpot_s]
                if usable_s < least_s:
                    continue  # not even alone: a smaller batch would not help it
                slack_s = account.tpot_s * (account.num_tokens - account.num_before) - (now_s - account.first_s)
                if slack_s < 0:  # as `_Account.slack_s`
                    own_s = _recovery_s(account, usable_s, slack_s)
                if own_s < pace_s:
                    pace_s = own_s
        return pace_s

    def _limit_s(self, account: _Account) -> float:
        """Longest that the next step may take: the account must not go below zero, or not stay there."""
        if account.first_s is None or account.given_up:
            return inf
        slack_s, usable_s = account.slack_s(self._now_s), self._usable_s(account.tpot_s)
        if slack_s < 0:
            return _recovery_s(account, usable_s, slack_s)
        return usable_s + max(0.0, slack_s - _RESERVE * account.tpot_s)

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self, live: Iterable[Seq]) -> None:
        """`live`: every sequence that is here."""
        objectives = {s.order: s.request.slo.tpot_ms / 1000 for s in live if s.request.slo.tpot_ms is not None}
        assert objectives == {order: account.tpot_s for order, account in self._accounts.items()}, "accounts are off"
        assert self._classes == Counter(objectives.values()), "classes are miscounted"
        assert self.active or (self.ceiling is None and not self.held_back)
        assert self._still_steps < _PATIENT_STEPS
        assert self.ceiling is None or self.ceiling >= 1
        self.step_time.check()


def _recovery_s(account: _Account, usable_s: float, slack_s: float) -> float:
    """The pace at which an account below zero is level again in a few tokens, within `_FLOOR`."""
    left = max(1, min(_RECOVERY_TOKENS, account.max_tokens - account.num_tokens))
    return max(_FLOOR * usable_s, usable_s + slack_s / left)


@lru_cache(maxsize=1024)
def _rough(tpot_s: float) -> int:
    """Objectives within a fifth of each other share a class, so that there are few."""
    return round(4 * log2(max(tpot_s, 1e-6)))


def _nearer(mean: float, value: float) -> float:
    """A running mean that starts with the first value."""
    return mean + _RATE * (value - mean) if mean > 0 else float(value)
