"""Incremental decoding: one token in, the text it adds out. Independent of stop strings and requests.

The `tokenizers` library decodes a whole list at once. Decoding the list again for every new token is quadratic, and
decoding only its end is wrong: decoders treat the first token specially and characters span tokens. So the decoder's
description is read once into a `DecoderPlan`, whose streams keep the few bytes of state that decoding needs. Decoders
that no supported model uses (word pieces, CTC, regular expressions) are refused by name when loading.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from tripool.errors import WrongArchitecture

ByteRule = Literal["none", "utf8", "fallback"]
"""How bytes become text. utf8: every token is bytes. fallback: tokens such as <0x0A> are bytes, the others are text."""

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The visible characters that byte-level BPE writes for bytes: Latin-1's own, then 256 onwards."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:  # an added token outside the alphabet is its own text, as in the library
        return token.encode()


class Stage(Protocol):
    """One text-to-text step. `state` is 0 at the beginning of the text and `middle` anywhere later."""

    @property
    def middle(self) -> int: ...

    def apply(self, text: str, state: int) -> tuple[str, int]: ...


@dataclass(frozen=True, slots=True)
class Replace:
    old: str
    new: str
    middle: int = 0

    def apply(self, text: str, state: int) -> tuple[str, int]:
        return text.replace(self.old, self.new), state


@dataclass(frozen=True, slots=True)
class Metaspace:
    """The mark of a word's beginning becomes a space, except in the first token if the encoder added it."""

    mark: str
    first_is_dropped: bool
    middle: int = 1

    def apply(self, text: str, state: int) -> tuple[str, int]:
        dropped = self.first_is_dropped and state == 0
        return text.replace(self.mark, "" if dropped else " "), 1


@dataclass(frozen=True, slots=True)
class Strip:
    """Drops up to `limit` leading `char`s: of every token, or (fused) of the text. State counts those dropped."""

    char: str
    limit: int
    fused: bool

    @property
    def middle(self) -> int:
        return self.limit if self.fused else 0

    def apply(self, text: str, state: int) -> tuple[str, int]:
        dropped = state if self.fused else 0
        cut = 0
        while dropped < self.limit and cut < len(text):
            if text[cut] != self.char:
                dropped = self.limit
            else:
                dropped, cut = dropped + 1, cut + 1
        return text[cut:], dropped


@dataclass(frozen=True, slots=True)
class Separate:
    """A tokenizer without a decoder puts a space between its tokens."""

    middle: int = 0  # a single token has no separator

    def apply(self, text: str, state: int) -> tuple[str, int]:
        return (" " + text if state else text), 1


class Step(NamedTuple):
    """What one token does to the text."""

    text: str
    """Text to append. Never contains part of a character."""
    void: bool = False
    """First remove what was appended since the last settled step."""
    settled: bool = True
    """Everything up to here is final."""


class Pieces(Protocol):
    """Turns decoded tokens into text."""

    def push(self, piece: str) -> Step: ...

    def finish(self) -> Step: ...


class _PlainPieces:
    def push(self, piece: str) -> Step:
        return Step(piece)

    def finish(self) -> Step:
        return Step("")


class _Utf8Pieces:
    """Byte-level tokens: an unfinished character is held back, an invalid one becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> Step:
        return Step(self._decoder.decode(_byte_level(piece)))

    def finish(self) -> Step:
        return Step(self._decoder.decode(b"", True))


class _FallbackPieces:
    """Tokens of text with runs of byte tokens between them.

    The library decodes a run as a whole: text if all of it is UTF-8, else one U+FFFD per byte. So a run's characters
    are provisional until a text token ends it, and final (as U+FFFD) as soon as one byte does not fit.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._run_bytes = 0
        self._broken = False

    def push(self, piece: str) -> Step:
        match = _BYTE_TOKEN.fullmatch(piece)
        if match is None:
            end = self.finish()
            return end._replace(text=end.text + piece)
        self._run_bytes += 1
        if self._broken:
            return Step(REPLACEMENT)
        try:
            return Step(self._decoder.decode(bytes.fromhex(match[1])), settled=False)
        except UnicodeDecodeError:
            self._broken = True
            return Step(REPLACEMENT * self._run_bytes, void=True)

    def finish(self) -> Step:
        run_bytes, broken = self._run_bytes, self._broken
        self._run_bytes, self._broken = 0, False
        if broken:
            self._decoder.reset()
            return Step("")
        try:
            return Step(self._decoder.decode(b"", True))
        except UnicodeDecodeError:
            self._decoder.reset()
            return Step(REPLACEMENT * run_bytes, void=True)


