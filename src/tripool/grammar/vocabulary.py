"""A model's tokens as llguidance wants them: bytes by id. What a token spells is what the detokenizer will print.

Ids that a grammar's text can never use: special tokens, ends, and those a model has beyond its tokenizer. All ends are
kept from llguidance, which is given one of its own behind the last real id: how an answer may end differs from request
to request, and llguidance does not count an end when it rolls back.
"""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from tripool.text import Tokenizer
from tripool.text.files import TextFiles


def read_vocabulary(text: TextFiles, num_ids: int) -> LLTokenizer:
    """Of ids 0 to `num_ids` - 1 and, behind them, llguidance's end. Takes about 5 µs per id."""
    spelling = _Spelling(text, num_ids)
    vocabulary = LLTokenizer(TokenizerWrapper(spelling), eos_token=num_ids)
    spelling.vocabulary = vocabulary
    return vocabulary


class _Spelling:
    """What `TokenizerWrapper` asks for, under its names."""

    def __init__(self, text: TextFiles, num_ids: int) -> None:
        self._tokenizer = Tokenizer(text)
        self._bans = self._tokenizer.special_ids | text.end_ids
        self.eos_token_id = num_ids
        self.bos_token_id = None
        self.tokens = [self._tokenizer.token_bytes(token_id) for token_id in range(num_ids)] + [b""]
        self.special_token_ids = sorted({i for i in self._bans if i < num_ids} | {num_ids})
        self.vocabulary: LLTokenizer | None = None

    def __call__(self, raw: bytes) -> list[int]:
        """How the model itself would cut a text that a grammar leaves no choice about.

        Some tokenizers cannot say: they read "<|end|>" as a mark, or put a space in front of every text.
        """
        ids = self._tokenizer.encode(raw.decode(), special=False)
        told = all(i < len(self.tokens) and i not in self._bans for i in ids)
        if not told or b"".join(self.tokens[i] for i in ids) != raw:
            assert self.vocabulary is not None
            return self.vocabulary.greedy_tokenize(raw.decode())
        return ids
