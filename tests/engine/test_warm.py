"""An engine from the model cache: the same tokens and the same drafts, and one model's image for every KV size."""

from __future__ import annotations

import pytest

from tripool.cache.weight_cache import WeightCache
from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams
from tripool.engine.load import load_engine


def run(
    precision: str, weight_cache: WeightCache | None, kv_gb: float = 0.05
) -> tuple[list[tuple[str, int]], int, int]:
    engine = load_engine("tiny", EngineConfig(kv_gb=kv_gb, threads=1, precision=precision), weight_cache=weight_cache)
    for i in range(3):
        params = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
        engine.add(Request(id=str(i), prompt_ids=tuple(range(5 + i, 90 + 7 * i)), params=params, seed=i))
    events = []
    while engine.busy:
        events += [(event.request_id, event.token_id) for event in engine.step()]
    return events, engine.scheduler.num_drafted, engine.scheduler.num_accepted


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_tokens_and_drafts_are_those_of_a_load_from_files(tmp_path, precision):
    weight_cache = WeightCache(tmp_path, 2**30)
    plain = run(precision, None)
    assert plain[1] > 0
    assert run(precision, weight_cache) == plain
    assert run(precision, weight_cache, kv_gb=0.06) == plain
    assert (weight_cache.counters.written, weight_cache.counters.hits) == (1, 1)