_PIECES: dict[ByteRule, Callable[[], Pieces]] = {
    "none": _PlainPieces,
    "utf8": _Utf8Pieces,
    "fallback": _FallbackPieces,
}


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """Stages on each token, then bytes to text, then stages on the text."""

    before: tuple[Stage, ...]
    byte_rule: ByteRule
    after: tuple[Stage, ...]

    def token_bytes(self, token: str) -> bytes:
        """The bytes of a token in the middle of a text."""
        for stage in self.before:
            token, _ = stage.apply(token, stage.middle)
        if self.byte_rule == "utf8":
            return _byte_level(token)  # later stages need text, and a token may be part of a character
        if self.byte_rule == "fallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for stage in self.after:
            token, _ = stage.apply(token, stage.middle)
        return token.encode()


class TextStream:
    """The text of one growing sequence of tokens; its state is a few numbers and at most one unfinished run."""

    def __init__(self, plan: DecoderPlan) -> None:
        self._plan = plan
        self._pieces = _PIECES[plan.byte_rule]()
        self._before = [0] * len(plan.before)
        self._after = [0] * len(plan.after)

    def push(self, token: str) -> Step:
        for i, stage in enumerate(self._plan.before):
            token, self._before[i] = stage.apply(token, self._before[i])
        return self._finish_step(self._pieces.push(token))

    def finish(self) -> Step:
        """Settles what is open: no more tokens follow."""
        return self._finish_step(self._pieces.finish())

    def _finish_step(self, step: Step) -> Step:
        # States are not reverted with a void step's text: its replacement begins with U+FFFD, which ends stripping.
        text = step.text
        for i, stage in enumerate(self._plan.after):
            text, self._after[i] = stage.apply(text, self._after[i])
        return step._replace(text=text)


def read_decoder(description: Mapping[str, Any] | None) -> DecoderPlan:
    """From the `decoder` entry of a tokenizer.json. Refuses, by name, what it could not stream exactly."""
    if description is None:
        return DecoderPlan((Separate(),), "none", ())
    before: list[Stage] = []
    after: list[Stage] = []
    byte_rule: ByteRule = "none"
    fused = False
    for part in _flatten(description):
        per_token = byte_rule == "none" and not fused
        match part:
            case {"type": "ByteLevel"} if per_token:
                byte_rule, fused = "utf8", True
            case {"type": "ByteFallback"} if per_token:
                byte_rule = "fallback"
            case {"type": "Fuse"}:
                fused = True
            # After tokens are joined, a longer pattern could match across two of them.
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old and (
                per_token or len(old) == 1
            ):
                (before if per_token else after).append(Replace(old, new))
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)} if per_token:
                before.append(Metaspace(mark, first_is_dropped=scheme != "never"))
            case {"type": "Strip", "content": str(char), "start": int(limit), "stop": 0} if per_token or fused:
                (before if per_token else after).append(Strip(char, limit, fused))
            case _:
                problem = f"the tokenizer's decoder has a part this version cannot stream: {dict(part)}"
                hint = "byte-level decoders and byte-fallback decoders of the Llama kind are supported"
                raise WrongArchitecture(problem, hint=hint, file="tokenizer.json")
    return DecoderPlan(tuple(before), byte_rule, tuple(after))


def _flatten(description: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if description.get("type") == "Sequence":
        for part in description["decoders"]:
            yield from _flatten(part)
    else:
        yield description
