"""A model that answers many questions at once, from the first token to the last without a word to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tiny.drafts.decode_loop import DecodeLoop
from tripool.core import BLOCK_TOKENS, Conversation
from tripool.engine.device import DeviceSpec, load_on
from tripool.engine.noise import stream_base
from tripool.text import Tokenizer
from tripool.train.config import TrainError
from tripool.train.encode import ANSWER, PROMPT, SKIPPED, Encoded

PROMPT_TOKENS, ANSWER_TOKENS = 128, 192
"""Most of each. A longer question is passed over, a longer answer is cut."""
_MOST_PASSED_OVER = 1000
TEMPERATURES = (0.7, 0.7, 0.7, 1.0)
"""In turn: mostly as the model is asked, some of it wider."""


class Speaker:
    """`rows` questions are answered together. Who has ended speaks on, and what is said then is thrown away."""

    def __init__(self, device_spec: DeviceSpec, model: str, *, rows: int, seed: int) -> None:
        _, text, network = load_on(device_spec, model)
        self._tokenizer, self._ends, self._rows, self._seed = Tokenizer(text), text.end_ids, rows, seed
        blocks = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_TOKENS)
        tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
        self._loop = DecodeLoop(device_spec.runner(network, rows * blocks, mtp=False), tables, count=ANSWER_TOKENS)
        self._temperatures = [TEMPERATURES[row % len(TEMPERATURES)] for row in range(rows)]
        self._asked = 0

    @torch.inference_mode()
    def answers(self, questions: Iterator[Conversation]) -> list[Encoded]:
        """Of the next questions, one for each row."""
        prompts: list[list[int]] = []
        passed_over = 0
        while len(prompts) < self._rows:
            ids = self._tokenizer.encode_chat(next(questions))
            if len(ids) <= PROMPT_TOKENS:
                prompts.append(ids)
                passed_over = 0
            elif (passed_over := passed_over + 1) > _MOST_PASSED_OVER:
                hint = f"what the chat template adds must fit into {PROMPT_TOKENS} tokens with the question"
                raise TrainError("every question is too long", hint=hint)
        bases = [stream_base(self._seed, self._asked + row) for row in range(self._rows)]
        self._asked += self._rows
        self._loop.sample_with(self._temperatures, bases)
        answers = self._loop.run(prompts)
        return [self._document(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _document(self, prompt: Sequence[int], answer: Sequence[int]) -> Encoded:
        length = next((i for i, token in enumerate(answer, 1) if token in self._ends), len(answer))
        kinds = np.full(len(prompt) + length, ANSWER, dtype=np.uint8)
        kinds[: len(prompt)], kinds[0] = PROMPT, SKIPPED
        return Encoded(np.asarray([*prompt, *answer[:length]], dtype=np.int32), kinds)
