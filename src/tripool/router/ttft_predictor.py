"""Predicts time to first token, fitted online from the load ahead of each request. Pure; time is an argument.

Two lines are fitted, each `seconds = a x requests + b x tokens` over the last few dozen first tokens:

| line | fitted to | predicts |
|---|---|---|
| `queue` | time between two first tokens while the backend was full | how fast the load ahead is worked off |
| `own` | admission to first token, where a worker was free | how long the prompt itself takes |

A backend without a free decode slot yields first tokens only as slots become free; the first line includes that wait.
`Trust` tracks the error of past predictions and gives the safety factor of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

_KEEP = 0.97
"""Decay per sample: about thirty samples count."""
_KEEP_TRUST = 0.995
"""Decay of prediction errors: about two hundred count, so that an outlier is remembered for a while."""
_KNOWN_FROM = 2.5
"""Samples, decayed: three of them."""
_FACTORS = (0.5, 4.0)
_CAUTION = 4.0
"""Mean deviations added to a prediction: about one in a hundred is further off."""


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
        return self.count >= _KNOWN_FROM

    def fit(self) -> tuple[float, float]:
        """Seconds per request and per token; all per token where prompts are too similar to separate the two."""
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
    """Error of past predictions, weighted by their length: long ones decide about admission."""

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
        """Multiplier that makes a prediction almost certainly sufficient."""
        if not self.predicted:
            return 1.0
        low, high = _FACTORS
        return min(high, max(low, 1.0 + self.bias + _CAUTION * self.spread / self.predicted))


class TtftPredictor:
    """Tracks the backend's load and predicts times to first token."""

    def __init__(self) -> None:
        self.queue, self.own, self.trust = Line(), Line(), Trust()
        self._full_since_s: float | None = None
        """Start of the current full period of the backend, or its last first token if that was later."""

    def full(self, is_full: bool, now_s: float) -> None:
        if not is_full:
            self._full_since_s = None
        elif self._full_since_s is None:
            self._full_since_s = now_s

    def first_token(self, tokens: float, admitted_for_s: float, now_s: float, *, unhindered: bool) -> None:
        """`unhindered`: a worker was free at its admission; `admitted_for_s`: time since its admission."""
        if self._full_since_s is not None:
            self.queue.learn(tokens, now_s - self._full_since_s)
            self._full_since_s = now_s
        if unhindered:
            self.own.learn(tokens, admitted_for_s)
            # A loaded backend is never slower per prompt than an unloaded one: drop an outdated slow fit.
            if self.queue.known and self.queue.seconds_for(1, tokens) > admitted_for_s:
                self.queue.learn(tokens, admitted_for_s)

    @property
    def known(self) -> bool:
        return self.queue.known or self.own.known

    def predict_s(self, requests: float, tokens: float, own_tokens: float, now_s: float) -> float | None:
        """Seconds to the first token of a prompt with this load ahead; None without samples."""
        queue_known = self.queue.known
        if not queue_known and not self.own.known:
            return None
        line = self.queue if queue_known else self.own
        ahead_s = line.seconds_for(requests, tokens) if requests or tokens else 0.0
        if requests and self._full_since_s is not None:
            # A part of the current prompt's time has already passed.
            ahead_s -= min(now_s - self._full_since_s, ahead_s / max(1.0, requests))
        return ahead_s + self.own_s(own_tokens)

    def own_s(self, tokens: float) -> float:
        queue_s, own_s = self.queue.seconds_for(1, tokens), self.own.seconds_for(1, tokens)
        return queue_s if queue_s > own_s else own_s

    def safe_s(self, predicted_s: float) -> float:
        return predicted_s * self.trust.factor

    def tokens_per_s(self) -> float | None:
        """Throughput at which the load is worked off; None without samples."""
        line = self.queue if self.queue.count >= _KNOWN_FROM else self.own
        return line.tokens / line.seconds if line.count >= _KNOWN_FROM and line.seconds > 0 else None
