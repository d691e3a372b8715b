"""Waiting for room, however long, is no loss: what is larger than the machine takes turns, and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tripool.core import Request, SamplingParams
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake

from .in_process import Fleet

TEXT = fake_text()


@pytest.mark.parametrize(("n", "num_tokens", "num_blocks"), [(12, 200, 16), (8, 440, 36)], ids=["wait", "preempted"])
def test_far_more_choices_than_there_is_memory_for_come_to_their_end(
    tmp_path: Path, n: int, num_tokens: int, num_blocks: int
) -> None:
    """All of one request: those that wait for minutes behind the others are neither lost nor given up."""
    prefill, decode = PagedFake(TEXT, max_running=8), PagedFake(TEXT, num_blocks=num_blocks, max_running=8)
    fleet = Fleet(tmp_path, [prefill], [decode], turn_s=0.5)
    params = SamplingParams(n=n, max_tokens=num_tokens, ignore_eos=True)
    fleet.run([Request(id="r", prompt_ids=(9, 9), params=params, seed=1, end_ids=TEXT.end_ids)])
    fleet.close()
    assert not fleet.failed, fleet.failed
    assert {choice: len(told) for (_, choice), told in fleet.events.items()} == dict.fromkeys(range(n), num_tokens)
    assert fleet.now_s > 120
