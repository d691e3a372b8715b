"""Every family's logits against transformers in float32: whole prompts, chunks, mixed batches, both attention forms.

Agreement is `oracle.close`: every logit of every position within 1e-5 of the largest.
"""

from __future__ import annotations

import random

import pytest
import torch

from oracle.case import Case
from oracle.cases import CASES
from oracle.close import assert_close
from oracle.driving import Track, chunked, deal_tables, mixed
from oracle.pairs import TABLES, Pair, PairOf
from tripool.core import BLOCK_TOKENS
from tripool.engine.runner import Runner

NUM_BLOCKS = 19

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_table = pytest.mark.parametrize("kernels", [table.name for table in TABLES])


def _runner(pair: Pair, table: str | None = None) -> Runner:
    """Its memory starts full of garbage: whatever reads a slot that nobody wrote is far off, not slightly."""
    runner = Runner(pair.models[table] if table else pair.model, num_blocks=NUM_BLOCKS)
    runner.kv.normal_(0.0, 100.0, generator=torch.Generator().manual_seed(1))
    return runner


def _table(pair: Pair, seed: int) -> list[int]:
    return deal_tables([len(pair.prompt)], NUM_BLOCKS, random.Random(seed))[0]


@every_case
def test_reference_logits_have_spread(case: Case, pair_of: PairOf) -> None:
    """Else agreement would prove little: a network that says the same everywhere is easy to match."""
    logits = pair_of(case).logits
    assert logits.std(-1).mean() > 1, "across the vocabulary"
    assert logits.std(0).mean() > 1, "across positions"
    assert len(logits.argmax(-1).unique()) > 20


@every_case
@every_table
def test_whole_prompt(case: Case, kernels: str, pair_of: PairOf) -> None:
    pair = pair_of(case)
    ours = chunked(_runner(pair, kernels), pair.prompt, _table(pair, 0), len(pair.prompt), decode=False)
    assert_close(ours, pair.logits)


@every_case
@pytest.mark.parametrize("chunk", [1, 7, 64, 65])
def test_prompt_in_chunks(case: Case, chunk: int, pair_of: PairOf) -> None:
    pair = pair_of(case)
    length = BLOCK_TOKENS + 6 if chunk == 1 else len(pair.prompt)  # token by token is slow and learns no more
    ours = chunked(_runner(pair), pair.prompt[:length], _table(pair, chunk), chunk, decode=False)
    assert_close(ours, pair.logits[:length])


@every_case
@every_table
def test_decode_form_agrees_with_prompt_form(case: Case, kernels: str, pair_of: PairOf) -> None:
    """For MLA: absorbed against expanded. Each form reads KV that it wrote itself."""
    pair = pair_of(case)
    expanded = chunked(_runner(pair, kernels), pair.prompt, _table(pair, 2), len(pair.prompt), decode=False)
    absorbed = chunked(_runner(pair, kernels), pair.prompt, _table(pair, 3), 13, decode=True)
    assert_close(absorbed, expanded)
    assert_close(absorbed, pair.logits)


@every_case
def test_mixed_batches_over_scattered_blocks(case: Case, pair_of: PairOf) -> None:
    """Five sequences at different progress, prompt chunks and decode rows in the same calls, in random order."""
    pair = pair_of(case)
    rng = random.Random(7)
    lengths = [len(pair.prompt), 64, 65, 130, 23]
    prompt_ends = [150, 64, 1, 127, 20]
    tables = deal_tables(lengths, NUM_BLOCKS, rng)
    tracks = [Track(pair.prompt[:n], t, end) for n, t, end in zip(lengths, tables, prompt_ends, strict=True)]
    runner = _runner(pair)
    before = runner.kv.clone()
    mixed(runner, tracks, rng)
    for track in tracks:
        assert_close(torch.cat(track.rows), pair.logits[: len(track.tokens)])
    owned = torch.zeros(NUM_BLOCKS, dtype=torch.bool)
    owned[[block for table in tables for block in table]] = True
    unowned = ~owned.repeat_interleave(BLOCK_TOKENS)
    assert unowned.any()
    assert torch.equal(runner.kv[:, unowned], before[:, unowned]), "wrote into blocks that belong to nobody"
