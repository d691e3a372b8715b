"""What there is of a request's answer so far: as its gateway or the log says it, and as it grows. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import zip_longest

from tripool.core import FinishReason, TokenEvent, TokenLogprobs

_TOKEN_BYTES, _SCORE_BYTES = 4, 24


@dataclass(frozen=True, slots=True)
class HeldChoice:
    """What the client of one choice has of it, in the hands of its gateway: a coordinator that knows nothing of the
    request takes it up from there."""

    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    scores: tuple[TokenLogprobs, ...] = ()
    """Of its tokens, where they were asked for and somebody may read them again."""

    @property
    def done(self) -> bool:
        return self.finish is not None


@dataclass(frozen=True, slots=True)
class Held:
    """What the client of one request has of it."""

    choices: tuple[HeldChoice, ...]
    num_cached_tokens: int | None = None
    """As its first event said; None: there was none."""
    prompt_scores: tuple[TokenLogprobs, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)


class Taken(Enum):
    """What an event is to somebody who has some of the answer."""

    NEW = auto()
    KNOWN = auto()
    GAP = auto()
    """Tokens before it are missing."""
    OTHER = auto()
    """It contradicts what is there: the answer was computed again, and came out otherwise."""


class Progress:
    """One request's answer as it grows. `keeps_scores`: with all that it takes to say it once more."""

    __slots__ = (
        "_accepted", "_drafted", "_finish", "_scores", "choices_left", "num_cached_tokens", "num_scores", "num_tokens",
        "prompt_scores", "tokens",
    )  # fmt: skip

    def __init__(self, num_choices: int, *, keeps_scores: bool = False) -> None:
        self.tokens = [array("I") for _ in range(num_choices)]
        self.choices_left, self.num_tokens = num_choices, 0
        self.num_cached_tokens: int | None = None
        self.prompt_scores: tuple[TokenLogprobs, ...] | None = None
        self.num_scores = 0
        """Log-probabilities that are kept."""
        self._finish: list[FinishReason | None] = [None] * num_choices
        self._drafted, self._accepted = [0] * num_choices, [0] * num_choices
        self._scores: list[list[TokenLogprobs]] | None = [[] for _ in range(num_choices)] if keeps_scores else None

    @property
    def done(self) -> bool:
        return not self.choices_left

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.tokens))

    @property
    def num_bytes(self) -> int:
        return _TOKEN_BYTES * self.num_tokens + _SCORE_BYTES * self.num_scores

    def take(self, event: TokenEvent) -> Taken:
        tokens, index = self.tokens[event.choice], event.index
        if index != len(tokens):
            if index > len(tokens):
                return Taken.GAP
            return Taken.KNOWN if tokens[index] == event.token_id else Taken.OTHER
        if self._finish[event.choice] is not None:
            return Taken.OTHER
        tokens.append(event.token_id)
        self.num_tokens += 1
        self._drafted[event.choice] = event.num_draft_tokens
        self._accepted[event.choice] = event.num_accepted_draft_tokens
        self.num_cached_tokens = event.num_cached_tokens
        if self._scores is not None and event.logprobs is not None:
            self._keep_scores(event.choice, [event.logprobs])
        if event.prompt_logprobs is not None and self._scores is not None:
            self.prompt_scores = event.prompt_logprobs
            self.num_scores += sum(1 + len(one.top) for one in event.prompt_logprobs)
        if event.finish_reason is not None:
            self._finish[event.choice] = event.finish_reason
            self.choices_left -= 1
        return Taken.NEW

    def held(self, since: Sequence[int] | None = None) -> Held:
        """All of it, or of each choice what is there beyond so many tokens."""
        start = since or (0,) * len(self.tokens)
        choices = tuple(
            HeldChoice(
                tuple(tokens[first:]), self._finish[i], self._drafted[i], self._accepted[i],
                tuple(self._scores[i][first:]) if self._scores is not None else (),
            )
            for i, (tokens, first) in enumerate(zip(self.tokens, start, strict=True))
        )  # fmt: skip
        return Held(choices, self.num_cached_tokens, None if since and any(since) else self.prompt_scores)

    def add(self, held: Held, since: Sequence[int] | None = None) -> bool:
        """What somebody else has of it, where that is more. False if the two contradict each other."""
        start = since or (0,) * len(self.tokens)
        for i, (choice, first) in enumerate(zip(held.choices, start, strict=True)):
            own = self.tokens[i]
            common = min(len(own), first + len(choice.tokens))
            if first > len(own) or tuple(own[first:common]) != choice.tokens[: max(0, common - first)]:
                return False
        for i, (choice, first) in enumerate(zip(held.choices, start, strict=True)):
            own = self.tokens[i]
            if first + len(choice.tokens) < len(own) or self._finish[i] is not None:
                continue
            new = len(own) - first
            self._drafted[i] = max(self._drafted[i], choice.num_draft_tokens)
            self._accepted[i] = max(self._accepted[i], choice.num_accepted_draft_tokens)
            own.extend(choice.tokens[new:])
            if self._scores is not None:
                self._keep_scores(i, choice.scores[new:])
            if choice.finish is not None:
                self._finish[i] = choice.finish
                self.choices_left -= 1
        self.num_tokens = sum(map(len, self.tokens))
        if held.num_cached_tokens is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = held.num_cached_tokens
        if held.prompt_scores is not None and self.prompt_scores is None and self._scores is not None:
            self.prompt_scores = held.prompt_scores
            self.num_scores += sum(1 + len(one.top) for one in held.prompt_scores)
        return True

    def stop(self, lengths: Sequence[int]) -> None:
        """Its reader found that it ends there: all choices are done, with so many tokens."""
        for i, length in enumerate(lengths):
            if length < len(self.tokens[i]):
                del self.tokens[i][length:]
                self._finish[i] = "stop"
                if self._scores is not None:
                    self.num_scores -= sum(1 + len(one.top) for one in self._scores[i][length:])
                    del self._scores[i][length:]
            self._finish[i] = self._finish[i] or "stop"
        self.choices_left, self.num_tokens = 0, sum(map(len, self.tokens))

    def clear(self) -> None:
        """Forget the tokens, not which choices are done."""
        for tokens in self.tokens:
            del tokens[:]
        self._scores, self.prompt_scores, self.num_scores, self.num_tokens = None, None, 0, 0

    def skip(self, event: TokenEvent) -> None:
        """After `clear`."""
        if event.finish_reason is not None:
            self.choices_left -= 1

    def events(self, request_id: str) -> Iterator[TokenEvent]:
        """Once more, token by token and choice by choice in turns."""
        finish, cached, prompt_scores = self._finish, self.num_cached_tokens or 0, self.prompt_scores
        for index, row in enumerate(zip_longest(*self.tokens)):
            for i, token_id in enumerate(row):
                if token_id is not None:
                    last = index + 1 == len(self.tokens[i])
                    scores = self._scores[i][index] if self._scores is not None and self._scores[i] else None
                    yield TokenEvent(
                        request_id, i, index, token_id, finish[i] if last else None, scores, cached,
                        self._drafted[i], self._accepted[i], prompt_logprobs=prompt_scores,
                    )  # fmt: skip
                    prompt_scores = None

    def _keep_scores(self, choice: int, scores: Sequence[TokenLogprobs]) -> None:
        assert self._scores is not None
        self._scores[choice].extend(scores)
        self.num_scores += sum(1 + len(one.top) for one in scores)
