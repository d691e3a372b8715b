"""Encodes prompts within bounds, and counts the tokens of a prompt that only its system message decides.

A text that cannot fit into the context is refused before any work on it.

Encoding takes about a second and some hundred megabytes per megabyte of text. No token is longer than the vocabulary's
longest one, so a text with more bytes than a full context of those is too long without encoding it. Short contexts
still allow texts of some pages, so that a client can ask how long its text is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tripool.core import Conversation
from tripool.errors import ContextOverflow, InvalidRequest
from tripool.text import Tokenizer

_ROLES = ("system", "developer")


def public_tokens(tokenizer: Tokenizer, conversation: Conversation, prompt_ids: Sequence[int]) -> int:
    """Leading tokens of the prompt that the system message alone would give as well.

    The conversation is rendered a second time without its other messages, tools and options; the common prefix
    depends on the system message only, whatever the template does with the rest.
    """
    if not conversation or conversation[0]["role"] not in _ROLES:
        return 0
    try:
        alone = tokenizer.encode_chat([conversation[0]], continue_final_message=True)
    except InvalidRequest:  # a template that requires a user message, or moves the system message
        return 0
    pairs = zip(alone, prompt_ids, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(alone), len(prompt_ids)))


MIN_TEXT_BYTES = 2**16
"""Always encoded, whatever the context; takes tens of milliseconds."""
MIN_IDS = 2**14
_ESCAPED = 6
"""Most bytes of JSON per byte of text: `\\u0041`."""
_AROUND_BYTES = 2**16
"""Bytes of a body besides its text: names, roles, options."""


class Encoder:
    """`context_tokens` is called each time; while it returns 0 (unknown), only bodies are bounded."""

    def __init__(self, tokenizer: Tokenizer, context_tokens: Callable[[], int]) -> None:
        self._tokenizer, self._context_tokens = tokenizer, context_tokens

    @property
    def context_tokens(self) -> int:
        """0: unknown."""
        return self._context_tokens()

    @property
    def quick(self) -> Encoder:
        """The same for an event loop; raises NotQuick for what may take long."""
        return Encoder(self._tokenizer.quick, self._context_tokens)

    def encode(self, text: str, *, special: bool, param: str = "prompt") -> list[int]:
        if isinstance(text, str) and len(text) > MIN_TEXT_BYTES // 4:
            self._check(len(text.encode(errors="replace")), param)
        return self._tokenizer.encode(text, special=special)

    def check_body(self, num_bytes: int, param: str) -> None:
        """Before its JSON is parsed: whether its text can be short enough in any encoding."""
        most = self._max_bytes(num_bytes)
        if most is not None and num_bytes > _ESCAPED * most + _AROUND_BYTES:
            raise self._too_long(f"the body has {num_bytes} bytes", most, param)

    def check_ids(self, count: int, param: str) -> None:
        most = max(MIN_IDS, 2 * self._context_tokens())
        if count > most:
            hint = f"send at most {most} at once"
            raise ContextOverflow.of(self._context_tokens(), f"these are {count} tokens", hint=hint, param=param)

    def _check(self, num_bytes: int, param: str) -> None:
        most = self._max_bytes(num_bytes)
        if most is not None and num_bytes > most:
            raise self._too_long(f"the text has {num_bytes} bytes", most, param)

    def _max_bytes(self, num_bytes: int) -> int | None:
        context_tokens = self._context_tokens()
        if num_bytes <= MIN_TEXT_BYTES or not context_tokens:
            return None
        return max(MIN_TEXT_BYTES, context_tokens * self._tokenizer.longest_token_bytes)

    def _too_long(self, what: str, most: int, param: str) -> ContextOverflow:
        hint = f"no text of more than {most} bytes can fit into {self._context_tokens()} tokens; send less"
        return ContextOverflow.of(self._context_tokens(), what, hint=hint, param=param)
