"""One checkpoint folder seen by both sides: transformers and ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from oracle.case import Case
from oracle.folders import save_case
from oracle.reference import Reference
from tripool.checkpoints import open_checkpoint
from tripool.kernels import CPU, REFERENCE
from tripool.models import Model, load_model

PROMPT_TOKENS = 197


@dataclass
class Pair:
    case: Case
    folder: Path
    reference: Reference
    models: Mapping[str, Model]
    """One for each kernel table that computes in float32, by the table's name."""
    prompt: list[int]
    """Long enough to cross three block borders."""
    logits: torch.Tensor
    """The reference's, for every position of `prompt`."""

    @property
    def model(self) -> Model:
        """What a user gets."""
        return self.models[CPU.name]


TABLES = [CPU, REFERENCE]
PairOf = Callable[[Case], Pair]


def random_tokens(vocab: int, count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


def make_pair(case: Case, folder: Path) -> Pair:
    save_case(case, folder)
    reference = Reference.load(folder)
    with open_checkpoint(folder) as checkpoint:
        models = {table.name: load_model(checkpoint, dtype=torch.float32, kernels=table) for table in TABLES}
    prompt = random_tokens(case.settings["vocab_size"], PROMPT_TOKENS, random.Random(case.name))
    return Pair(case, folder, reference, models, prompt, reference.logits(prompt))
