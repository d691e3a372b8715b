"""Conversations as tokens: written by the chat template, each token marked with what it counts.

The text of a document is exactly what an engine renders for the same messages, so that a model is trained on the very
tokens it will be asked with. Knows no tensor: processes that only write tokens do not load torch.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import tokenizers

from tripool.text import TextFiles, Tokenizer
from tripool.train.config import TrainError
from tripool.train.documents import Document

SKIPPED, PROMPT, ANSWER = 0, 1, 2
"""What a token is as a target: nothing to learn from, a prompt's, or an answer's."""
CUT_TOKENS = 8
"""Untrained at a cut: a few words before it, because a text about to break off is already not what one would say."""
_BATCH = 4096
_SPECIAL = "<|"


@dataclass(frozen=True, slots=True)
class Encoded:
    tokens: np.ndarray
    kinds: np.ndarray


class Writer:
    """Documents as tokens."""

    def __init__(self, text: TextFiles) -> None:
        self._chat = Tokenizer(text)
        self._library = tokenizers.Tokenizer.from_str(text.tokenizer_json)
        self._end = self._one(text.special_tokens.get("eos_token", "<|end|>"))
        self._assistant = self._one("<|assistant|>")
        self._roles = [self._assistant, self._one("<|user|>"), self._one("<|system|>")]
        self.pad = self._one(text.special_tokens.get("pad_token", "<|pad|>"))

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Documents that write a special token into their text are passed over: it would not be what it says."""
        usable = [one for one in documents if not any(_SPECIAL in m["content"] for m in one["messages"])]
        texts = [self._chat.render_chat(one["messages"], add_generation_prompt=False) for one in usable]
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [self._marked(e.ids, one["cut"]) for e, one in zip(encodings, usable, strict=True)]

    def _marked(self, ids: list[int], cut: bool) -> Encoded:
        tokens = np.asarray(ids, dtype=np.int32)
        if cut and len(tokens) and tokens[-1] == self._end:
            tokens = tokens[:-1]  # it did not end there
        places = np.arange(len(tokens))
        is_role = np.isin(tokens, self._roles)
        last_role = np.maximum.accumulate(np.where(is_role, places, -1))
        speaks = (last_role >= 0) & (tokens[np.maximum(last_role, 0)] == self._assistant)
        kinds = np.where(speaks & ~is_role, ANSWER, PROMPT).astype(np.uint8)
        kinds[:1] = SKIPPED  # nothing comes before it
        if cut:
            kinds[-CUT_TOKENS:] = SKIPPED
        return Encoded(tokens, kinds)

    def _one(self, token: str) -> int:
        found = self._library.token_to_id(token)
        if found is None:
            hint = "train with the text of a checkpoint whose chat template is ours, such as 'tiny'"
            raise TrainError(f"the tokenizer has no {token}", hint=hint, key="data.text")
        return int(found)


def encode_in_processes(text: TextFiles, documents: Sequence[Document], num_processes: int) -> list[Encoded]:
    """In the order of the documents."""
    batches = [documents[start : start + _BATCH] for start in range(0, len(documents), _BATCH)]
    if num_processes < 2 or len(batches) < 2:
        writer = Writer(text)
        return [one for batch in batches for one in writer.encode(batch)]
    # Started afresh: a process that already holds threads or a device must not be copied.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(batches)), context, _begin, (text,)) as pool:
        return [one for part in pool.map(_encode, batches) for one in part]


_own: list[Writer] = []
"""A worker process's own."""


def _begin(text: TextFiles) -> None:
    # One thread each: the library would otherwise start one per core in every process. Read when it is first used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _own.append(Writer(text))


def _encode(documents: Sequence[Document]) -> list[Encoded]:
    return _own[0].encode(documents)
