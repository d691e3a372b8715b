"""A worker process: assembles engine, role, link to the gateway and cache client, and runs them to a clean end."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.control.run_manifest import read_manifest
from tripool.decode.worker import DecodeWorker
from tripool.fabric import KvReceiver, KvSender, Link, Loop, PoolEngine
from tripool.fabric.arena import Arena, FileMaps
from tripool.fabric.channel import Transport, ZmqTransport
from tripool.fabric.folder import folder_of
from tripool.fabric.prefixes import Prefixes
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import PROTOCOL, Hello, Ready, WorkerId
from tripool.prefill.worker import PrefillWorker

_LOG = logging.getLogger("tripool.worker")
_ARENA_BYTES = 256 * 2**20
"""Room for KV transfers, if that is more than one of the longest needs; taken only as far as it is used."""


class Worker:
    """One worker over what it is given: an engine, a transport, memory, a cache client and a clock.

    One with a KV sender is a prefill worker, one with a receiver a decode worker. The same class serves and runs in the
    fault simulation.
    """

    def __init__(
        self,
        engine: PoolEngine,
        hello: Hello,
        transport: Transport,
        kv: KvSender | KvReceiver,
        pool: PoolClient | None,
        *,
        supervisor_channel: SupervisorChannel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        worker_id = hello.worker_id
        self._link, self._kv = Link(transport, hello, clock=clock), kv
        self._prefixes = Prefixes(engine, pool) if pool is not None else None
        self.role = (
            PrefillWorker(engine, worker_id, kv, self._link.send, prefixes=self._prefixes, clock=clock)
            if isinstance(kv, KvSender)
            else DecodeWorker(engine, worker_id, kv, self._link.send, prefixes=self._prefixes, clock=clock)
        )
        self.loop = Loop(self._link, self.role, worker_id, supervisor_channel=supervisor_channel, clock=clock)

    def run(self) -> None:
        """Until the loop is stopped, drained, or without supervisor and gateway."""
        try:
            self.loop.run()
        finally:
            self._link.close()
            if self._prefixes is not None:
                self._prefixes.close()
            self._kv.close()


def run_worker(
    engine: PoolEngine,
    role: Literal["prefill", "decode"],
    worker_id: WorkerId,
    address: str,
    supervisor_channel: SupervisorChannel | None,
) -> None:
    """Until a signal, the end of a drain, or the loss of both supervisor and gateway."""
    kv_tokens = engine.num_blocks * engine.block_tokens
    limits = (kv_tokens, engine.max_running, engine.context_tokens, engine.vocab)
    hello = Hello(PROTOCOL, role, worker_id, os.getpid(), engine.name, *limits)
    folder = folder_of(address)
    members = read_manifest(folder).cache
    worker = Worker(
        engine,
        hello,
        ZmqTransport(address),
        KvSender(_arena(engine, folder, worker_id)) if role == "prefill" else KvReceiver(FileMaps(folder)),
        PoolClient(LocalHost(folder), members, worker_id) if members else None,
        supervisor_channel=supervisor_channel,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: worker.loop.stop())
    if supervisor_channel is not None:
        supervisor_channel.send(Ready(worker_id, engine.block_bytes))
    facts = {"role": role, "model": engine.name, "epoch": worker_id.epoch, "kv_tokens": kv_tokens}
    _LOG.info("ready", extra=facts | {"max_running": engine.max_running})
    worker.run()


def _arena(engine: PoolEngine, folder: Path, worker_id: WorkerId) -> Arena:
    longest = -(-engine.context_tokens // engine.block_tokens)
    num_slots = max(longest, min(engine.num_blocks, _ARENA_BYTES // engine.block_bytes))
    return Arena(folder / f"{worker_id}.kv", engine.block_bytes, num_slots)
