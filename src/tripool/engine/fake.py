"""A deterministic stand-in for the engine: no weights, no torch, the same tokens everywhere.

It keeps an engine's promises (limits, choices, stops, cancel, prefix reuse) and nothing of its cost, so that the whole
walk from HTTP to text runs in milliseconds. It knows token ids only; what they spell is the tokenizer's business.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tripool.cache import stretches
from tripool.core import BLOCK_TOKENS, FinishReason, Request, ServingStats, TokenEvent, TokenLogprobs
from tripool.errors import ContextOverflow, InvalidRequest
from tripool.grammar import GrammarCompiler
from tripool.sequence import Guide, Sampled
from tripool.text.files import TextFiles

_WORDS = ("pool", "peer", "token", "cache", "block", "decode", "prefill", "expert", "route", "lease", "step", "batch")

_logger = logging.getLogger("tripool.engine")

_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def fake_text() -> TextFiles:
    """A small byte-level tokenizer with a few words of its own and a chat template."""
    specials = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = {piece: index for index, piece in enumerate([*specials, *_byte_letters()])}
    merges: list[list[str]] = []
    for word in _WORDS:
        piece = "Ġ"  # how the byte-level alphabet writes a space
        for letter in word:
            if piece + letter not in vocab:
                merges.append([piece, letter])
                vocab[piece + letter] = len(vocab)
            piece += letter
    added = [{"id": vocab[text], "content": text, "special": True} | _EXACT for text in specials]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": merges}
    tokenizer = {"added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    return TextFiles(
        tokenizer_json=json.dumps(tokenizer),
        chat_template=_TEMPLATE,
        special_tokens={"eos_token": "<|end|>"},
        end_ids=frozenset({vocab["<|end|>"]}),
    )


_EXACT = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _byte_letters() -> list[str]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for letters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class FakeTokens:
    """Which token comes next: a hash of (prompt, seed, choice, index), bent to the request's wishes."""

    def __init__(self, text: TextFiles) -> None:
        tokenizer = json.loads(text.tokenizer_json)
        specials = {token["id"] for token in tokenizer["added_tokens"]}
        vocab: dict[str, int] = tokenizer["model"]["vocab"]
        plain = {piece: token_id for piece, token_id in vocab.items() if token_id not in specials}
        # Single letters of a byte-level vocabulary are often half a character; answers read better without them.
        self._plain_ids = sorted(i for piece, i in plain.items() if len(piece) > 1) or sorted(plain.values())
        self._closing_ids = frozenset(vocab[piece] for piece in '"}])' if piece in vocab)
        self.num_ids = 1 + max([*vocab.values(), *specials])

    def digest(self, request: Request) -> bytes:
        return blake2b(repr((request.prompt_ids, request.seed)).encode(), digest_size=16).digest()

    def check(self, request: Request) -> None:
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty", hint="send at least one token", param="prompt")
        if not all(0 <= token_id < self.num_ids for token_id in request.prompt_ids):
            hint = f"ids of this model run from 0 to {self.num_ids - 1}"
            raise InvalidRequest("the prompt holds an unknown token id", hint=hint, param="prompt")

    def choose(self, request: Request, digest: bytes, choice: int, index: int, guide: Guide | None) -> Sampled:
        params = request.params
        draw = blake2b(digest + repr((choice, index)).encode(), digest_size=8).digest()
        late = index + 1 >= max(_natural_tokens(digest, choice), params.min_tokens + 1)
        if guide is not None:
            token_id = self._guided(guide, int.from_bytes(draw[:4]), request.stop_ids, late=late)
        else:
            token_id = self._plain_ids[int.from_bytes(draw[:4]) % len(self._plain_ids)]
            if late and not params.ignore_eos:
                token_id = min(request.end_ids, default=token_id)
        if params.logprobs is None:
            return Sampled(token_id)
        chosen = -(1 + draw[4]) / 256  # rises no higher than the first of the made-up alternatives below
        alternatives = ((token_id + step) % self.num_ids for step in range(params.logprobs))
        return Sampled(
            token_id, TokenLogprobs(chosen, tuple((t, chosen - rank) for rank, t in enumerate(alternatives)))
        )

    def answer(self, request: Request, choice: int) -> tuple[list[int], FinishReason]:
        """What an undisturbed run without a grammar gives."""
        digest = self.digest(request)
        tokens: list[int] = []
        finish: FinishReason | None = None
        while finish is None:
            tokens.append(self.choose(request, digest, choice, len(tokens), None).token_id)
            finish = finish_of(request, len(tokens), tokens[-1])
        return tokens, finish

    def _guided(self, guide: Guide, draw: int, stop_ids: frozenset[int], *, late: bool) -> int:
        """Any token that the grammar allows: words while it is early, later whatever brings the answer to its end."""
        allowed: list[int] = guide.mask().nonzero()[0].tolist()
        wishes = (stop_ids, self._closing_ids) if late else (frozenset(self._plain_ids),)
        fitting = next((fit for wish in wishes if (fit := [i for i in allowed if i in wish])), allowed)
        return fitting[draw % len(fitting)]


def finish_of(request: Request, num_tokens: int, token_id: int) -> FinishReason | None:
    """Whether an answer of so many tokens ends with this one."""
    params = request.params
    ended = token_id in request.end_ids and not params.ignore_eos
    if num_tokens > params.min_tokens and (ended or token_id in params.stop_token_ids):
        return "stop"
    return "length" if num_tokens == params.max_tokens else None


