"""A worker process in virtual time: the worker that serves, its messages, its memory for KV and its transfers.

`Process.turn` does what one turn of `tripool.fabric.Loop` does, at an event: messages that came during a step wait for
its end. The worker's engine, clock, memory and transfer are modelled; its code is the code that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from tripool.fabric.loop import RoleWorker
from tripool.messages import PROTOCOL, AnyMessage, Hello, KvDescriptor, WorkerId
from tripool.simulate.supernode.layout import Site
from tripool.simulate.supernode.modelled_engine import ModelledEngine
from tripool.simulate.supernode.timeline import ARRIVAL


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
        """Complete the step that is over, if there is one; then do what has come meanwhile."""
        worker, now_s = self.worker, self._site.timeline.now_s
        if self._engine.has_results:
            worker.work(now_s)
        messages, self.messages = self.messages, []
        for message in messages:
            worker.receive(message, now_s)
        if worker.moving:
            worker.work(now_s)
        self.flush()

    def flush(self) -> None:
        if self._sent:
            self._site.tell(self.number, self._sent)
            self._sent = []

    def heartbeat(self, *, after_fs: int) -> None:
        """Unless the last one was sent a shorter time ago."""
        now_fs = self._site.timeline.now_fs
        if now_fs - self._heartbeat_fs >= after_fs:
            self._heartbeat_fs = now_fs
            self._site.tell(self.number, [self.worker.heartbeat()])


class NominalArena:
    """`SlotMemory` for KV that is sent: slots without bytes. `tripool.fabric.KvSender` keeps account of them."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.name, self.slot_bytes, self.num_slots = name, 1, num_slots
        self._byte = memoryview(bytearray(1))

    def back(self, slot: int) -> bool:
        return True

    def view(self, slot: int) -> memoryview:
        return self._byte[:]

    def close(self) -> None:
        pass


class ModelledTransfer:
    """KV on its way to a decode worker, over the links between the two. `arrived`: called when it is there."""

    def __init__(self, site: Site, number: int, arrived: Callable[[], None]) -> None:
        self._site, self._number, self._arrived = site, number, arrived

    def begin(self, descriptor: KvDescriptor) -> Callable[[], bool]:
        timeline = self._site.timeline
        num_bytes = descriptor.num_tokens * self._site.layout.token_bytes
        there_fs = self._site.transfer(_source(descriptor.arena), self._number, num_bytes)
        timeline.at(there_fs, ARRIVAL, self._number, self._arrived)
        return lambda: timeline.now_fs >= there_fs

    def read(self, descriptor: KvDescriptor, index: int, into: memoryview) -> bool:
        return self._site.trusts(_source(descriptor.arena))


@lru_cache(maxsize=2**12)
def _source(arena: str) -> WorkerId:
    """The worker whose memory is called so: see `NominalArena`."""
    worker, _, epoch = arena.rpartition(".")
    return WorkerId(worker, int(epoch))
