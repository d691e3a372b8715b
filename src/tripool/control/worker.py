"""A worker: the loop of a prefill or decode worker over an engine, a transport, memory, a cache client and a clock.

The same class serves and runs in the fault simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tripool.cache.client import PoolClient
from tripool.decode.worker import DecodeWorker
from tripool.fabric import KvReceiver, KvSender, Link, Loop, PoolEngine
from tripool.fabric.channel import Transport
from tripool.fabric.prefixes import Prefixes
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import Hello
from tripool.prefill.worker import PrefillWorker


class Worker:
    """With a KV sender it is a prefill worker, with a receiver a decode worker."""

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
        self.link, self._kv = Link(transport, hello, clock=clock), kv
        self._prefixes = Prefixes(engine, pool) if pool is not None else None
        self.role = (
            PrefillWorker(engine, worker_id, kv, self.link.send, prefixes=self._prefixes, clock=clock)
            if isinstance(kv, KvSender)
            else DecodeWorker(engine, worker_id, kv, self.link.send, prefixes=self._prefixes, clock=clock)
        )
        self.loop = Loop(self.link, self.role, worker_id, supervisor_channel=supervisor_channel, clock=clock)

    def run(self) -> None:
        """Until the loop is stopped, drained, or without supervisor and gateway."""
        try:
            self.loop.run()
        finally:
            self.close()

    def close(self) -> None:
        self.link.close()
        if self._prefixes is not None:
            self._prefixes.close()
        self._kv.close()
