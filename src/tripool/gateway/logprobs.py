"""Log-probabilities in OpenAI's two formats: per token for a chat, in columns for a completion.

A stream shows them token by token. For a whole answer each is encoded as it arrives: encoding all of them at the end
would block the event loop for a long time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import msgspec

from tripool.core import TokenLogprobs
from tripool.text import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot express."""
_AT_ONCE = 64
"""Tokens joined in one piece."""

Pairs = Iterable[tuple[int, TokenLogprobs]]
_encode = msgspec.json.Encoder().encode


class IdNames:
    """Names tokens by their ids, as `return_tokens_as_token_ids` asks: texts of different tokens may be equal."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        return self.token_text(token_id), self._tokenizer.spelling(token_id)[1]


Names = Tokenizer | IdNames


def chat_logprobs(tokenizer: Names, pairs: Pairs) -> dict[str, Any]:
    return {"content": [_token(tokenizer, *pair) for pair in pairs], "refusal": None}


def completion_logprobs(tokenizer: Names, pairs: Pairs, text_offset: int) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, logprobs in pairs:
        token = tokenizer.token_text(token_id)
        columns["tokens"].append(token)
        columns["token_logprobs"].append(max(logprobs.chosen, _LEAST))
        columns["top_logprobs"].append(_likeliest(tokenizer, token, logprobs))
        columns["text_offset"].append(text_offset)
        text_offset += len(token)
    return columns


class Scores(Protocol):
    """Log-probabilities of one choice, encoded incrementally."""

    def add(self, token_id: int, logprobs: TokenLogprobs) -> None: ...

    def pieces(self) -> Iterator[bytes]:
        """The whole JSON, in small pieces."""
        ...


class ChatScores:
    """The bytes of `chat_logprobs`."""

    def __init__(self, tokenizer: Names) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[bytes] = []

    def add(self, token_id: int, logprobs: TokenLogprobs) -> None:
        self._tokens.append(_encode(_token(self._tokenizer, token_id, logprobs)))

    def pieces(self) -> Iterator[bytes]:
        yield b'{"content":['
        yield from _joined(self._tokens)
        yield b'],"refusal":null}'


_COLUMNS = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")


class CompletionScores:
    """The bytes of `completion_logprobs`; after those of the prompt, where the answer repeats it."""

    def __init__(self, tokenizer: Names) -> None:
        self._tokenizer = tokenizer
        self._columns: dict[bytes, list[bytes]] = {name: [] for name in _COLUMNS[:3]}
        self._chars: list[int] = []

    def add(self, token_id: int, logprobs: TokenLogprobs) -> None:
        token = self._tokenizer.token_text(token_id)
        row = (token, max(logprobs.chosen, _LEAST), _likeliest(self._tokenizer, token, logprobs))
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(_encode(value))
        self._chars.append(len(token))

    def pieces(self, prompt: PromptScores | None = None) -> Iterator[bytes]:
        before, offset = b"{", 0
        for name in _COLUMNS:
            yield before + b'"' + name + b'":['
            if prompt is not None:
                for piece, offset in prompt.column(name):  # noqa: B007 (the last one is used below)
                    yield piece
            column = self._columns.get(name)
            if column is None:
                starts = zip(accumulate(self._chars, initial=offset), self._chars, strict=False)
                column = [b"%d" % start for start, _ in starts]
            if prompt is not None and column:
                yield b","
            yield from _joined(column)
            before = b"],"
        yield b"]}"


class PromptScores:
    """Of the tokens of a prompt; the first has none. Encoded a few at a time: a prompt may be long."""

    def __init__(self, names: Names, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int) -> None:
        self._names, self._ids, self._logprobs, self._top = names, prompt_ids, logprobs, top

    def column(self, name: bytes) -> Iterator[tuple[bytes, int]]:
        """A column of `completion_logprobs`, in pieces, each with the characters of all tokens so far."""
        offset = 0
        for first in range(0, len(self._ids), _AT_ONCE):
            values: list[Any] = []
            for position, token_id in enumerate(self._ids[first : first + _AT_ONCE], first):
                token = self._names.token_text(token_id)
                values.append(self._value(name, position, token, offset))
                offset += len(token)
            yield (b"," if first else b"") + _encode(values)[1:-1], offset

    def _value(self, name: bytes, position: int, token: str, offset: int) -> Any:
        if name == b"tokens":
            return token
        if name == b"text_offset":
            return offset
        if position == 0:
            return None
        scores = self._logprobs[position - 1]
        if name == b"token_logprobs":
            return max(scores.chosen, _LEAST)
        return _likeliest(self._names, token, TokenLogprobs(scores.chosen, scores.top[: self._top]))

    def by_id(self) -> Iterator[bytes]:
        """vLLM's form: for each token, the scores by token id."""
        yield b"[null"
        for first in range(1, len(self._ids), _AT_ONCE):
            yield b"," + _encode([self._scores(p) for p in range(first, min(first + _AT_ONCE, len(self._ids)))])[1:-1]
        yield b"]"

    def _scores(self, position: int) -> dict[str, Any]:
        scores = self._logprobs[position - 1]
        ranked = {token_id: (score, rank) for rank, (token_id, score) in enumerate(scores.top[: self._top], 1)}
        # The rank of a token that is not among the likeliest is not computed.
        shown = {self._ids[position]: (scores.chosen, None), **ranked}
        return {
            str(token_id): {
                "logprob": max(score, _LEAST),
                "rank": rank,
                "decoded_token": self._names.token_text(token_id),
            }
            for token_id, (score, rank) in shown.items()
        }


def _token(tokenizer: Names, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [_scored(tokenizer, top_id, logprob) for top_id, logprob in logprobs.top]
    return _scored(tokenizer, token_id, logprobs.chosen) | {"top_logprobs": top}


def _scored(tokenizer: Names, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = tokenizer.spelling(token_id)
    return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(raw)}


def _likeliest(tokenizer: Names, token: str, logprobs: TokenLogprobs) -> dict[str, float]:
    """The chosen token is always listed, also when it is not among the likeliest."""
    scores = {tokenizer.token_text(i): max(score, _LEAST) for i, score in logprobs.top}
    return {token: max(logprobs.chosen, _LEAST)} | scores


def _joined(values: Sequence[bytes]) -> Iterator[bytes]:
    for first in range(0, len(values), _AT_ONCE):
        piece = b",".join(values[first : first + _AT_ONCE])
        yield piece if first == 0 else b"," + piece
