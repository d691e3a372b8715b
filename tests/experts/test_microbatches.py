"""Two microbatches per rank: the tokens and log-probabilities of one batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from experts.rank_process import Job, answers, expert_layers, layout_of
from tripool import SamplingParams
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.experts.exchange import SharedView
from tripool.experts.layout import LANES
from tripool.kernels.cpu8.exchange import NativeExchange


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """Of two ranks in one process: the first runs steps, the second answers."""
    return [load_engine("tiny", EngineConfig(kv_gb=0.02, threads=1, prefix_reuse=False)) for _ in range(2)]


@contextmanager
def ranks(engines: list[Engine], microbatch_rows: int, slab_rows: int = 256) -> Iterator[SharedView]:
    layout = layout_of(engines[0], 2, slab_rows)
    memory = np.zeros(layout.num_bytes, np.uint8)
    table = np.tile(np.arange(layout.experts, dtype=np.int32) % 2, (layout.layers, 1))
    exchanges = [
        NativeExchange(layout, memory, rank, expert_layers(engine), microbatch_rows=microbatch_rows)
        for rank, engine in enumerate(engines)
    ]
    try:
        for exchange in exchanges:
            exchange.install(1, table, [True, True])
        yield SharedView(layout, memory)
    finally:
        for exchange in exchanges:
            exchange.close()


def num_requests(view: SharedView) -> int:
    return sum(view.dispatch_bell(1, 0, lane).read().sequence for lane in range(LANES))


def jobs(*lengths: int) -> list[Job]:
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=5 + i, ignore_eos=True, logprobs=1) for i in range(8)]
    return [([7 + (31 * i + 13 * j) % 8000 for j in range(n)], params[i]) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("lengths", [(5, 5), (1, 130, 2, 70, 9), (90, 90, 90)])
def test_two_microbatches_give_the_bits_of_one_batch(engines: list[Engine], lengths: tuple[int, ...]) -> None:
    """Prompts and decode rows, drafts, steps with an odd number of sequences and with one that cannot be halved."""
    work, counts = jobs(*lengths), []
    expected = answers(engines[0], work)
    for microbatch_rows in (0, 1):
        with ranks(engines, microbatch_rows) as view:
            assert answers(engines[0], work) == expected
            counts.append(num_requests(view))
    assert counts[1] > 1.3 * counts[0], "most steps were two microbatches"


def test_a_half_that_needs_several_slabs_stays_one_batch(engines: list[Engine]) -> None:
    work, counts = jobs(100, 100), []
    expected = answers(engines[0], work)
    for microbatch_rows in (0, 40):
        with ranks(engines, microbatch_rows, slab_rows=32) as view:
            assert answers(engines[0], work) == expected
            counts.append(num_requests(view))
    assert counts[0] == counts[1]
