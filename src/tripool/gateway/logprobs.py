"""Log-probabilities in OpenAI's two formats: per token for a chat, in columns for a completion.

A stream shows them token by token. For a whole answer each is encoded as it arrives: encoding all of them at the end
would block the event loop for a long time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


class CompletionScores:
    """The bytes of `completion_logprobs`."""

    def __init__(self, tokenizer: Names) -> None:
        self._tokenizer = tokenizer
        self._columns: dict[bytes, list[bytes]] = {
            name: [] for name in (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")
        }
        self._text_offset = 0

    def add(self, token_id: int, logprobs: TokenLogprobs) -> None:
        token = self._tokenizer.token_text(token_id)
        row = (
            token,
            max(logprobs.chosen, _LEAST),
            _likeliest(self._tokenizer, token, logprobs),
            self._text_offset,
        )
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(_encode(value))
        self._text_offset += len(token)

    def pieces(self) -> Iterator[bytes]:
        before = b"{"
        for name, column in self._columns.items():
            yield before + b'"' + name + b'":['
            yield from _joined(column)
            before = b"],"
        yield b"]}"


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
