"""A worker process in virtual time: the worker that serves, its messages, its memory for KV and its transfers.

`Process.turn` does what one turn of `tripool.fabric.Loop` does, at an event: messages that came during a step wait for
its end. The worker's engine, clock, memory and transfer are modelled; its code is the code that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np

from tripool.cache.copying import Bytes
from tripool.fabric import KvReceiver, KvSender
from tripool.fabric.kv_transfer import TransferCapabilities
from tripool.fabric.loop import RoleWorker
from tripool.messages import PROTOCOL, AnyMessage, Hello, KvDescriptor, WorkerId
from tripool.simulate.supernode.layout import Site
from tripool.simulate.supernode.modelled_engine import ModelledEngine
from tripool.simulate.timeline import ARRIVAL


class Process:
    """`make`: builds the worker around this process's `send`."""

    def __init__(
        self,
        site: Site,
        role: Literal["prefill", "decode"],
        worker_id: WorkerId,
        number: int,
        engine: ModelledEngine,
        make: Callable[[Process], RoleWorker],
    ) -> None:
        self._site, self.worker_id, self.number, self._engine = site, worker_id, number, engine
        self.worker = make(self)
        self.dead = False
        self.messages: list[AnyMessage] = []
        """Received and not handled yet."""
        self._sent: list[AnyMessage] = []
        self._heartbeat_fs = 0
        kv_tokens = engine.num_blocks * engine.block_tokens
        limits = (kv_tokens, engine.max_running, engine.context_tokens, engine.vocab)
        site.tell(number, [Hello(PROTOCOL, role, worker_id, 1, engine.name, *limits)])

    def send(self, message: AnyMessage) -> None:
        self._sent.append(message)

    def turn(self) -> None:
        """Complete the step that is over, if there is one; then do what has come meanwhile. `flush` sends what comes of
        it."""
        worker, now_s = self.worker, self._site.timeline.now_s
        if self._engine.has_results:
            worker.work(now_s)
        if self.messages:
            messages, self.messages = self.messages, []
            for message in messages:
                worker.receive(message, now_s)
        if worker.moving:
            worker.work(now_s)

    def flush(self) -> None:
        if self._sent:
            self._site.tell(self.number, self._sent)
            self._sent = []

    def heartbeat(self, *, after_fs: int) -> None:
        """And flush. No heartbeat if the last one was sent a shorter time ago."""
        now_fs = self._site.timeline.now_fs
        if now_fs - self._heartbeat_fs >= after_fs:
            self._heartbeat_fs = now_fs
            self._sent.append(self.worker.heartbeat())
        if self._sent:
            self.flush()


class NominalMemory:
    """`SlotMemory` for KV that is sent: slots without bytes. `tripool.fabric.KvSender` keeps account of them."""

    slot_bytes = 1

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._byte = np.zeros(1, np.uint8)

    def back(self, slot: int) -> bool:
        return True

    def view(self, slot: int, num_bytes: int) -> Bytes:
        return self._byte

    def remove(self) -> None:
        pass


class ModelledTransfer:
    """`Transfer` over the links between two workers. `arrived`: called when KV is there."""

    capabilities = TransferCapabilities("modelled", same_host=False, in_place=False)

    def __init__(
        self, site: Site, worker_id: WorkerId, number: int, engine: ModelledEngine, arrived: Callable[[], None]
    ) -> None:
        self.site, self.number, self.engine, self.arrived = site, number, engine, arrived
        self._worker_id = worker_id

    def sender(self) -> KvSender:
        descriptor = KvDescriptor(self.capabilities.kind, str(self._worker_id).encode())
        return KvSender(NominalMemory(self.engine.num_blocks), lambda slots, checksums: descriptor)

    def receiver(self) -> KvReceiver:
        return self

    def open(self, descriptor: KvDescriptor, num_tokens: int) -> ModelledKv | None:
        known = descriptor.kind == self.capabilities.kind
        return ModelledKv(self, _source(descriptor.payload), num_tokens) if known else None

    def close(self) -> None:
        pass


class ModelledKv:
    """KV on its way to a decode worker."""

    def __init__(self, transfer: ModelledTransfer, source: WorkerId, num_tokens: int) -> None:
        self._transfer, self._source, self._num_tokens = transfer, source, num_tokens
        self.num_blocks = -(-num_tokens // transfer.engine.block_tokens)
        self._there_fs = 0

    def begin(self) -> None:
        transfer, site = self._transfer, self._transfer.site
        num_bytes = self._num_tokens * site.layout.token_bytes
        self._there_fs = site.transfer(self._source, transfer.number, num_bytes)
        site.timeline.at(self._there_fs, ARRIVAL, transfer.number, transfer.arrived)

    @property
    def arrived(self) -> bool:
        return self._transfer.site.timeline.now_fs >= self._there_fs

    def read(self, index: int, into: memoryview) -> memoryview | None:
        return into if self._transfer.site.trusts(self._source) else None

    def num_shared(self, other: ModelledKv) -> int:
        return min(self.num_blocks, other.num_blocks)

    def close(self) -> None:
        pass


@lru_cache(maxsize=2**12)
def _source(payload: bytes) -> WorkerId:
    """The worker whose memory was described: see `ModelledTransfer.sender`."""
    worker, _, epoch = payload.decode().rpartition(".")
    return WorkerId(worker, int(epoch))
