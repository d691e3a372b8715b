"""Loads the engine of a worker by model name; `fake` is an engine without weights, for tests and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tripool.config import EngineConfig
from tripool.errors import InvalidRequest
from tripool.fabric.seam import PoolEngine

if TYPE_CHECKING:
    from tripool.cache.weight_cache import WeightCache


def load_pool_engine(model: str, config: EngineConfig, weight_cache: WeightCache | None = None) -> PoolEngine:
    """`fake` may be followed by settings: `fake:step_ms=5,row_ms=0.4,prompt_ms=0.05,blocks=64`.

    A step takes `step_ms`, and more for each row (`row_ms`) and each prompt token (`prompt_ms`).
    """
    name, _, settings = model.partition(":")
    if name == "fake":
        return _fake(settings, config)
    from tripool.engine.load import load_engine

    return load_engine(model, config, weight_cache=weight_cache)


def _fake(settings: str, config: EngineConfig) -> PoolEngine:
    from tripool.engine.fake import fake_text
    from tripool.engine.fake_paged import PagedFake

    given = {"blocks": 2048, "context": 4096, "running": config.max_running, "step_tokens": 512}
    costs = {"step_ms": 0.0, "row_ms": 0.0, "prompt_ms": 0.0}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key in costs and value.replace(".", "", 1).isdecimal():
            costs[key] = float(value)
        elif key in given and value.isdecimal():
            given[key] = int(value)
        else:
            known = ", ".join([*costs, *given])
            raise InvalidRequest(f"the fake engine has no setting '{setting}'", hint=f"known: {known}")
    return PagedFake(
        fake_text(),
        context_tokens=given["context"],
        num_blocks=given["blocks"],
        max_running=given["running"],
        step_tokens=max(given["step_tokens"], given["running"] + 1),
        step_s=costs["step_ms"] / 1000,
        row_s=costs["row_ms"] / 1000,
        prompt_token_s=costs["prompt_ms"] / 1000,
    )
