"""The tokens and the text files of the fake engine: no weights, no torch, the same tokens everywhere.

The engine itself is `PagedFake`. It uses token ids only; its tokenizer spells them.
"""

from __future__ import annotations

import json
from hashlib import blake2b

from tripool.core import FinishReason, Request, TokenLogprobs
from tripool.errors import InvalidRequest
from tripool.sequence import Guide, Sampled
from tripool.text.files import TextFiles

_WORDS = ("pool", "peer", "token", "cache", "block", "decode", "prefill", "expert", "route", "lease", "step", "batch")

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
        return self.sampled(request, digest, choice, index, token_id)

    def sampled(self, request: Request, digest: bytes, choice: int, index: int, token_id: int) -> Sampled:
        """With made-up log-probabilities, if they are asked for."""
        if request.params.logprobs is None:
            return Sampled(token_id)
        draw = blake2b(digest + repr((choice, index)).encode(), digest_size=8).digest()
        chosen = -(1 + draw[4]) / 256  # rises no higher than the first of the made-up alternatives below
        alternatives = ((token_id + step) % self.num_ids for step in range(request.params.logprobs))
        return Sampled(
            token_id, TokenLogprobs(chosen, tuple((t, chosen - rank) for rank, t in enumerate(alternatives)))
        )

    def prompt_scores(self, request: Request) -> list[TokenLogprobs]:
        """Made up too: a token's score follows from its id."""
        top = request.params.prompt_logprobs or 0
        return [
            TokenLogprobs(
                -token_id / 64, tuple(((token_id + i) % self.num_ids, -token_id / 64 - i) for i in range(top))
            )
            for token_id in request.prompt_ids[1:]
        ]

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
