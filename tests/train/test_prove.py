"""Three minutes on a CPU: long enough to see a network learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.small import write_documents
from tripool.train.config import read_config
from tripool.train.metrics import read_metrics
from tripool.train.run import train


@pytest.mark.prove
def test_in_three_minutes_the_loss_falls(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", 20_000)
    trained = train(read_config("smoke"), corpus, tmp_path / "run", minutes=3.0)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    first, last = (sum(some) / len(some) for some in (losses[:5], losses[-20:]))
    assert len(losses) > 50
    assert first > 7 and last < 2.5
    assert trained.held_out["held_out_loss"] < 2.5
    assert trained.held_out["draft_agreement"] > 0.5
