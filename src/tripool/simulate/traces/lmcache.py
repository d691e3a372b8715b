"""LMCache's agent traces: texts with microseconds since 1970. A tokenizer gives lengths and shared prefixes. Pure.

Texts are encoded line by line, each line once: an agent's prompts repeat almost all of their lines. Ids stand for 64
tokens and all before them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from tripool.bench.trace import BadTrace, TraceRequest, number, parse_object, token_count
from tripool.core import BLOCK_TOKENS

PIECE_CHARS = 1024
"""A longer line is encoded in pieces of so many characters."""
_LINES = 2**17
"""Kept with their tokens."""


class TextTrace:
    """`encode`: tokens of a text, without those that begin a prompt."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        self._tokens = lru_cache(maxsize=_LINES)(lambda text: array("i", encode(text)))
        self._names: dict[tuple[int, bytes], int] = {}
        self.num_unanswered = 0
        """Requests without an answer; they are left out."""

    def parse(self, lines: Iterable[tuple[str, str]], *, max_requests: int | None = None) -> list[TraceRequest]:
        """`lines`: each with what it is called. In order of arrival, the first at 0."""
        found: list[tuple[float, int, int, tuple[int, ...]]] = []
        for where, line in lines:
            if max_requests is not None and len(found) >= max_requests:
                break
            if not line.strip():
                continue
            fields = parse_object(line, where)
            timestamp_us = number(fields, "timestamp", where, "microseconds since 1970")
            tokens = self._encode(_prompt(fields, where))
            num_answered = self._num_answered(fields, where)
            if not tokens:
                raise BadTrace(f"{where}: input is empty", hint="the prompt's text")
            if num_answered:
                found.append((timestamp_us, len(tokens), num_answered, self._chain(tokens)))
            else:
                self.num_unanswered += 1
        begin_us = min((each[0] for each in found), default=0.0)
        return [
            TraceRequest((timestamp_us - begin_us) / 1e6, prompt, answer, ids, block_tokens=BLOCK_TOKENS)
            for timestamp_us, prompt, answer, ids in sorted(found, key=lambda each: each[0])
        ]

    def _encode(self, text: str) -> array[int]:
        tokens = array("i")
        for line in text.splitlines(keepends=True):
            for start in range(0, len(line), PIECE_CHARS):
                tokens += self._tokens(line[start : start + PIECE_CHARS])
        return tokens

    def _num_answered(self, fields: dict[str, Any], where: str) -> int:
        output = fields.get("output")
        if output is None and "output_length" in fields:
            return token_count(fields, "output_length", where, least=0)
        if not isinstance(output, str):
            raise BadTrace(f"{where}: output is no text", hint="the answer's text, or output_length in tokens")
        return len(self._encode(output))

    def _chain(self, tokens: array[int]) -> tuple[int, ...]:
        raw, size, names = tokens.tobytes(), BLOCK_TOKENS * tokens.itemsize, self._names
        found, parent = [], -1
        for start in range(0, len(raw), size):
            parent = names.setdefault((parent, raw[start : start + size]), len(names))
            found.append(parent)
        return tuple(found)


def _prompt(fields: dict[str, Any], where: str) -> str:
    """A list of messages is taken as their JSON, one a line."""
    prompt = fields.get("input")
    if isinstance(prompt, list) and all(isinstance(each, dict) for each in prompt):
        return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in prompt)
    if not isinstance(prompt, str):
        raise BadTrace(f"{where}: input is no text", hint="the prompt's text, or a list of messages")
    return prompt
