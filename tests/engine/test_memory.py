"""Sizes by what a device has: KV fills what is left, steps fill the experts, and too little is refused with numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.core import BLOCK_TOKENS
from tripool.engine.memory import DeviceBytes, LargestStep, default_step_tokens, kv_blocks, kv_blocks_beside
from tripool.errors import DeviceOutOfMemory

GB = 2**30
LITE_BLOCK = 27 * BLOCK_TOKENS * 576 * 2
H200 = 139 * GB


@given(
    free=st.integers(8 * GB, H200),
    step=st.integers(0, 4 * GB),
    block=st.integers(2**12, 2**23),
)
def test_kv_takes_what_is_left_to_the_last_block(free: int, step: int, block: int) -> None:
    margin = max(GB, H200 // 50)
    count = kv_blocks_beside(step, DeviceBytes(free, H200), block)
    held = (count + 1) * block  # one more for padding rows
    assert held <= free - step - margin < held + block


def test_an_h200_with_a_model_of_16_gb() -> None:
    count = kv_blocks_beside(2 * GB, DeviceBytes(122 * GB, H200), LITE_BLOCK)
    assert 115 * GB < count * LITE_BLOCK < 118 * GB


def test_too_little_for_kv_is_refused_with_what_is_needed_what_is_free_and_what_to_do() -> None:
    with pytest.raises(DeviceOutOfMemory) as refused:
        kv_blocks_beside(3 * GB, DeviceBytes(5 * GB, H200), LITE_BLOCK)
    text = str(refused.value)
    assert "a step of 3.0 GB" in text and "5.0 GB of 139.0 GB are free" in text
    assert all(option in text for option in ("--kv-gb", "--step-tokens", "INT8"))
    needed = float(text.partition(" GB needed")[0].rpartition(" ")[2])
    assert needed == pytest.approx(3 + 139 / 50 + 17 * LITE_BLOCK / GB, abs=0.06), (
        "step, margin, and 1,024 tokens of KV"
    )


@pytest.mark.parametrize(("kv_gb", "count"), [(None, 8 * 32), (0.001, 2), (1.0, 1024)])
def test_without_measuring_kv_has_a_few_contexts_or_what_was_asked_for(kv_gb: float | None, count: int) -> None:
    assert kv_blocks(2**20, 32 * BLOCK_TOKENS, kv_gb) == count
    assert kv_blocks(2**20, 10**6, None) * 2**20 == 2 * GB


@pytest.mark.parametrize(
    ("total", "experts", "top_k", "tokens"),
    [
        (H200, 1, 1, 2048),  # dense: Llama-3-8B
        (H200, 64, 6, 4096),  # DeepSeek-V2-Lite
        (H200, 128, 8, 4096),  # Qwen3-30B-A3B
        (H200, 256, 8, 8192),  # DeepSeek-V3
        (80 * GB, 256, 8, 4096),
        (24 * GB, 256, 8, 2048),
        (8 * GB, 1, 1, 2048),
    ],
)
def test_step_tokens_fill_the_experts_within_memory(total: int, experts: int, top_k: int, tokens: int) -> None:
    assert default_step_tokens(total, experts, top_k) == tokens


@given(
    max_running=st.integers(1, 512),
    spare=st.integers(1, 8192),
    context=st.integers(3, 200_000),
    gathered=st.integers(1, 70_000),
    queries=st.integers(1, 2),
)
def test_the_largest_step_reaches_every_bound(
    max_running: int, spare: int, context: int, gathered: int, queries: int
) -> None:
    largest = LargestStep(max_running, max_running + spare, context)
    prompts = largest.prompts(7, gathered)
    rows = sum(len(piece.tokens) for piece in prompts)
    assert len(prompts) <= max(2, max_running)
    assert rows == largest.step_tokens or len(prompts) == max(2, max_running), "all rows, or all sequences"
    assert max(piece.stop for piece in prompts) == context - 1, "a row more is the MTP layer's"
    for piece in [*prompts, *(decodes := largest.decodes(7, queries))]:
        assert piece.start >= 0 and set(piece.table) == {7}
        assert len(piece.table) * BLOCK_TOKENS >= piece.stop
    assert len(decodes) == max_running and all(piece.decode for piece in decodes)
    assert {piece.stop for piece in decodes} == {max(queries, context - 1)}
