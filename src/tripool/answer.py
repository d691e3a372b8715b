"""Answer: collects the token events of one request into text, stop strings and usage.

Used by the Python API and the gateway. Depends on the tokenizer, not on engines or protocols.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tripool.core import FinishReason, Request, TokenEvent, TokenLogprobs, Usage
from tripool.text import Detokenizer, StopFinder, Tokenizer


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's `n` answers. `token_ids` includes the token that ended it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one prompt. `text`, `token_ids`, `finish_reason` and `logprobs` are those of the first choice."""

    request_id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's second token and those after it, if they were asked for."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to a choice. `text` may be empty (an incomplete character) or longer than the token's own."""

    choice: int
    text: str
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class _Draft:
    """A choice under construction."""

    detokenizer: Detokenizer
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    """Verified and accepted drafts, from its newest event."""


class Answer:
    """Takes every event of its request; once `done`, the caller cancels the request if the engine goes on."""

    keeps_logprobs = True
    """Whether `generation` holds them. They are large: a caller that streams them sets this to False."""

    def __init__(self, request: Request, tokenizer: Tokenizer, finder: StopFinder | None = None) -> None:
        """`finder`: a shared StopFinder, where several requests have the same stop strings."""
        self.request = request
        finder = StopFinder(request.params.stop) if finder is None else finder
        self._drafts = [_Draft(Detokenizer(tokenizer, request.params, finder)) for _ in range(request.params.n)]
        self._num_cached_tokens = 0
        asked = request.params.prompt_logprobs is not None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = () if asked else None
        # Sums over the choices: a stream may report its usage with every token.
        self._num_tokens = self._num_drafted = self._num_accepted = 0

    @property
    def done(self) -> bool:
        return all(draft.finish_reason is not None for draft in self._drafts)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Of every choice; "abort" for an unfinished one."""
        return [draft.finish_reason or "abort" for draft in self._drafts]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every choice."""
        return [len(draft.token_ids) for draft in self._drafts]

    def stop_string(self, choice: int) -> str | None:
        """The stop string that ended the choice, if one did."""
        return self._drafts[choice].detokenizer.stopped

    def take(self, event: TokenEvent) -> Delta | None:
        """None when the choice has already ended at a stop string, which the engine does not know."""
        draft = self._drafts[event.choice]
        if draft.finish_reason is not None:
            return None
        assert event.index == len(draft.token_ids), "an event of this choice was lost or duplicated"
        self._num_cached_tokens = event.num_cached_tokens
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self._num_tokens += 1
        self._num_drafted += event.num_draft_tokens - draft.num_drafted
        self._num_accepted += event.num_accepted_draft_tokens - draft.num_accepted
        draft.num_drafted, draft.num_accepted = event.num_draft_tokens, event.num_accepted_draft_tokens
        draft.token_ids.append(event.token_id)
        if event.logprobs is not None and self.keeps_logprobs:
            draft.logprobs.append(event.logprobs)
        text, draft.finish_reason = self._text_of(event, draft.detokenizer)
        draft.texts.append(text)
        return Delta(event.choice, text, event.token_id, draft.finish_reason, event.logprobs)

    def _text_of(self, event: TokenEvent, detokenizer: Detokenizer) -> tuple[str, FinishReason | None]:
        params = self.request.params
        # A token that ends the answer by its id is not part of the text, unless the caller wants to see it.
        ended = event.finish_reason == "stop" and event.token_id in self.request.stop_ids
        mark = ended and not params.include_stop_str_in_output
        text = "" if mark else detokenizer.push(event.token_id)
        finish = event.finish_reason
        if detokenizer.stopped is not None:
            finish = "stop"
        elif finish is not None:
            text += detokenizer.finish()
        return text, finish

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=self._num_cached_tokens,
            draft_tokens=self._num_drafted,
            accepted_draft_tokens=self._num_accepted,
        )

    def generation(self) -> Generation:
        """The answer so far; "abort" is the finish reason of an unfinished choice."""
        choices = tuple(self.choices())
        return Generation(self.request.id, self.request.prompt_ids, choices, self.usage, self.prompt_logprobs)

    def choices(self) -> Iterator[Choice]:
        """The choices of `generation`, one by one."""
        wants_logprobs = self.request.params.logprobs is not None and self.keeps_logprobs
        for index, draft in enumerate(self._drafts):
            yield Choice(
                index=index,
                text="".join(draft.texts),
                token_ids=tuple(draft.token_ids),
                finish_reason=draft.finish_reason or "abort",
                logprobs=tuple(draft.logprobs) if wants_logprobs else None,
            )
