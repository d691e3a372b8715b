"""Answers under idempotency keys: random lives, and the rules one by one."""

from __future__ import annotations

from collections import Counter

import pytest

from .kept_lives import FOR_EVER, live


def test_every_reader_gets_every_token_once_whatever_dies() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += live(seed).seen
    for what, times in {
        "takeovers": 100, "gateways killed": 150, "repeats": 1000, "resumed": 100, "joined while it is read": 100,
        "joined when it is done": 100, "joined when it is alone": 20,
    }.items():  # fmt: skip
        assert seen[what] >= times, (what, seen)


@pytest.mark.parametrize("takeovers", [False, True])
def test_an_answer_is_computed_once_and_counted_once(takeovers: bool) -> None:
    """Over gateways that die, and repeats at any time; after a takeover what the log did not have is computed again,
    and not counted again."""
    for seed in range(30):
        life = live(seed, limits=FOR_EVER, takeovers=takeovers)
        counted: Counter[str] = Counter()
        prompts: Counter[str] = Counter()
        for count in life.counts.values():
            answer = count.id.rpartition(".")[0].rpartition(".")[0]
            counted[answer] += sum(usage.completion_tokens for usage in count.usages)
            prompts[answer] += sum(usage.prompt_tokens > 0 for usage in count.usages)
        for asked in life.asked.values():
            most = [asked.n * length for length in asked.lengths]
            made = [life.num_made[asked.answer, place] for place in range(len(most))]
            assert counted[asked.answer] <= sum(most) and prompts[asked.answer] <= len(most)
            if takeovers:
                continue
            assert all(one <= limit for one, limit in zip(made, most, strict=True)), "computed again"
            if asked.stop_at is None:
                assert counted[asked.answer] == sum(made), "tokens that were made are not counted"
