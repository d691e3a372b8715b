"""What one request measured. Times are seconds since the run began."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    index: int
    input_tokens: int
    """Asked for; `prompt_tokens` is what the server counted."""
    output_tokens: int
    sent_s: float
    due_s: float | None = None
    """When an open loop meant to send it; the difference is the client's own lateness."""
    end_s: float = 0.0
    events_s: array[float] = field(default_factory=lambda: array("d"))
    """When each event with text arrived. One event is one token, or several when drafts came true."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """As the server's usage says; None when it said nothing."""
    error: str | None = None
    """A kind, short enough to count: "http 429", "timeout"."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """To the first text: a chunk that only names the role is not a token."""
        return self.events_s[0] - self.sent_s if self.events_s else None

    @property
    def tokens(self) -> int:
        """The server's count, or else one per event."""
        return self.completion_tokens if self.completion_tokens is not None else len(self.events_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first; None when there are none."""
        if len(self.events_s) < 2 or self.tokens < 2:
            return None
        return (self.events_s[-1] - self.events_s[0]) / (self.tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def late_s(self) -> float:
        return 0.0 if self.due_s is None else max(0.0, self.sent_s - self.due_s)

    def gaps_s(self) -> list[float]:
        """Between events with text: inter-token latency as a reader feels it."""
        times = self.events_s
        return [times[i + 1] - times[i] for i in range(len(times) - 1)]
