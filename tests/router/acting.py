"""Workers and requests for tests of the router: short ways to say what a worker would say."""

from __future__ import annotations

from typing import Any

from tripool.config import RouterConfig
from tripool.core import FinishReason, Request, SamplingParams, TokenEvent
from tripool.messages import (
    PROTOCOL,
    Adopt,
    Adopted,
    AnyMessage,
    Begin,
    Hello,
    Life,
    Packed,
    Parcel,
    Pulse,
    Role,
    Stamped,
    Tokens,
)
from tripool.router import Coordinator, Emit, Fail, Output, Send, ToSupervisor

P0, P1 = Life("prefill-0", 1), Life("prefill-1", 1)
D0, D1 = Life("decode-0", 1), Life("decode-1", 1)


def hello(life: Life, role: Role, *, kv_tokens: int = 10_000, max_running: int = 64) -> Hello:
    return Hello(PROTOCOL, role, life, 1, "m", kv_tokens, max_running, 4096, 100)


def ask(request_id: str = "r", *, prompt: int = 5, n: int = 1, max_tokens: int = 8) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    return Request(id=request_id, prompt_ids=tuple(range(1, prompt + 1)), params=params, seed=1)


class Stage:
    """A coordinator at a time that moves on when told. Checks its invariants after every call."""

    def __init__(self, *lives: Life, **config: Any) -> None:
        self.now_s = 100.0
        self.coordinator = Coordinator(RouterConfig(**config), gateway_epoch=1)
        self.outputs: list[Output] = []
        for life in lives:
            self.receive(hello(life, "prefill" if life.worker.startswith("prefill") else "decode"))

    def submit(self, request: Request) -> list[Output]:
        return self._keep(self.coordinator.submit(request, self.now_s))

    def cancel(self, request_id: str) -> list[Output]:
        return self._keep(self.coordinator.cancel(request_id, self.now_s))

    def drain(self, life: Life) -> list[Output]:
        return self._keep(self.coordinator.drain(life, self.now_s))

    def receive(self, message: AnyMessage) -> list[Output]:
        return self._keep(self.coordinator.receive(message, self.now_s))

    def later(self, seconds: float) -> list[Output]:
        self.now_s += seconds
        outputs = self._keep(self.coordinator.tick(self.now_s))
        self.coordinator.check(self.now_s)
        return outputs

    def pulse(
        self, life: Life, *, num_steps: int = 0, waiting: int = 0, running: int = 0, held: int = 0
    ) -> list[Output]:
        return self.receive(Pulse(life, num_steps, waiting, running, held))

    def tokens(
        self,
        life: Life,
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
        return self.receive(Tokens(life, tuple(Stamped(attempt, event) for event in events)))

    def packed(
        self, life: Life, attempt: int, lease: int, num_tokens: int, *, choice: int = 0, request_id: str = "r"
    ) -> list[Output]:
        parcel = Parcel(life.worker, lease, (0,), (0,), 1, num_tokens)
        return self.receive(Packed(life, request_id, attempt, choice, parcel))

    def adopted(self, life: Life, attempt: int, *, choice: int = 0) -> list[Output]:
        return self.receive(Adopted(life, "r", attempt, choice))

    def to_decode(self) -> tuple[Life, int]:
        """Submit "r" and bring it to decode with one token, 11. Returns who decodes it, and the attempt."""
        begin = sent(self.submit(ask()), Begin)[0]
        assert isinstance(begin.message, Begin)
        self.tokens(begin.life, begin.message.attempt, 0, 11)
        adopt = sent(self.packed(begin.life, begin.message.attempt, 1, 5), Adopt)[0]
        assert isinstance(adopt.message, Adopt)
        self.adopted(adopt.life, adopt.message.attempt)
        return adopt.life, adopt.message.attempt

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


def suspects(outputs: list[Output]) -> list[Life]:
    return [output.message.life for output in outputs if isinstance(output, ToSupervisor)]
