"""Assembles a worker process: an engine in its role, the link to the gateway, the KV transfer and the cache client."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from tripool.cache.client import PoolClient
from tripool.config import EngineConfig
from tripool.control.run_manifest import read_manifest
from tripool.core import BLOCK_TOKENS
from tripool.decode.worker import DecodeWorker
from tripool.errors import InvalidRequest
from tripool.fabric import KvReceiver, KvSender, Link, Loop, PoolEngine
from tripool.fabric.arena import Arena
from tripool.fabric.folder import folder_of
from tripool.fabric.prefixes import Prefixes
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import PROTOCOL, Hello, Ready, WorkerId
from tripool.prefill.worker import PrefillWorker

if TYPE_CHECKING:
    from tripool.cache.weight_cache import WeightCache

_LOG = logging.getLogger("tripool.worker")
_ARENA_BYTES = 256 * 2**20
"""For KV on its way to decode workers, if one longest request does not need more; taken only as far as it is used."""


class WorkerProcess:
    """`run` blocks until `stop`, a Drain, or the loss of gateway and supervisor."""

    def __init__(
        self,
        engine: PoolEngine,
        role: Literal["prefill", "decode"],
        worker_id: WorkerId,
        address: str,
        supervisor_channel: SupervisorChannel | None = None,
    ) -> None:
        self._engine, self._role, self._worker_id = engine, role, worker_id
        self._supervisor_channel = supervisor_channel
        limits = (engine.num_blocks * BLOCK_TOKENS, engine.max_running, engine.context_tokens, engine.vocab)
        hello = Hello(PROTOCOL, role, worker_id, os.getpid(), engine.name, *limits)
        folder = folder_of(address)
        members = read_manifest(folder).model(engine.name).cache
        with ExitStack() as stack:
            transfer = _sender(engine, folder, worker_id) if role == "prefill" else KvReceiver(folder)
            stack.callback(transfer.close)
            prefixes = None
            if members:
                prefixes = Prefixes(engine, PoolClient(folder, members, worker_id))
                stack.callback(prefixes.close)
            self.link = Link(address, hello)
            stack.callback(self.link.close)
            send = self.link.send
            worker = (
                PrefillWorker(engine, worker_id, transfer, send, prefixes=prefixes)
                if isinstance(transfer, KvSender)
                else DecodeWorker(engine, worker_id, transfer, send, prefixes=prefixes)
            )
            self._loop = Loop(self.link, worker, worker_id, supervisor_channel=supervisor_channel)
            self._closing = stack.pop_all()

    def run(self) -> None:
        if self._supervisor_channel is not None:
            self._supervisor_channel.send(Ready(self._worker_id, self._engine.block_bytes))
        facts = {"role": self._role, "model": self._engine.name, "epoch": self._worker_id.epoch}
        sizes = {"kv_tokens": self._engine.num_blocks * BLOCK_TOKENS, "max_running": self._engine.max_running}
        _LOG.info("ready", extra=facts | sizes)
        self._loop.run()

    def stop(self) -> None:
        """From any thread or a signal handler."""
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.close()


def _sender(engine: PoolEngine, folder: Path, worker_id: WorkerId) -> KvSender:
    longest = -(-engine.context_tokens // BLOCK_TOKENS)
    num_slots = max(longest, min(engine.num_blocks, _ARENA_BYTES // engine.block_bytes))
    return KvSender(Arena(folder / f"{worker_id}.kv", engine.block_bytes, num_slots))


# ---- engines by model name ------------------------------------------------------------------------------------------


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
