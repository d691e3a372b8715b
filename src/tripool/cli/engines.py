"""Engines for workers of a split server, by model name. `fake` is one that needs no weights, for tests and benches."""

from __future__ import annotations

from tripool.config import EngineConfig
from tripool.errors import InvalidRequest
from tripool.fabric.seam import PoolEngine


def load_pool_engine(model: str, config: EngineConfig) -> PoolEngine:
    """`fake` may be followed by settings: `fake:step_ms=5,blocks=64`."""
    name, _, settings = model.partition(":")
    if name == "fake":
        return _fake(settings, config)
    from tripool.engine.load import load_engine

    return load_engine(model, config)


def _fake(settings: str, config: EngineConfig) -> PoolEngine:
    from tripool.engine.fake import fake_text
    from tripool.engine.fake_paged import PagedFake

    given = {"step_ms": 0, "blocks": 2048, "context": 4096, "running": config.max_running, "step_tokens": 512}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in given or not value.isdigit():
            raise InvalidRequest(f"the fake engine has no setting '{setting}'", hint=f"known: {', '.join(given)}")
        given[key] = int(value)
    return PagedFake(
        fake_text(),
        context_tokens=given["context"],
        num_blocks=given["blocks"],
        max_running=given["running"],
        step_tokens=max(given["step_tokens"], given["running"] + 1),
        step_s=given["step_ms"] / 1000,
    )
