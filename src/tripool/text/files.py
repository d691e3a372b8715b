"""The text files of a checkpoint: passed from the checkpoint reader to the tokenizer, and between processes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Contents, not paths: a gateway on another machine needs no checkpoint folder."""

    tokenizer_json: str
    """Serialised by the `tokenizers` library."""
    chat_template: str | None = None
    """Jinja source; None when the model is not a chat model."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Text by the name that a template uses, such as bos_token and eos_token."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end an answer."""
