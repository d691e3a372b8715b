"""How long until a first token: learned while serving, from what stood before each request. Pure; time is an argument.

Two lines are fitted, each `seconds = a x requests + b x tokens` over the last few dozen first tokens:

| line | learned from | says |
|---|---|---|
| turn | the time between two first tokens while the backend was full | how fast what is ahead is worked off |
| alone | admission to first token, where nothing stood in the way | how long its own prompt takes |

A backend whose decode slots are taken gives first tokens only as slots get free: that wait is in the first line without
being asked for. Besides the lines, `Trust` remembers how far predictions were off, and how far to distrust the next.
"""

from __future__ import annotations

from dataclasses import dataclass

_KEEP = 0.97
"""Weight of a sample after the next one: some thirty samples count."""
_KEEP_TRUST = 0.995
"""The same for how far predictions were off: some two hundred count, so that a hiccup is not forgotten at once."""
_MIN_SAMPLES = 3.0
_FACTORS = (0.5, 4.0)
_CAUTION = 4.0
"""Mean deviations that are added to a prediction: about one in a hundred is further off."""


@dataclass(slots=True)
class Line:
    """`a x requests + b x tokens`, neither of them negative, fitted by decaying least squares."""

    count: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0

    def learn(self, tokens: float, seconds: float) -> None:
        self.count = self.count * _KEEP + 1
        self.tokens = self.tokens * _KEEP + tokens
        self.seconds = self.seconds * _KEEP + seconds
        self.tokens_squared = self.tokens_squared * _KEEP + tokens * tokens
        self.tokens_seconds = self.tokens_seconds * _KEEP + tokens * seconds

    @property
    def known(self) -> bool:
        return self.count >= _MIN_SAMPLES - 0.5

    def fit(self) -> tuple[float, float]:
        """Seconds per request and per token. Where prompts are too alike to tell the two apart, all is per token."""
        if not self.count:
            return 0.0, 0.0
        spread = self.count * self.tokens_squared - self.tokens**2
        if spread > 0.01 * self.count * self.tokens_squared:
            per_token = (self.count * self.tokens_seconds - self.tokens * self.seconds) / spread
            per_request = (self.seconds - per_token * self.tokens) / self.count
            if per_token >= 0 and per_request >= 0:
                return per_request, per_token
            if per_token < 0:
                return self.seconds / self.count, 0.0
        return 0.0, self.seconds / self.tokens if self.tokens else 0.0

    def seconds_for(self, requests: float, tokens: float) -> float:
        per_request, per_token = self.fit()
        return per_request * requests + per_token * tokens


@dataclass(slots=True)
class Trust:
    """How far predictions were off, long ones counting most: those are the ones that decide."""

    predicted: float = 0.0
    over: float = 0.0
    spread: float = 0.0
    num_seen: int = 0

    def learn(self, predicted_s: float, actual_s: float) -> None:
        self.num_seen += 1
        error_s = actual_s - predicted_s
        off_s = abs(error_s - self.bias * predicted_s)
        self.predicted = self.predicted * _KEEP_TRUST + predicted_s
        self.over = self.over * _KEEP_TRUST + error_s
        self.spread = self.spread * _KEEP_TRUST + off_s

    @property
    def bias(self) -> float:
        return self.over / self.predicted if self.predicted else 0.0

    @property
    def factor(self) -> float:
        """Times a prediction: what will almost certainly be enough."""
        if not self.predicted:
            return 1.0
        low, high = _FACTORS
        return min(high, max(low, 1.0 + self.bias + _CAUTION * self.spread / self.predicted))


class TtftPredictor:
    """Told of every change in what is inside the backend; says how long things will take."""

    def __init__(self) -> None:
        self.turn, self.alone, self.trust = Line(), Line(), Trust()
        self._full_since_s: float | None = None
        """Since when the backend has had as much as it can work on, or the last first token if that was later."""

    def full(self, is_full: bool, now_s: float) -> None:
        if not is_full:
            self._full_since_s = None
        elif self._full_since_s is None:
            self._full_since_s = now_s

    def first_token(self, tokens: float, inside_s: float, now_s: float, *, unhindered: bool) -> None:
        """`unhindered`: nothing was inside before it that it had to wait for; `inside_s`: since its admission."""
        if self._full_since_s is not None:
            self.turn.learn(tokens, now_s - self._full_since_s)
            self._full_since_s = now_s
        if unhindered:
            self.alone.learn(tokens, inside_s)
            # A backend cannot be slower at many than at one after the other: forget a slow time that is over.
            if self.turn.known and self.turn.seconds_for(1, tokens) > inside_s:
                self.turn.learn(tokens, inside_s)

    @property
    def known(self) -> bool:
        return self.turn.known or self.alone.known

    def predict_s(self, requests: float, tokens: float, own_tokens: float, now_s: float) -> float | None:
        """To the first token of a prompt with so much before it; None before anything is known."""
        if not self.known:
            return None
        line = self.turn if self.turn.known else self.alone
        ahead_s = line.seconds_for(requests, tokens)
        if requests and self._full_since_s is not None:
            # The one that is being worked on has a part of its turn behind it.
            ahead_s -= min(now_s - self._full_since_s, ahead_s / max(1.0, requests))
        return ahead_s + self.own_s(own_tokens)

    def own_s(self, tokens: float) -> float:
        return max(line.seconds_for(1, tokens) for line in (self.turn, self.alone))

    def safe_s(self, predicted_s: float) -> float:
        return predicted_s * self.trust.factor

    def tokens_per_s(self) -> float | None:
        """At which what is inside is worked off; None before anything is known."""
        line = self.turn
        if not line.known:
            line = self.alone
            if not line.known:
                return None
        return line.tokens / line.seconds if line.seconds > 0 else None
