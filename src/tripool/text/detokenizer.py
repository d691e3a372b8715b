"""Incremental detokenizer of one answer, up to a stop string. Independent of engines and HTTP.

What `push` returns never changes afterwards: no incomplete characters, and nothing that may become a stop string.
"""

from __future__ import annotations

from tripool.core import SamplingParams
from tripool.text.decoding import Step
from tripool.text.stops import StopFinder
from tripool.text.tokenizer import Tokenizer


class Detokenizer:
    """For one choice. All `push` results and `finish` joined equal `tokenizer.decode` of all tokens, up to the stop.

    A stop string is hit by the first token after which the text (complete characters only) contains one; the text is
    cut before the occurrence that starts first, or after it with `include_stop_str_in_output`. Occurrences completed by
    a token before the `min_tokens`-th are ordinary text, so an answer cut by a stop has at least `min_tokens` tokens.

    The token that ends an answer (the model's end token, a stop token) is not text: the caller does not push it.

    `finder`: for the same stop strings. It is stateless, so answers with the same ones may share it.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, finder: StopFinder | None = None) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._finder = StopFinder(params.stop) if finder is None else finder
        self._stream = tokenizer.stream()
        self._num_tokens = 0
        # Text in order: returned | _held (final, may begin a stop string) | _open (may still be removed).
        self._held = ""
        self._open: list[str] = []
        self._state_held = 0  # the finder's state after _held, restored when _open is removed
        self._state = 0  # and after _open
        self._closed = False
        self.stopped: str | None = None
        """The stop string that was hit."""

    def push(self, token_id: int) -> str:
        """Text that is final now. Nothing after a stop."""
        if self._closed:
            return ""
        self._num_tokens += 1
        if token_id in self._skipped_ids:
            return ""
        token = self._tokenizer.token(token_id)
        return "" if token is None else self._take(self._stream.push(token))

    def finish(self) -> str:
        """The rest, when no more tokens follow: text held back, and U+FFFD for an incomplete character."""
        if self._closed:
            return ""
        text = self._take(self._stream.finish())
        self._closed = True
        text, self._held = text + self._held, ""
        return text

    def _take(self, step: Step) -> str:
        if step.void:
            self._open.clear()
            self._state = self._state_held
        self._state, hit = self._finder.advance(self._state, step.text)
        if hit is not None and self._num_tokens >= self._min_tokens:
            before = self._held + "".join(self._open)
            cut = len(before) + (hit.end if self._include_stop else hit.start)
            self._held, self._closed, self.stopped = "", True, hit.stop
            return (before + step.text)[:cut]
        self._open.append(step.text)
        if not step.settled:
            return ""
        text = self._held + "".join(self._open)
        self._open.clear()
        self._state_held = self._state
        cut = len(text) - self._finder.held_chars(self._state)
        self._held = text[cut:]
        return text[:cut]
