"""The fake engine by name: its settings, and what it says of promises while it serves."""

from __future__ import annotations

import pytest

from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams, Slo
from tripool.errors import InvalidRequest
from tripool.serving.worker import load_pool_engine


def test_costs_may_be_fractions_and_sizes_may_not() -> None:
    engine = load_pool_engine("fake:step_ms=0.5,row_ms=0.04,prompt_ms=0,blocks=64,running=8", EngineConfig(), "decode")
    assert (engine.num_blocks, engine.max_running) == (64, 8)
    for wrong in ("blocks=6.4", "step_ms=", "step_ms=fast", "row_ms=-1", "speed=9"):
        with pytest.raises(InvalidRequest, match=wrong.partition("=")[0]):
            load_pool_engine(f"fake:{wrong}", EngineConfig(), "decode")


def test_the_ceiling_is_reported_while_an_objective_is_served() -> None:
    engine = load_pool_engine("fake:running=8", EngineConfig(), "decode")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for number in range(4):
        slo = Slo(tpot_ms=10_000.0)
        engine.add(Request(id=str(number), prompt_ids=(5, 6, 7), params=params, seed=number, slo=slo))
    ceilings = []
    while engine.busy:
        engine.step()
        ceilings.append(engine.stats().slo_ceiling)
    assert any(ceiling is not None and ceiling >= 1 for ceiling in ceilings)
    stats = engine.stats()
    assert stats.slo_ceiling is None and not stats.slo_held_back and stats.num_slos_given_up == 0
    assert stats.predicted_step_ms > 0
