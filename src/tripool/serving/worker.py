"""Assembles a worker process: an engine in its role, its link to the coordinator, KV transfer and cache client."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from tripool.config import EngineConfig
from tripool.control.rank import Rank
from tripool.control.run_manifest import read_manifest
from tripool.control.worker import Worker
from tripool.engine_protocol import PoolEngine
from tripool.errors import InvalidRequest, RankFenced
from tripool.fabric import Transfer
from tripool.fabric.channel import ZmqTransport
from tripool.fabric.folder import folder_of
from tripool.fabric.shared_memory import SharedMemoryTransfer
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.hosts.cache import pool_client
from tripool.hosts.directory import DirectoryFile, read_own
from tripool.hosts.kv import HostTransfer
from tripool.messages import PROTOCOL, Hello, Ready, WorkerId
from tripool.serving.ranks import open_rank

if TYPE_CHECKING:
    from tripool.cache.weight_cache import WeightCache

_LOG = logging.getLogger("tripool.worker")
WorkerRole = Literal["prefill", "decode"]
_ARENA_BYTES = 256 * 2**20
"""For KV on its way to decode workers, if one longest request does not need more; taken only as far as it is used."""


class WorkerProcess:
    """`run` blocks until `stop`, a Drain, or the loss of coordinator and supervisor."""

    def __init__(
        self,
        engine: PoolEngine,
        role: WorkerRole,
        worker_id: WorkerId,
        address: str,
        supervisor_channel: SupervisorChannel | None = None,
        *,
        instance: str = "",
        rank: int = 0,
        reserved_for: str = "",
    ) -> None:
        """`instance`: the one of several ranks that it is a `rank` of; it then needs a supervisor. `reserved_for`: the
        only tenant that it serves."""
        self._supervisor_channel, self._block_bytes = supervisor_channel, engine.block_bytes
        kv_tokens = engine.num_blocks * engine.block_tokens
        limits = (kv_tokens, engine.max_running, engine.context_tokens, engine.vocab)
        self._hello = Hello(PROTOCOL, role, worker_id, os.getpid(), engine.name, *limits, instance, reserved_for)
        folder = folder_of(address)
        members = read_manifest(folder).model(engine.name).cache
        self._rank: Rank | None = None
        if instance:
            self._rank = open_rank(engine, folder, instance, rank, worker_id, supervisor_channel)
        self._worker = Worker(
            engine,
            self._hello,
            ZmqTransport(address),
            _transfer(engine, folder, worker_id),
            pool_client(folder, members, worker_id, model=engine.name),
            supervisor_channel=self._rank or supervisor_channel,
        )
        self.link = self._worker.link

    def run(self) -> None:
        hello = self._hello
        if self._rank is not None:
            self._rank.ready(self._block_bytes)
        elif self._supervisor_channel is not None:
            self._supervisor_channel.send(Ready(hello.worker_id, self._block_bytes))
        facts = {"role": hello.role, "model": hello.model, "epoch": hello.worker_id.epoch}
        _LOG.info("ready", extra=facts | {"kv_tokens": hello.kv_tokens, "max_running": hello.max_running})
        try:
            self._worker.loop.run()
        except RankFenced:
            _LOG.warning("given up by the other ranks", extra={"instance": hello.instance})
            raise

    def stop(self) -> None:
        """From any thread or a signal handler."""
        self._worker.loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._worker.close()
        if self._rank is not None:
            self._rank.close()


def _transfer(engine: PoolEngine, folder: Path, worker_id: WorkerId) -> Transfer:
    block_tokens, block_bytes = engine.block_tokens, engine.block_bytes
    longest = -(-engine.context_tokens // block_tokens)
    num_slots = max(longest, min(engine.num_blocks, _ARENA_BYTES // block_bytes))
    local = SharedMemoryTransfer(
        folder, worker_id, block_tokens=block_tokens, block_bytes=block_bytes, num_slots=num_slots
    )
    own = read_own(folder)
    if own is not None and own.transfer == "mooncake":
        from tripool.hosts.mooncake import MooncakeTransfer

        return MooncakeTransfer(own, DirectoryFile(folder), local)
    return local if own is None else HostTransfer(own, DirectoryFile(folder), local)


# ---- engines by model name ------------------------------------------------------------------------------------------


def load_pool_engine(
    model: str, config: EngineConfig, role: WorkerRole, weight_cache: WeightCache | None = None
) -> PoolEngine:
    """`fake` may be followed by settings: `fake:step_ms=5,row_ms=0.4,prompt_ms=0.05,blocks=64`.

    A step takes `step_ms`, and more for each row (`row_ms`) and each prompt token (`prompt_ms`). `script` names a file
    of answers (`tripool.engine.scripted`).
    """
    name, _, settings = model.partition(":")
    if name == "fake":
        return _fake(settings, config)
    from tripool.engine.load import load_engine

    return load_engine(model, config, weight_cache=weight_cache, hands_over=role == "prefill", shares_device=True)


def _fake(settings: str, config: EngineConfig) -> PoolEngine:
    from tripool.engine.fake import fake_text
    from tripool.engine.fake_paged import PagedFake
    from tripool.engine.scripted import Script, ScriptedTokens

    script: Path | None = None
    given = {"blocks": 2048, "context": 4096, "running": config.max_running, "step_tokens": 512}
    costs = {"step_ms": 0.0, "row_ms": 0.0, "prompt_ms": 0.0}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key in costs and value.replace(".", "", 1).isdecimal():
            costs[key] = float(value)
        elif key in given and value.isdecimal():
            given[key] = int(value)
        elif key == "script" and value:
            script = Path(value)
        else:
            known = ", ".join([*costs, *given, "script"])
            raise InvalidRequest(f"the fake engine has no setting '{setting}'", hint=f"known: {known}")
    text = fake_text()
    return PagedFake(
        text,
        tokens=ScriptedTokens(text, Script(script)) if script is not None else None,
        context_tokens=given["context"],
        num_blocks=given["blocks"],
        max_running=given["running"],
        step_tokens=max(given["step_tokens"], given["running"] + 1),
        step_s=costs["step_ms"] / 1000,
        row_s=costs["row_ms"] / 1000,
        prompt_token_s=costs["prompt_ms"] / 1000,
    )
