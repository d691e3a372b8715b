"""A worker's process put together: an engine, its role, its link to the gateway, and a clean end."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Literal

from tripool.cache.client import PoolClient
from tripool.control.plan import read_plan
from tripool.core import BLOCK_TOKENS
from tripool.decode.worker import DecodeWorker
from tripool.fabric import Inbox, Link, Loop, Outbox, PoolEngine
from tripool.fabric.arena import Arena
from tripool.fabric.folder import folder_of
from tripool.fabric.leash import Leash
from tripool.fabric.prefixes import Prefixes
from tripool.messages import PROTOCOL, Hello, Life, Ready
from tripool.prefill.worker import PrefillWorker

_LOG = logging.getLogger("tripool.worker")
_ARENA_BYTES = 256 * 2**20
"""Room for parcels, if that is more than one of the longest needs; taken only as far as it is used."""


def run_worker(
    engine: PoolEngine, role: Literal["prefill", "decode"], life: Life, address: str, leash: Leash | None
) -> None:
    """Until it is told to end by a signal, is drained, or is left alone."""
    kv_tokens = engine.num_blocks * BLOCK_TOKENS
    limits = (kv_tokens, engine.max_running, engine.context_tokens, engine.vocab)
    link = Link(address, Hello(PROTOCOL, role, life, os.getpid(), engine.name, *limits))
    folder = folder_of(address)
    outbox, inbox = _outbox(engine, folder, life) if role == "prefill" else None, Inbox(folder)
    members = read_plan(folder).cache
    prefixes = Prefixes(engine, PoolClient(folder, members, life)) if members else None
    worker = (
        PrefillWorker(engine, life, outbox, link.send, prefixes=prefixes)
        if outbox is not None
        else DecodeWorker(engine, life, inbox, link.send, prefixes=prefixes)
    )
    loop = Loop(link, worker, life, leash=leash)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: loop.stop())
    if leash is not None:
        leash.send(Ready(life, engine.block_bytes))
    facts = {"role": role, "model": engine.name, "epoch": life.epoch, "kv_tokens": kv_tokens}
    _LOG.info("ready", extra=facts | {"max_running": engine.max_running})
    try:
        loop.run()
    finally:
        link.close()
        inbox.close()
        if prefixes is not None:
            prefixes.close()
        if outbox is not None:
            outbox.close()


def _outbox(engine: PoolEngine, folder: Path, life: Life) -> Outbox:
    longest = -(-engine.context_tokens // BLOCK_TOKENS)
    num_slots = max(longest, min(engine.num_blocks, _ARENA_BYTES // engine.block_bytes))
    return Outbox(Arena(folder / f"{life.worker}.{life.epoch}.parcels", engine.block_bytes, num_slots))