def _natural_tokens(digest: bytes, choice: int) -> int:
    """How long the answer is when nothing else ends it."""
    draw = blake2b(digest + repr(("length", choice)).encode(), digest_size=1).digest()
    return 8 + draw[0] % 32


@dataclass(slots=True)
class _Running:
    """A request inside the fake: how many tokens each unfinished choice has."""

    request: Request
    digest: bytes
    num_cached_tokens: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)
    guides: Sequence[Guide] | None = None
    """One per choice, when the answers must have a structure."""


class FakeEngine:
    """Token `index` of a choice is a hash of (prompt, seed, choice, index); answers end after 8 to 39 tokens."""

    def __init__(
        self,
        text: TextFiles,
        *,
        name: str = "fake",
        context_tokens: int = 2048,
        max_running: int = 64,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self._tokens = FakeTokens(text)
        self._grammars = GrammarCompiler(text, self._tokens.num_ids)
        self.name, self.text = name, text
        self.context_tokens = context_tokens
        self.weight_bytes, self.kv_bytes = 0, 0
        self._max_running, self._block_tokens = max_running, block_tokens
        self._open: dict[str, _Running] = {}
        self._known_blocks: set[tuple[str, int, tuple[int, ...]]] = set()
        self.started: list[str] = []
        self._failed: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def open_requests(self) -> frozenset[str]:
        """What still holds a place: empty once every request is finished or cancelled."""
        return frozenset(self._open)

    def prepare(self, request: Request) -> Future[Any] | None:
        structure = request.params.structure
        return None if structure is None else self._grammars.prepare(structure, request.namespace)

    def add(self, request: Request) -> None:
        assert request.id not in self._open, f"request id {request.id} is used twice"
        self._tokens.check(request)
        asked = len(request.prompt_ids) + (request.params.max_tokens or 1)
        if asked > self.context_tokens:
            hint = "shorten the prompt or ask for fewer tokens"
            raise ContextOverflow(f"{asked} tokens exceed the context of {self.context_tokens}", hint=hint)
        guides: Sequence[Guide] | None = None
        structure = request.params.structure
        if structure is not None:
            known: list[tuple[int, ...]] = [()] * request.params.n
            guides = self._grammars.guides(structure, request.stop_ids, known, request.namespace)
        self._open[request.id] = _Running(request, self._tokens.digest(request), guides=guides)

    def cancel(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def stats(self) -> ServingStats:
        """A running choice holds one of `max_running` places, as if it were its KV."""
        opened = list(self._open.values())
        running = sum(len(request.num_tokens) for request in opened)
        waiting = sum(request.request.params.n for request in opened if not request.num_tokens)
        return ServingStats(running=running, waiting=waiting, kv_usage=min(1.0, running / self._max_running))

    def step(self) -> list[TokenEvent]:
        """One token for every unfinished choice of the requests that fit, oldest first."""
        events: list[TokenEvent] = []
        self.started = []
        for running in list(self._open.values()):
            choices = running.num_tokens or dict.fromkeys(range(running.request.params.n), 0)
            if events and len(events) + len(choices) > self._max_running:
                break
            if not running.num_tokens:
                running.num_tokens = choices
                self.started.append(running.request.id)
                running.num_cached_tokens = self._reuse_prefix(running.request)
            try:
                events += [self._advance(running, choice) for choice in list(choices)]
            except Exception:
                _logger.exception("request %s failed", running.request.id)
                self._failed.append(running.request.id)
                running.num_tokens.clear()
            if not running.num_tokens:
                del self._open[running.request.id]
        return events

    def take_failed(self) -> list[str]:
        failed, self._failed = self._failed, []
        return failed

    def _advance(self, running: _Running, choice: int) -> TokenEvent:
        request, index = running.request, running.num_tokens[choice]
        guide = running.guides[choice] if running.guides is not None else None
        sampled = self._tokens.choose(request, running.digest, choice, index, guide)
        if guide is not None:
            guide.accept(sampled.token_id)
        finish = self._finish(request, index, sampled.token_id, guide)
        if finish:
            del running.num_tokens[choice]
        else:
            running.num_tokens[choice] += 1
        cached = running.num_cached_tokens
        return TokenEvent(request.id, choice, index, sampled.token_id, finish, sampled.logprobs, cached)

    def _finish(self, request: Request, index: int, token_id: int, guide: Guide | None) -> FinishReason | None:
        if guide is not None and (token_id in request.stop_ids or guide.spent):
            return "stop" if guide.done else "length"
        full = len(request.prompt_ids) + index + 1 >= self.context_tokens
        return finish_of(request, index + 1, token_id) or ("length" if full else None)

    def _reuse_prefix(self, request: Request) -> int:
        """Whole blocks already seen in this namespace, or public ones; at least one prompt token is always computed."""
        prompt, size = request.prompt_ids, self._block_tokens
        num_public = request.public_tokens // size
        prefixes = [
            (namespace, first, prompt[: (number + 1) * size])
            for namespace, first, stop in stretches(request.namespace, num_public, (len(prompt) - 1) // size)
            for number in range(first, stop)
        ]
        cached = next((i for i, prefix in enumerate(prefixes) if prefix not in self._known_blocks), len(prefixes))
        self._known_blocks.update(prefixes)
        return cached * size
