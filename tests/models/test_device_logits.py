"""Every family's logits on a device in float32 against transformers: prompts, chunks, and captured decode steps.

On a CUDA device if there is one, else with the CPU for a device. The reference runs on the CPU.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from oracle.case import Case
from oracle.cases import FAMILIES
from oracle.close import WITHIN, assert_close
from oracle.driving import chunked, deal_tables, greedy
from oracle.folders import save_case
from oracle.pairs import PROMPT_TOKENS, random_tokens
from oracle.reference import Reference, differences
from tripool.engine.device import DeviceSpec, load_on
from tripool.engine.device_runner import DeviceRunner

SPEC = DeviceSpec(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
AGREED = 5 * WITHIN if torch.cuda.is_available() else WITHIN
"""A GPU adds in yet another order, and its exponentials are others."""
NUM_BLOCKS = 24
NUM_TOKENS = 24
PROMPT_LENGTHS = (5, 64)
SHORT = 70
"""Tokens taken one by one: past a block's border."""
CASES = [case for family in FAMILIES for case in family[: 2 if torch.cuda.is_available() else 1]]


def _runner(folder: Path) -> DeviceRunner:
    """Its memory starts full of garbage, so that a slot that is read before it is written shows."""
    _, _, model = load_on(SPEC, str(folder))
    runner = SPEC.runner(model, NUM_BLOCKS, mtp=False)
    runner.kv.normal_(0.0, 100.0, generator=torch.Generator(SPEC.device).manual_seed(1))
    return runner


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    save_case(case, tmp_path)
    reference, runner, rng = Reference.load(tmp_path), _runner(tmp_path), random.Random(case.name)
    vocab = case.settings["vocab_size"]
    prompt = random_tokens(vocab, PROMPT_TOKENS, rng)
    expected = reference.logits(prompt)
    for count, chunk, decode in (
        (len(prompt), len(prompt), False), (len(prompt), 65, False), (len(prompt), 13, True), (SHORT, 1, True)
    ):  # fmt: skip
        (table,) = deal_tables([count], NUM_BLOCKS, rng)
        ours = chunked(runner, prompt[:count], table, chunk, decode=decode).cpu()
        assert_close(ours, expected[:count], within=AGREED)
    for length in PROMPT_LENGTHS:
        prompts = [random_tokens(vocab, length, rng) for _ in range(3)]
        tables = deal_tables([length + NUM_TOKENS] * len(prompts), NUM_BLOCKS, rng)
        _, wrong = differences(greedy(runner, prompts, tables, NUM_TOKENS), reference.greedy(prompts, NUM_TOKENS))
        assert wrong == [], length
