"""Tokens of many steps in one go: the ledger is left as single tokens leave it."""

from __future__ import annotations

import pytest

from tripool.config import RouterConfig
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.messages import PROTOCOL, Hello, KvDescriptor, Stamped, Tokens, TransferDone, TransferReady, WorkerId
from tripool.router import Coordinator, Emit, Send
from tripool.router.ledger import Stage

PREFILL, DECODE = WorkerId("prefill-0", 1), WorkerId("decode-0", 1)


def decoding(num_tokens: int) -> Coordinator:
    """One request of so many tokens that has its first one, and decodes."""
    coordinator = Coordinator(RouterConfig(), epoch=1)
    for worker_id, role in ((PREFILL, "prefill"), (DECODE, "decode")):
        coordinator.receive(Hello(PROTOCOL, role, worker_id, 1, "m", 10_000, 8, 10_000, 100), 0.0)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=num_tokens)
    coordinator.submit(Request(id="r", prompt_ids=(1, 2, 3), params=params, seed=0), 0.0)
    coordinator.receive(Tokens(PREFILL, (token(0, 1),)), 0.1)
    coordinator.receive(TransferReady(PREFILL, "r", 1, 0, 1, 3, KvDescriptor("a", b"")), 0.1)
    coordinator.receive(TransferDone(DECODE, "r", 2, 0), 0.2)
    return coordinator


def token(index: int, attempt: int = 2, *, last: bool = False) -> Stamped:
    return Stamped(attempt, TokenEvent("r", 0, index, 10 + index, "length" if last else None))


def state(coordinator: Coordinator) -> object:
    entry = coordinator.ledger.get("r")
    assert entry is not None
    (choice,) = entry.choices
    return choice.tokens, choice.stage, choice.deadline_s


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_run_is_its_tokens_one_by_one(count: int) -> None:
    one, other = decoding(20), decoding(20)
    for index in range(1, count + 1):
        one.receive(Tokens(DECODE, (token(index),)), 1.0)
    before = tuple(10 + index for index in range(1, count))
    (emitted,) = other.advance(DECODE, [(token(count), before)], 1.0)
    assert isinstance(emitted, Emit) and emitted.event.index == count
    assert state(one) == state(other)
    other.check()


def test_the_last_token_of_a_run_ends_the_request() -> None:
    coordinator = decoding(4)
    coordinator.advance(DECODE, [(token(3, last=True), (11, 12))], 1.0)
    assert not len(coordinator.ledger)
    coordinator.check()


def test_a_run_with_a_gap_before_it_is_a_loss_and_a_known_one_is_dropped() -> None:
    coordinator = decoding(20)
    coordinator.advance(DECODE, [(token(2), (11,))], 1.0)
    assert coordinator.advance(DECODE, [(token(2), (11,))], 1.1) == []
    assert coordinator.ledger.num_dropped == 1
    outputs = coordinator.advance(DECODE, [(token(9), (18,))], 1.2)
    assert any(isinstance(output, Send) for output in outputs)
    entry = coordinator.ledger.get("r")
    assert entry is not None and entry.choices[0].tokens == [10, 11, 12]
    assert entry.choices[0].stage is not Stage.DECODING
    coordinator.check()
