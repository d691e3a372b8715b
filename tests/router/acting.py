"""Workers and requests for tests of the router: short ways to say what a worker would say."""

from __future__ import annotations

from typing import Any

from tripool.config import RouterConfig
from tripool.core import FinishReason, Request, SamplingParams, TokenEvent
from tripool.messages import (
    PROTOCOL,
    AnyMessage,
    Heartbeat,
    Hello,
    KvDescriptor,
    Role,
    Stamped,
    StartDecode,
    StartPrefill,
    Tokens,
    TransferDone,
    TransferReady,
    WorkerId,
)
from tripool.router import Coordinator, Emit, Fail, Output, Send, ToSupervisor

P0, P1 = WorkerId("prefill-0", 1), WorkerId("prefill-1", 1)
D0, D1 = WorkerId("decode-0", 1), WorkerId("decode-1", 1)


def hello(worker_id: WorkerId, role: Role, *, kv_tokens: int = 10_000, max_running: int = 64, **instance: Any) -> Hello:
    return Hello(PROTOCOL, role, worker_id, 1, "m", kv_tokens, max_running, 4096, 100, **instance)


def ask(request_id: str = "r", *, prompt: int = 5, n: int = 1, max_tokens: int = 8) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return Request(id=request_id, prompt_ids=tuple(range(1, prompt + 1)), params=params, seed=1)


class Stage:
    """A coordinator with a manual clock. Checks its invariants after every call."""

    def __init__(self, *worker_ids: WorkerId, **config: Any) -> None:
        self.now_s = 100.0
        self.coordinator = Coordinator(RouterConfig(**config), epoch=1)
        self.outputs: list[Output] = []
        for worker_id in worker_ids:
            self.receive(hello(worker_id, "prefill" if worker_id.name.startswith("prefill") else "decode"))

    def submit(self, request: Request) -> list[Output]:
        return self._keep(self.coordinator.submit(request, self.now_s))

    def cancel(self, request_id: str) -> list[Output]:
        return self._keep(self.coordinator.cancel(request_id, self.now_s))

    def drain(self, worker_id: WorkerId) -> list[Output]:
        return self._keep(self.coordinator.drain(worker_id, self.now_s))

    def disconnected(self, worker_id: WorkerId) -> list[Output]:
        return self._keep(self.coordinator.disconnected(worker_id, self.now_s))

    def receive(self, message: AnyMessage) -> list[Output]:
        return self._keep(self.coordinator.receive(message, self.now_s))

    def later(self, seconds: float) -> list[Output]:
        self.now_s += seconds
        outputs = self._keep(self.coordinator.tick(self.now_s))
        self.coordinator.check(self.now_s)
        return outputs

    def heartbeat(
        self, worker_id: WorkerId, *, num_steps: int = 0, waiting: int = 0, running: int = 0, held: int = 0
    ) -> list[Output]:
        return self.receive(Heartbeat(worker_id, num_steps, waiting, running, held))

    def tokens(
        self,
        worker_id: WorkerId,
        attempt: int,
        first: int,
        *ids: int,
        choice: int = 0,
        finish: FinishReason | None = None,
        request_id: str = "r",
        **more: int,
    ) -> list[Output]:
        """Tokens of a request from index `first` on; the last of them may finish it."""
        last = len(ids) - 1
        events = [
            TokenEvent(request_id, choice, first + i, token, finish if i == last else None, **more)
            for i, token in enumerate(ids)
        ]
        return self.receive(Tokens(worker_id, tuple(Stamped(attempt, event) for event in events)))

    def packed(
        self, worker_id: WorkerId, attempt: int, lease: int, num_tokens: int, *, choice: int = 0, request_id: str = "r"
    ) -> list[Output]:
        which = worker_id, request_id, attempt, choice, lease, num_tokens
        return self.receive(TransferReady(*which, KvDescriptor("shared_memory", str(lease).encode())))

    def adopted(self, worker_id: WorkerId, attempt: int, *, choice: int = 0) -> list[Output]:
        return self.receive(TransferDone(worker_id, "r", attempt, choice))

    def to_decode(self) -> tuple[WorkerId, int]:
        """Submit "r" and bring it to decode with one token, 11. Returns who decodes it, and the attempt."""
        begin = sent(self.submit(ask()), StartPrefill)[0]
        assert isinstance(begin.message, StartPrefill)
        self.tokens(begin.worker_id, begin.message.attempt, 0, 11)
        adopt = sent(self.packed(begin.worker_id, begin.message.attempt, 1, 5), StartDecode)[0]
        assert isinstance(adopt.message, StartDecode)
        self.adopted(adopt.worker_id, adopt.message.attempt)
        return adopt.worker_id, adopt.message.attempt

    def _keep(self, outputs: list[Output]) -> list[Output]:
        self.outputs += outputs
        self.coordinator.check()
        return outputs


def sent(outputs: list[Output], kind: type) -> list[Send]:
    return [output for output in outputs if isinstance(output, Send) and isinstance(output.message, kind)]


def emitted(outputs: list[Output]) -> list[int]:
    return [output.event.token_id for output in outputs if isinstance(output, Emit)]


def failed(outputs: list[Output]) -> list[Fail]:
    return [output for output in outputs if isinstance(output, Fail)]


def suspects(outputs: list[Output]) -> list[WorkerId]:
    return [output.message.worker_id for output in outputs if isinstance(output, ToSupervisor)]
