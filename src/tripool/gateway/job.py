"""One parsed HTTP request for tokens: what to compute, and how to answer. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tripool.core import Request, Structure
from tripool.errors import InvalidRequest
from tripool.gateway.output_parser import OutputParser
from tripool.gateway.schema_check import ENFORCED, Unenforced
from tripool.router.kept_types import Keyed

if TYPE_CHECKING:
    from tripool.gateway.responses.parse import Shown

MAX_ECHOED = 2**26
"""Prompt characters that one answer may repeat."""

Api = Literal["chat", "completion", "messages", "responses", "ollama_chat", "ollama_generate", "grpc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    id: str
    """The id in the response body, such as `chatcmpl-...`."""
    request_id: str
    """The client's `X-Request-Id`, or a generated one; `explain` finds the request by it."""
    key: str
    """Generated here: two clients may choose the same `request_id`, and internal ids must differ."""
    api: Api
    requests: tuple[Request, ...]
    """One per prompt; a choice's index over HTTP is prompt index x n + choice."""
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    """Usage so far in every chunk."""
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their ids."""
    echoes: tuple[str, ...] = ()
    """Each prompt's text, when answers are to begin with it."""
    only_echoes: bool = False
    """Whether nothing else is shown: `max_tokens` was 0."""
    prompt_logprobs: int | None = None
    """How many are shown for each of the prompt's tokens, in vLLM's form."""
    calls: bool = False
    """Whether answers may hold tool calls."""
    unenforced: Unenforced = ENFORCED
    looser: Callable[[], tuple[Structure | None, Unenforced]] | None = None
    """Instead of the structure, if no grammar can be made of that: without the schemas that are no promise."""
    thinks: bool | None = None
    """Whether reasoning is split off: None when not, else whether the prompt ends inside of it."""
    hides_reasoning: bool = False
    """Whether reasoning that is split off is left out."""
    shown: Shown | None = None
    """Of a request to the Responses API."""
    keyed: Keyed | None = None
    """Of a request with an idempotency key."""

    def parser(self) -> OutputParser:
        """For one choice."""
        return OutputParser(calls=self.calls, thinks=self.thinks, hides=self.hides_reasoning)


def check_echoes(job: Job) -> None:
    """Raises InvalidRequest."""
    num_chars = sum(map(len, job.echoes)) * job.requests[0].params.n
    if num_chars > MAX_ECHOED:
        hint = f"at most {MAX_ECHOED} characters: send fewer prompts or choices, or no 'echo'"
        raise InvalidRequest(f"'echo' would repeat {num_chars} characters", hint=hint, param="echo")
