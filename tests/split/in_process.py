"""The coordinator and real workers in one process: messages cross as bytes, parcels through files, time by turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tripool.config import RouterConfig
from tripool.core import BLOCK_TOKENS, Request, TokenEvent
from tripool.decode.worker import DecodeWorker
from tripool.engine_protocol import PoolEngine
from tripool.errors import TripoolError
from tripool.fabric import KvSender
from tripool.fabric.shared_memory import SharedMemoryTransfer
from tripool.messages import PROTOCOL, AnyMessage, Hello, Role, WorkerId, decode, encode
from tripool.prefill.worker import PrefillWorker
from tripool.router import Coordinator, Emit, Fail, Output, Send

TURN_S = 0.001


class Fleet:
    """`turn` lets everybody do a little; `run` serves requests to their end."""

    def __init__(
        self, folder: Path, prefill: Sequence[PoolEngine], decode: Sequence[PoolEngine], *, turn_s: float = TURN_S
    ) -> None:
        self._turn_s = turn_s
        self.coordinator = Coordinator(RouterConfig(), epoch=1)
        self.now_s = 0.0
        self.events: dict[tuple[str, int], list[TokenEvent]] = {}
        self.failed: dict[str, TripoolError] = {}
        self.workers: dict[WorkerId, PrefillWorker | DecodeWorker] = {}
        self.senders: list[KvSender] = []
        self.on_send: Callable[[AnyMessage], bool] = lambda message: True
        """Whether a worker's message arrives."""
        self._folder = folder
        for i, engine in enumerate(prefill):
            self.join("prefill", engine, WorkerId(f"prefill-{i}", 1))
        for i, engine in enumerate(decode):
            self.join("decode", engine, WorkerId(f"decode-{i}", 1))

    def join(self, role: Role, engine: PoolEngine, worker_id: WorkerId, *, num_slots: int = 512) -> None:
        def send(message: AnyMessage) -> None:
            if self.on_send(message):
                self._receive(message)

        shape = {"block_tokens": engine.block_tokens, "block_bytes": engine.block_bytes, "num_slots": num_slots}
        transfer = SharedMemoryTransfer(self._folder, worker_id, **shape)
        if role == "prefill":
            sender = transfer.sender()
            self.senders.append(sender)
            self.workers[worker_id] = PrefillWorker(engine, worker_id, sender, send, clock=lambda: self.now_s)
        else:
            receiver = transfer.receiver()
            self.workers[worker_id] = DecodeWorker(engine, worker_id, receiver, send, clock=lambda: self.now_s)
        kv_tokens = engine.num_blocks * BLOCK_TOKENS
        limits = (kv_tokens, engine.max_running, engine.context_tokens, engine.vocab)
        self._receive(Hello(PROTOCOL, role, worker_id, 1, engine.name, *limits))

    def submit(self, request: Request) -> None:
        self._carry_out(self.coordinator.submit(request, self.now_s))

    def cancel(self, request_id: str) -> None:
        self._carry_out(self.coordinator.cancel(request_id, self.now_s))

    def lose(self, worker_id: WorkerId) -> None:
        """Gone without a word; its gateway finds out by silence."""
        del self.workers[worker_id]

    def turn(self) -> None:
        self.now_s += self._turn_s
        for worker in list(self.workers.values()):
            worker.work(self.now_s)
            self._receive(worker.heartbeat())
        self._carry_out(self.coordinator.tick(self.now_s))
        self.coordinator.check(self.now_s)
        for sender in self.senders:
            sender.check()

    def run(self, requests: Sequence[Request]) -> dict[tuple[str, int], list[TokenEvent]]:
        for request in requests:
            self.submit(request)
        self.run_out()
        return self.events

    def run_out(self, turns: int = 100_000) -> None:
        for _ in range(turns):
            if not len(self.coordinator.ledger):
                break
            self.turn()
        else:
            raise AssertionError("requests hang")
        self.turn()
        held = {worker_id: worker.heartbeat().blocks_held for worker_id, worker in self.workers.items()}
        assert set(held.values()) <= {0}, held

    def _receive(self, message: AnyMessage) -> None:
        self._carry_out(self.coordinator.receive(decode(encode(message)), self.now_s))

    def _carry_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Emit):
                event = output.event
                self.events.setdefault((event.request_id, event.choice), []).append(event)
            elif isinstance(output, Fail):
                self.failed[output.request_id] = output.error
            elif isinstance(output, Send) and output.worker_id in self.workers:
                self.workers[output.worker_id].receive(decode(encode(output.message)), self.now_s)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
