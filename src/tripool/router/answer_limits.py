"""Limits of answer length: bounds what one request may generate and refuses what is too much. Pure.

An answer without `max_tokens` may extend to the context's end. Where that is too much, it gets a `max_tokens` here and
ends with `length`, as if its client had set it. An explicit `max_tokens` that is too large is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from tripool.core import Request
from tripool.errors import InvalidRequest

USUAL_TOKENS = 256
"""Expected length of an answer without `max_tokens`, and the least that it may have."""
MAX_SCORES = 2**22
"""Tokens of all answers to one request, counting top log-probabilities: a body of a few hundred megabytes."""
MAX_PROMPT_SCORES = 2**18
"""Log-probabilities of one prompt: they are one message between processes."""
_SHARE = 0.5
"""Share of the tenant's remaining tokens that one request may take: the next request needs some too."""


def room_for(request: Request, context_tokens: int) -> float:
    """Longest answer that fits after its prompt. `context_tokens` of 0: unknown."""
    return max(1, context_tokens - len(request.prompt_ids)) if context_tokens else inf


def answer_tokens(request: Request, context_tokens: int) -> int:
    """Tokens of all its answers: the maximum, or an estimate where no length is given."""
    params, room = request.params, room_for(request, context_tokens)
    return params.n * int(min(params.max_tokens or max(USUAL_TOKENS, params.min_tokens), room))


def most_tokens(request: Request, context_tokens: int) -> int:
    """Most tokens of all its answers: like `answer_tokens`, but all the room where no length is given."""
    room = room_for(request, context_tokens)
    if request.params.max_tokens is not None or room == inf:
        return answer_tokens(request, context_tokens)
    return request.params.n * int(room)


def check_answers(requests: Sequence[Request], context_tokens: int) -> None:
    """Checks all prompts of one HTTP request. Raises InvalidRequest."""
    params = requests[0].params
    named = max(1, params.min_tokens, params.max_tokens or 0)
    most_scored = max(len(request.prompt_ids) for request in requests) * (1 + (params.prompt_logprobs or 0))
    if params.prompt_logprobs is not None and most_scored > MAX_PROMPT_SCORES:
        hint = f"at most {MAX_PROMPT_SCORES}: send a shorter prompt, or ask for fewer"
        message = f"it asks for {most_scored} log-probabilities of a prompt"
        raise InvalidRequest(message, hint=hint, param="prompt_logprobs")
    num_scores = sum(_row(request) * min(named, room_for(request, context_tokens)) for request in requests)
    if num_scores > MAX_SCORES:
        what = "tokens" if params.logprobs is None else "tokens and log-probabilities"
        hint = f"at most {MAX_SCORES}: send fewer prompts or choices, or smaller numbers for them"
        raise InvalidRequest(f"it asks for up to {num_scores:.0f} {what}", hint=hint, param="max_tokens")


def bounded(requests: Sequence[Request], context_tokens: int, tokens_left: float | None) -> tuple[Request, ...]:
    """The same requests, with a `max_tokens` wherever the room exceeds what may be used of it.

    `tokens_left`: of the tenant's rate, prompts included; None without a limit. All that the answers may have is taken
    from it before they begin, so that no rate is exceeded. Half of what is left allows a few requests without
    `max_tokens` at a time, and an answer of usual length is never cut.
    """
    if not context_tokens and tokens_left is None:
        return tuple(requests)
    most = MAX_SCORES / sum(map(_row, requests)) if context_tokens else USUAL_TOKENS
    if tokens_left is not None:
        prompts = sum(len(request.prompt_ids) for request in requests)
        num_choices = sum(request.params.n for request in requests)
        most = min(most, max(USUAL_TOKENS, _SHARE * (tokens_left - prompts) / num_choices))
    return tuple(_bounded(request, most, context_tokens) for request in requests)


def _bounded(request: Request, most: float, context_tokens: int) -> Request:
    params = request.params
    length = max(1, params.min_tokens, int(most))
    if params.max_tokens is not None or length >= room_for(request, context_tokens):
        return request
    return replace(request, params=replace(params, max_tokens=length))


def _row(request: Request) -> int:
    """Scores per token of all choices."""
    return request.params.n * (1 + (request.params.logprobs or 0))
