"""Tokenizer and chat template of a model, over the `tokenizers` library. No tensors; the clock is an argument."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import tokenizers

from tripool.core import Conversation
from tripool.errors import CheckpointCorrupt, InvalidRequest
from tripool.text.decoding import TextStream, read_decoder
from tripool.text.files import TextFiles
from tripool.text.template import NotQuick, Template
from tripool.text.tokenizer_checks import check_tokenizer

_QUICK_PATTERN_CHARS = 128
"""A checkpoint's own regular expressions are fast on so few characters, whatever they are."""

_SPELLINGS = 2**15


class Tokenizer:
    """A model's own tokenizer and chat template. Immutable and safe to share between threads."""

    def __init__(self, files: TextFiles, *, now: Callable[[], datetime] = datetime.now) -> None:
        """`now`: the clock of templates that print the date."""
        self._has_strange_patterns = check_tokenizer(files.tokenizer_json)
        self._library = _load(files.tokenizer_json)
        self._is_quick = False
        decoder = self._library.decoder
        self._plan = read_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        added = self._library.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.end_ids = files.end_ids
        self.chat_template, self.special_tokens = files.chat_template, files.special_tokens
        self._template: Template | None = None
        if files.chat_template is not None and files.chat_template.strip():
            self._template = Template(files.chat_template, special_tokens=files.special_tokens, now=now)

    @cached_property
    def quick(self) -> Tokenizer:
        """The same tokenizer, which raises NotQuick instead of taking long: for an event loop."""
        twin = copy.copy(self)
        twin._is_quick = True
        twin._template = None if self._template is None else self._template.quick
        return twin

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template renders tools and calls."""
        return self._template is not None and self._template.knows_tools

    @cached_property
    def vocab_size(self) -> int:
        """One past the largest token id; unused ids below it decode to nothing."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token_bytes(self) -> int:
        """Longest token. Reads the whole vocabulary once: not on an event loop."""
        ids = self._library.get_vocab(with_added_tokens=True).values()
        return max((len(self.token_bytes(i)) for i in ids), default=1) or 1

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special` adds the tokens that belong around a plain text, such as the begin token."""
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be text, not {type(text).__name__}", param="prompt")
        if self._is_quick and self._has_strange_patterns and len(text) > _QUICK_PATTERN_CHARS:
            raise NotQuick
        try:
            text.encode()
        except UnicodeEncodeError as error:
            hint = "send text that UTF-8 can write; half of a \\ud83d\\ude00 pair is not a character"
            raise InvalidRequest(f"character {error.start} is a lone surrogate", hint=hint, param="prompt") from error
        try:
            # Of the library's methods, those for a batch release the GIL; the fast one also keeps no offsets, which
            # are not needed and take most of the memory.
            return self._library.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except BaseException as error:  # the library raises nothing narrower, e.g. for unknown characters
            _raise_what_is_not_its_own(error)
            raise InvalidRequest(f"this model cannot tokenize the text: {error}", param="prompt") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Unused ids are skipped, as by transformers."""
        try:
            # As above: the batch method releases the GIL.
            return self._library.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        except OverflowError as error:
            raise InvalidRequest("a token id is negative or above 32 bits", param="prompt") from error
        except BaseException as error:
            _raise_what_is_not_its_own(error)
            raise InvalidRequest(f"this model cannot write the tokens as text: {error}", param="prompt") from error

    def token(self, token_id: int) -> str | None:
        """As in the vocabulary (`Ġthe`, `▁the`, `<0x0A>`); None for an unused id."""
        return self._library.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text: perhaps only part of a character."""
        token = self.token(token_id)
        return b"" if token is None else self._plan.token_bytes(token)

    def token_text(self, token_id: int) -> str:
        """As `token_bytes`, with U+FFFD where the bytes are not a whole character."""
        return self.spelling(token_id)[0]

    @cached_property
    def spelling(self) -> Callable[[int], tuple[str, bytes]]:
        """`token_text` and `token_bytes` of a token. Cached: log-probabilities ask for the same again."""

        def spell(token_id: int) -> tuple[str, bytes]:
            raw = self.token_bytes(token_id)
            return raw.decode(errors="replace"), raw

        return lru_cache(maxsize=_SPELLINGS)(spell)

    def stream(self) -> TextStream:
        """Decodes one growing sequence of `token`s."""
        return TextStream(self._plan)

    def render_chat(self, conversation: Conversation, **options: Any) -> str:
        """The conversation rendered by the model's template, with the options of `Template.render`."""
        if self._template is None:
            hint = "it was not trained to chat: give it a plain prompt instead"
            raise InvalidRequest("this model has no chat template", hint=hint, param="messages")
        return self._template.render(conversation, **options)

    def encode_chat(self, conversation: Conversation, **options: Any) -> list[int]:
        """Tokens of `render_chat`, with its options; nothing is added, since the template writes the begin token."""
        return self.encode(self.render_chat(conversation, **options), special=False)


def _load(tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(tokenizer_json)
    except BaseException as error:  # the library raises nothing narrower for bad JSON and bad contents
        _raise_what_is_not_its_own(error)
        hint = "fetch the file again, or write it with tokenizers' own save()"
        raise CheckpointCorrupt(f"cannot read the tokenizer: {error}", hint=hint, file="tokenizer.json") from error
    # Some files contain the truncation and padding of a training run; a prompt must not be changed by them.
    library.no_truncation()
    library.no_padding()
    return library


def _raise_what_is_not_its_own(error: BaseException) -> None:
    """Panics of the library's Rust code are not Exceptions, and would end their thread."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
