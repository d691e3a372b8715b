"""A worker's process put together: an engine, its role, its link to the gateway, and a clean end."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Literal

from tripool.cache.client import PoolClient
from tripool.control.run_manifest import read_manifest
from tripool.core import BLOCK_TOKENS
from tripool.decode.worker import DecodeWorker
from tripool.fabric import KvReceiver, KvSender, Link, Loop, PoolEngine
from tripool.fabric.arena import Arena
from tripool.fabric.folder import folder_of
from tripool.fabric.prefixes import Prefixes
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import PROTOCOL, Hello, Ready, WorkerId
from tripool.prefill.worker import PrefillWorker

_LOG = logging.getLogger("tripool.worker")
_ARENA_BYTES = 256 * 2**20
"""Room for parcels, if that is more than one of the longest needs; taken only as far as it is used."""


def run_worker(
    engine: PoolEngine,
    role: Literal["prefill", "decode"],
    worker_id: WorkerId,
    address: str,
    supervisor_channel: SupervisorChannel | None,
) -> None:
    """Until it is told to end by a signal, is drained, or is left alone."""
    kv_tokens = engine.num_blocks * BLOCK_TOKENS
    limits = (kv_tokens, engine.max_running, engine.context_tokens, engine.vocab)
    link = Link(address, Hello(PROTOCOL, role, worker_id, os.getpid(), engine.name, *limits))
    folder = folder_of(address)
    sender, receiver = _sender(engine, folder, worker_id) if role == "prefill" else None, KvReceiver(folder)
    members = read_manifest(folder).cache
    prefixes = Prefixes(engine, PoolClient(folder, members, worker_id)) if members else None
    worker = (
        PrefillWorker(engine, worker_id, sender, link.send, prefixes=prefixes)
        if sender is not None
        else DecodeWorker(engine, worker_id, receiver, link.send, prefixes=prefixes)
    )
    loop = Loop(link, worker, worker_id, supervisor_channel=supervisor_channel)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.stop())
    if supervisor_channel is not None:
        supervisor_channel.send(Ready(worker_id, engine.block_bytes))
    facts = {"role": role, "model": engine.name, "epoch": worker_id.epoch, "kv_tokens": kv_tokens}
    _LOG.info("ready", extra=facts | {"max_running": engine.max_running})
    try:
        loop.run()
    finally:
        link.close()
        receiver.close()
        if prefixes is not None:
            prefixes.close()
        if sender is not None:
            sender.close()


def _sender(engine: PoolEngine, folder: Path, worker_id: WorkerId) -> KvSender:
    longest = -(-engine.context_tokens // BLOCK_TOKENS)
    num_slots = max(longest, min(engine.num_blocks, _ARENA_BYTES // engine.block_bytes))
    return KvSender(Arena(folder / f"{worker_id}.kv", engine.block_bytes, num_slots))
