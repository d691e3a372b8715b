"""How much of a prompt anyone may know: its system message, as the template writes it when nothing else is there."""

from __future__ import annotations

from collections.abc import Sequence

from tripool.core import Conversation
from tripool.errors import InvalidRequest
from tripool.text import Tokenizer

_ROLES = ("system", "developer")


def public_tokens(tokenizer: Tokenizer, conversation: Conversation, prompt_ids: Sequence[int]) -> int:
    """Leading tokens of the prompt that the system message alone would give as well.

    The conversation without its other messages, without tools and options is written a second time; what the prompt has
    in common with that is a function of the system message, whatever the template does with the rest.
    """
    if not conversation or conversation[0]["role"] not in _ROLES:
        return 0
    try:
        alone = tokenizer.encode_chat([conversation[0]], continue_final_message=True)
    except InvalidRequest:  # a template that wants a user, or moves the system message elsewhere
        return 0
    pairs = zip(alone, prompt_ids, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(alone), len(prompt_ids)))
