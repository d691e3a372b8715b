"""Measurements of one request. Times are seconds since the run began."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    index: int
    input_tokens: int
    """Requested; `prompt_tokens` is the server's count."""
    output_tokens: int
    sent_s: float
    due_s: float | None = None
    """Scheduled time in an open loop; the difference to the actual time is the client's lateness."""
    end_s: float = 0.0
    events_s: array[float] = field(default_factory=lambda: array("d"))
    """Arrival of each event with text. One event is one token, or several with accepted drafts."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """From the server's usage; None if it reported none."""
    error: str | None = None
    """A short error kind for counting: "http 429", "timeout"."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text: a chunk that only names the role does not count."""
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
        """Times between events with text: inter-token latency."""
        times = self.events_s
        return [times[i + 1] - times[i] for i in range(len(times) - 1)]
