"""What a checkpoint says about text: handed from the checkpoint reader to the tokenizer, and across processes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Contents, not paths: a gateway on another machine needs no checkpoint folder."""

    tokenizer_json: str
    """The `tokenizers` library's own serialisation."""
    chat_template: str | None = None
    """Jinja source; None when the model is not a chat model."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Names a template may use, such as bos_token and eos_token, to their text."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end an answer."""
