"""Whoever two workers crash of is refused; those who stood beside it lose nothing, and a killed worker says nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from tripool.core import TokenEvent
from tripool.errors import Overloaded, WorkersCrashed
from tripool.messages import (
    Cancel,
    KvDescriptor,
    Reaped,
    Refused,
    Role,
    Stamped,
    StartDecode,
    StartPrefill,
    Tokens,
    TransferDone,
    TransferReady,
    WorkerId,
)
from tripool.router import Emit, Fail, Output, Send
from tripool.router.ledger import Ledger

from .acting import D0, D1, P0, P1, Stage, ask, failed, hello, sent, suspects


def test_a_request_that_crashed_two_workers_is_not_placed_a_third_time() -> None:
    stage = Stage()
    stage.submit(ask())
    outputs: list[Output] = []
    for epoch in range(1, 5):
        stage.receive(hello(WorkerId("prefill-0", epoch), "prefill"))
        outputs += stage.receive(Reaped(WorkerId("prefill-0", epoch), crashed=True))
    (ended,) = failed(outputs)
    assert isinstance(ended.error, WorkersCrashed) and "r" in ended.error.message and ended.error.status == 500
    assert len(sent(stage.outputs, StartPrefill)) == 2


def test_killed_workers_make_no_suspects() -> None:
    stage = Stage()
    stage.submit(ask())
    for epoch in range(1, 7):
        stage.receive(hello(WorkerId("prefill-0", epoch), "prefill"))
        assert not failed(stage.receive(Reaped(WorkerId("prefill-0", epoch))))
    assert len(sent(stage.outputs, StartPrefill)) == 6


def test_a_crash_that_was_first_seen_as_silence_counts_as_well() -> None:
    """A core that takes long to be written: the request is elsewhere before it is known how its worker ended."""
    stage = Stage(P0, P1, silence_s=2.0, heartbeat_s=0.5)
    first = sent(stage.submit(ask()), StartPrefill)[0].worker_id
    second = P1 if first == P0 else P0
    stage.now_s += 1.9
    stage.heartbeat(second)
    outputs = stage.later(0.2)
    assert suspects(outputs) == [first] and sent(outputs, StartPrefill)[0].worker_id == second
    assert not failed(stage.receive(Reaped(first, crashed=True)))
    (ended,) = failed(stage.receive(Reaped(second, crashed=True)))
    assert isinstance(ended.error, WorkersCrashed)


def test_no_request_joins_a_suspect_before_it_has_made_tokens() -> None:
    stage = Stage(P0, D0)
    stage.submit(ask("r"))
    stage.submit(ask("other"))
    stage.receive(Reaped(P0, crashed=True))
    stage.receive(hello(replace_epoch(P0, 2), "prefill"))
    begun = sent(stage.outputs, StartPrefill)[2:]
    assert [begin.message.request.id for begin in begun] == ["r"]
    stage.submit(ask("third"))
    attempt = begun[0].message.attempt
    stage.tokens(replace_epoch(P0, 2), attempt, 0, 11)
    outputs = stage.packed(replace_epoch(P0, 2), attempt, 1, 5)
    assert [begin.message.request.id for begin in sent(outputs, StartPrefill)] == ["other"], "its turn, alone too"
    adopt = sent(outputs, StartDecode)[0].message.attempt
    stage.adopted(D0, adopt)
    stage.tokens(D0, adopt, 1, 12, 13)
    assert closed(stage) == {D0, replace_epoch(P0, 2)}
    stage.tokens(D0, adopt, 3, 14)
    assert closed(stage) == {replace_epoch(P0, 2)}, "only where the other one is"


def closed(stage: Stage) -> set[WorkerId]:
    """To a newcomer."""
    newcomer = Ledger().open(ask("newcomer"), 0.0)
    return stage.coordinator._placing.suspects.closed_to(newcomer, stage.coordinator.ledger)


def replace_epoch(worker_id: WorkerId, epoch: int) -> WorkerId:
    return WorkerId(worker_id.name, epoch)


@dataclass
class Fleet:
    """Workers that respond at once, until one is given the killer request and crashes."""

    stage: Stage
    killers: dict[str, tuple[Role, int]]
    """By request: where it kills, and at which token."""
    tokens: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    errors: dict[str, object] = field(default_factory=dict)
    _batch: dict[WorkerId, dict[tuple[str, int], int]] = field(default_factory=dict)
    """By decode worker: its sequences, and how many tokens they have."""
    _leases: int = 0

    def carry_out(self, outputs: list[Output]) -> None:
        todo = list(outputs)
        while todo:
            output = todo.pop(0)
            if isinstance(output, Emit):
                self.tokens[output.event.request_id] += 1
            elif isinstance(output, Fail):
                self.errors[output.request_id] = output.error
            elif isinstance(output, Send) and output.worker_id in self.stage.coordinator.view:
                todo += self._do(output)

    def _do(self, send: Send) -> list[Output]:
        message, worker_id = send.message, send.worker_id
        if isinstance(message, StartPrefill):
            (known,) = message.answered
            if self._dies(message.request.id, "prefill", len(known.tokens)):
                return self._crash(worker_id, "prefill")
            num = len(known.tokens)
            out = self._token(worker_id, message.request.id, message.attempt, num)
            which = worker_id, message.request.id, message.attempt, 0
            lease, num_tokens = self._lease(), len(message.request.prompt_ids) + num
            descriptor = KvDescriptor("shared_memory", b"")
            return out + self.stage.receive(TransferReady(*which, lease, num_tokens, descriptor))
        if isinstance(message, StartDecode):
            self._batch.setdefault(worker_id, {})[message.request.id, message.attempt] = len(message.answered.tokens)
            return self.stage.receive(TransferDone(worker_id, message.request.id, message.attempt, 0))
        if isinstance(message, Cancel):
            self._batch.get(worker_id, {}).pop((message.request_id, message.attempt), None)
        return []

    def _lease(self) -> int:
        self._leases += 1
        return self._leases

    def _dies(self, request_id: str, role: Role, num_tokens: int) -> bool:
        where, at = self.killers.get(request_id, ("cache", 0))
        return where == role and num_tokens >= at

    def _token(self, worker_id: WorkerId, request_id: str, attempt: int, index: int) -> list[Output]:
        finish = "length" if index + 1 == 12 else None
        event = TokenEvent(request_id, 0, index, 50 + index, finish)  # of the hundred that the model has
        return self.stage.receive(Tokens(worker_id, (Stamped(attempt, event),)))

    def _crash(self, worker_id: WorkerId, role: Role) -> list[Output]:
        self.crashes += 1
        self._batch.pop(worker_id, None)
        out = self.stage.receive(Reaped(worker_id, crashed=True))
        return out + self.stage.receive(hello(WorkerId(worker_id.name, worker_id.epoch + 1), role))

    def step(self) -> None:
        """Every decode worker gives each of its sequences a token, or crashes."""
        for worker_id in list(self._batch):
            batch = self._batch.get(worker_id, {})
            if any(self._dies(request_id, "decode", num) for (request_id, _), num in batch.items()):
                self.carry_out(self._crash(worker_id, "decode"))
                continue
            for (request_id, attempt), num in list(batch.items()):
                batch[request_id, attempt] += 1
                if num + 1 == 12:
                    del batch[request_id, attempt]
                self.carry_out(self._token(worker_id, request_id, attempt, num))
        self.stage.later(0.01)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "killers",
    [
        {"5": ("prefill", 0)},
        {"5": ("decode", 1)},
        {"5": ("decode", 7)},
        {"0": ("decode", 3), "9": ("prefill", 0)},
        {"0": ("decode", 3), "4": ("decode", 2), "11": ("decode", 1), "12": ("prefill", 0)},
    ],
)
def test_only_the_guilty_are_refused_and_each_costs_two_workers(killers, workers) -> None:
    stage = Stage(*(WorkerId(f"{role}-{i}", 1) for i in range(workers) for role in ("prefill", "decode")))
    fleet = Fleet(stage, killers)
    names = [str(number) for number in range(16)]
    for name in names:
        fleet.carry_out(stage.submit(ask(name, max_tokens=12)))
    for _ in range(2000):
        if not len(stage.coordinator.ledger):
            break
        fleet.step()
    assert fleet.errors.keys() == killers.keys()
    assert all(isinstance(error, WorkersCrashed) for error in fleet.errors.values())
    assert {name: fleet.tokens[name] for name in names if name not in killers} == dict.fromkeys(
        (name for name in names if name not in killers), 12
    )
    assert fleet.crashes <= 2 * len(killers), "two may be there when one crash is theirs both"


def test_no_room_is_no_loss_however_often_it_is_said() -> None:
    stage = Stage(P0, D0, D1, max_losses=2, silence_s=100.0, stall_s=100.0)
    stage.submit(ask())
    stage.tokens(P0, 1, 0, 11)
    (adopt,) = sent(stage.packed(P0, 1, lease=1, num_tokens=5), StartDecode)
    for _ in range(6):
        outputs = stage.receive(
            Refused(adopt.worker_id, "r", adopt.message.attempt, "overloaded", "no room", "", False)
        )
        assert not failed(outputs)
        (adopt,) = sent(stage.later(6.5), StartDecode)
    entry = stage.coordinator.ledger.get("r")
    assert entry is not None and entry.num_losses == 0


def test_what_stands_still_for_too_long_is_given_up_as_overload() -> None:
    stage = Stage(P0, queue_s=5.0, prefill_s=3.0, silence_s=100.0, stall_s=100.0)
    stage.submit(ask())
    outputs = [*stage.later(3.1), *stage.later(3.1)]
    assert not failed(outputs) and len(sent(outputs, StartPrefill)) == 2
    (ended,) = failed(stage.later(3.1))
    assert isinstance(ended.error, Overloaded) and ended.error.status == 429
