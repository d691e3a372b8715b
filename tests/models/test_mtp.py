"""The multi-token-prediction layer against transformers' own, and on text that the bundled model wrote itself."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from oracle.case import Case
from oracle.close import assert_close
from oracle.deepseek_cases import V3
from oracle.drafts import DraftReference
from oracle.driving import deal_tables, greedy
from oracle.named import QUESTIONS
from oracle.pairs import PairOf
from tripool.checkpoints import open_checkpoint
from tripool.engine.runner import Runner, Work
from tripool.models import load_model
from tripool.text import Tokenizer

NUM_BLOCKS = 11

DraftsOf = Callable[[Case], torch.Tensor]

cases_with_mtp = pytest.mark.parametrize("case", [c for c in V3 if c.mtp], ids=lambda case: case.name)


@pytest.fixture(scope="module")
def drafts_of(pair_of: PairOf) -> DraftsOf:
    """The reference's draft logits for a case's prompt."""
    known: dict[str, torch.Tensor] = {}

    def get(case: Case) -> torch.Tensor:
        if case.name not in known:
            pair = pair_of(case)
            known[case.name] = DraftReference(pair.reference).logits(pair.prompt)
        return known[case.name]

    return get


def _drafted(runner: Runner, tokens: list[int], table: list[int], chunk: int, *, decode: bool) -> torch.Tensor:
    """Main network and draft layer in step, `chunk` tokens at a time; the last token has no successor to draft from."""
    rows = []
    for start in range(0, len(tokens) - 1, chunk):
        stop = min(start + chunk, len(tokens) - 1)
        hidden = runner.hidden([Work(tokens[start:stop], start, table, decode)])
        successors = Work(tokens[start + 1 : stop + 1], start + 1, table, decode)
        rows.append(runner.logits(runner.mtp_hidden([successors], hidden)))
    return torch.cat(rows)


@cases_with_mtp
@pytest.mark.parametrize(
    ("chunk", "decode"), [(196, False), (7, False), (64, False), (65, False), (1, True), (3, True)]
)
def test_draft_logits(case: Case, chunk: int, decode: bool, pair_of: PairOf, drafts_of: DraftsOf) -> None:
    pair = pair_of(case)
    runner = Runner(pair.model, num_blocks=NUM_BLOCKS, mtp=True)
    runner.kv.normal_(0.0, 100.0, generator=torch.Generator().manual_seed(1))
    table = deal_tables([len(pair.prompt)], NUM_BLOCKS, random.Random(chunk))[0]
    expected = drafts_of(case)
    assert_close(_drafted(runner, pair.prompt, table, chunk, decode=decode), expected)


@cases_with_mtp
def test_draft_rows_in_a_mixed_batch(case: Case, pair_of: PairOf, drafts_of: DraftsOf) -> None:
    """Decode rows given before prompt rows: each must meet its own hidden state again."""
    pair = pair_of(case)
    runner = Runner(pair.model, num_blocks=NUM_BLOCKS, mtp=True)
    first, second = deal_tables([70, 130], NUM_BLOCKS, random.Random(4))
    expected = drafts_of(case)
    hidden = runner.hidden([Work(pair.prompt[:66], 0, first, False)])
    runner.mtp_hidden([Work(pair.prompt[1:67], 1, first, False)], hidden)
    hidden = runner.hidden([Work(pair.prompt[66:68], 66, first, True), Work(pair.prompt[:129], 0, second, False)])
    work = [Work(pair.prompt[67:69], 67, first, True), Work(pair.prompt[1:130], 1, second, False)]
    ours = runner.logits(runner.mtp_hidden(work, hidden))
    assert_close(ours, torch.cat((expected[66:68], expected[:129])))


def test_a_promised_layer_may_be_absent(pair_of: PairOf) -> None:
    """transformers writes the promise into every config, whatever it saves."""
    for case in V3:
        pair = pair_of(case)
        assert pair.model.arch.mtp_layers == 1
        assert (pair.model.mtp is not None) == case.mtp


def test_bundled_model_drafts_its_own_text() -> None:
    """The layer is used the way it was trained: most drafts are what the network then says itself.

    With the halves of its input swapped, one in thirty would be: this tells the conventions apart.
    """
    with open_checkpoint("tiny") as checkpoint:
        model = load_model(checkpoint, dtype=torch.float32)
        tokenizer = Tokenizer(checkpoint.text)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS[:4]]
    runner = Runner(model, num_blocks=4 * len(prompts), mtp=True)
    tables = deal_tables([128] * len(prompts), 4 * len(prompts), random.Random(0))
    answers = greedy(runner, prompts, tables, 80)
    agreed = []
    for prompt, answer, table in zip(prompts, answers, tables, strict=True):
        text = [*prompt, *answer]
        hidden = runner.hidden([Work(text, 0, table, False)])
        drafts = runner.logits(runner.mtp_hidden([Work(text[1:], 1, table, False)], hidden[:-1])).argmax(-1)
        agreed.append(drafts == runner.logits(hidden[1:]).argmax(-1))
    assert torch.cat(agreed).float().mean() > 0.6
