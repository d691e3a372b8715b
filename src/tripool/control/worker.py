"""A worker: the loop of a prefill or decode worker over an engine, a transport, a KV transfer, a cache client, a clock.

The same class serves and runs in the fault simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tripool.cache.client import PoolClient
from tripool.decode.worker import DecodeWorker
from tripool.engine_protocol import PoolEngine
from tripool.fabric import KvReceiver, KvSender, Link, Loop, Transfer
from tripool.fabric.channel import Transport
from tripool.fabric.loop import SupervisorEnd
from tripool.messages import Hello
from tripool.prefill.worker import PrefillWorker


class Worker:
    """A prefill worker uses the sending end of the transfer, a decode worker the receiving end."""

    def __init__(
        self,
        engine: PoolEngine,
        hello: Hello,
        transport: Transport,
        kv_transfer: Transfer,
        pool: PoolClient | None,
        *,
        supervisor_channel: SupervisorEnd | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        worker_id = hello.worker_id
        self.link = Link(transport, hello, clock=clock)
        self._pool = pool
        self.role: PrefillWorker | DecodeWorker
        self.kv: KvSender | KvReceiver
        if hello.role == "prefill":
            self.kv = sender = kv_transfer.sender()
            self.role = PrefillWorker(engine, worker_id, sender, self.link.send, pool=pool, clock=clock)
        else:
            self.kv = receiver = kv_transfer.receiver()
            self.role = DecodeWorker(engine, worker_id, receiver, self.link.send, pool=pool, clock=clock)
        self.loop = Loop(self.link, self.role, worker_id, supervisor_channel=supervisor_channel, clock=clock)

    def run(self) -> None:
        """Until the loop is stopped, drained, or without supervisor and gateway."""
        try:
            self.loop.run()
        finally:
            self.close()

    def close(self) -> None:
        self.link.close()
        if self._pool is not None:
            self._pool.close()
        self.kv.close()
