"""A prefill worker, message by message: what it sends, and what it still holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grammar.counted import compiling
from tripool.core import Request, SamplingParams, Structure
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.fabric.shared_memory import BlockTable, SharedMemoryTransfer
from tripool.messages import (
    Answered,
    AnyMessage,
    Cancel,
    Refused,
    Release,
    StartPrefill,
    Tokens,
    TransferReady,
    WorkerId,
)
from tripool.prefill.worker import PrefillWorker

TEXT = fake_text()
LIFE = WorkerId("prefill-0", 3)


class Bench:
    def __init__(self, folder: Path, num_slots: int) -> None:
        self.engine = PagedFake(TEXT, num_blocks=64)
        shape = {"block_tokens": self.engine.block_tokens, "block_bytes": self.engine.block_bytes}
        self.sender = SharedMemoryTransfer(folder, LIFE, num_slots=num_slots, **shape).sender()
        self.sent: list[AnyMessage] = []
        self.now_s = 0.0
        self.worker = PrefillWorker(self.engine, LIFE, self.sender, self.sent.append, clock=lambda: self.now_s)

    def begin(self, name: str, num_prompt: int, *, attempt: int = 1, deadline_s: float = 9.0, **params: object) -> None:
        options = {"max_tokens": 50, "ignore_eos": True} | params
        prompt = tuple(4 + (i + len(name) + ord(name[0])) % 240 for i in range(num_prompt))
        request = Request(id=name, prompt_ids=prompt, params=SamplingParams.from_options(options), seed=1)
        open_choices = tuple(Answered(choice, ()) for choice in range(request.params.n))
        self.worker.receive(StartPrefill(request, attempt, open_choices, deadline_s, deadline_s), self.now_s)

    def work(self, turns: int = 6) -> list[AnyMessage]:
        """What was sent meanwhile."""
        self.sent.clear()
        for _ in range(turns):
            self.now_s += 0.001
            self.worker.work(self.now_s)
            self.engine.scheduler.check()
            self.sender.check()
        return list(self.sent)

    @property
    def held(self) -> int:
        return self.worker.heartbeat().blocks_held


def table(ready: TransferReady) -> BlockTable:
    found = BlockTable.of(ready.descriptor)
    assert found is not None
    return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[[int], Bench]]:
    made: list[Bench] = []

    def make(num_slots: int = 32) -> Bench:
        made.append(Bench(tmp_path, num_slots))
        return made[-1]

    yield make
    for each in made:
        each.sender.close()


def test_one_token_then_packed_and_gone(bench) -> None:
    b = bench()
    b.begin("a", 100)
    tokens, packed = b.work()
    assert isinstance(tokens, Tokens) and isinstance(packed, TransferReady)
    (stamped,) = tokens.events
    assert (stamped.attempt, stamped.event.request_id, stamped.event.index) == (1, "a", 0)
    assert stamped.event.stages is not None and stamped.event.stages.prefill_s >= 0
    assert packed.num_tokens == 100
    assert len(table(packed).slots) == len(table(packed).checksums) == 2
    assert b.engine.num_held_blocks == 0
    assert b.held == 2
    b.worker.receive(Release(packed.lease), b.now_s)
    assert b.held == 0
    assert not b.worker.busy and not b.worker.moving


def test_an_answer_of_one_token_is_not_packed(bench) -> None:
    b = bench()
    b.begin("a", 100, max_tokens=1)
    (tokens,) = b.work()
    assert tokens.events[0].event.finish_reason == "length"
    assert b.held == 0


def test_choices_share_the_blocks_of_their_prompt(bench) -> None:
    b = bench()
    b.begin("a", 130, n=4)
    packed = [message for message in b.work() if isinstance(message, TransferReady)]
    assert sorted(message.choice for message in packed) == [0, 1, 2, 3]
    assert len({table(message).slots[:2] for message in packed}) == 1
    assert b.held == 2 + 4


def test_when_the_outbox_is_full_parcels_wait_and_computing_goes_on(bench) -> None:
    b = bench(4)
    for name in ("a", "b", "c"):
        b.begin(name, 100)
    sent = b.work()
    assert {s.event.request_id for m in sent if isinstance(m, Tokens) for s in m.events} == {"a", "b", "c"}
    packed = [message for message in sent if isinstance(message, TransferReady)]
    assert [message.request_id for message in packed] == ["a", "b"]
    assert b.worker.moving
    b.begin("d", 10, max_tokens=1)
    assert any(isinstance(message, Tokens) for message in b.work()), "packing must not hold up computing"
    b.worker.receive(Release(packed[0].lease), b.now_s)
    assert [m.request_id for m in b.work() if isinstance(m, TransferReady)] == ["c"]


def test_what_can_never_be_packed_is_given_back(bench) -> None:
    b = bench(1)
    b.begin("a", 100)
    *_, refused = b.work()
    assert isinstance(refused, Refused)
    assert (refused.code, refused.final) == ("no_shared_memory", False)
    assert b.held == 0


@pytest.mark.parametrize("turns", [0, 1, 6])
def test_cancel_frees_at_any_point(bench, turns: int) -> None:
    b = bench()
    b.begin("a", 700, n=2)
    b.work(turns)
    b.worker.receive(Cancel("a", 1), b.now_s)
    assert b.held == 0
    assert b.work() == []


def test_attempts_do_not_mix(bench) -> None:
    b = bench()
    b.begin("a", 100)
    b.work()
    b.begin("a", 100, attempt=3)
    sent = b.work()
    assert [m.attempt for m in sent if isinstance(m, TransferReady)] == [3]
    b.worker.receive(Cancel("a", 1), b.now_s)
    assert b.held == 2, "the third attempt's parcel stays"
    b.worker.receive(Cancel("a", 3), b.now_s)
    assert b.held == 0


def test_too_late_is_given_back_and_parcels_do_not_wait_for_ever(bench) -> None:
    b = bench(2)
    b.begin("a", 100, deadline_s=1.0)
    b.begin("b", 100, deadline_s=0.5)
    b.work()
    b.now_s = 0.6
    (refused,) = b.work(1)
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.final) == ("b", False)
    assert b.held == 2
    b.now_s = 2.0
    b.work(1)
    assert b.held == 0


def test_what_cannot_work_is_refused_for_good(bench) -> None:
    b = bench()
    b.begin("a", 3000)
    b.worker.work(0.0)
    (refused,) = b.sent
    assert isinstance(refused, Refused)
    assert (refused.code, refused.final) == ("context_length_exceeded", True)
    assert b.held == 0


def test_drop_holds_nothing(bench) -> None:
    b = bench(3)
    for name in ("a", "b", "c"):
        b.begin(name, 100)
    b.work()
    b.begin("d", 700)
    b.work(1)
    b.worker.drop()
    assert b.held == 0
    b.engine.scheduler.check()
    b.sender.check()


def test_between_much_that_is_begun_others_are_computed(bench, monkeypatch) -> None:
    b = bench(512)
    done: list[int] = []
    add, step = b.engine.add, b.engine.step
    monkeypatch.setattr(b.engine, "add", lambda request, answered: done.append(len(answered)) or add(request, answered))
    monkeypatch.setattr(b.engine, "step", lambda: done.append(0) or step())
    for number in range(24):
        b.begin(f"r{number}", 4, n=16, max_tokens=1)
    assert b.worker.busy and b.worker.heartbeat().waiting_tokens >= 24 * 4
    b.work(40)
    runs = "".join("s" if not count else "a" for count in done).split("s")
    assert sum(done) == 24 * 16 and max(map(len, runs)) * 16 <= 64


def test_a_grammar_that_is_being_compiled_holds_up_its_own_request_only(bench, monkeypatch) -> None:
    b = bench()
    with compiling(monkeypatch) as (began, go_on):
        b.begin("guided", 100, structure=Structure("regex", "[a-z]+"))
        b.begin("gone", 100, structure=Structure("regex", "[a-z]+"))
        b.begin("late", 100, structure=Structure("regex", "[a-z]+"), deadline_s=0.5)
        assert began.wait(60)
        b.begin("plain", 100)
        assert [m.request_id for m in b.work() if isinstance(m, TransferReady)] == ["plain"]
        assert b.worker.moving and not b.worker.busy
        b.worker.receive(Cancel("gone", 1), b.now_s)
        b.now_s = 0.6
        (refused,) = b.work(1)
        assert isinstance(refused, Refused) and refused.request_id == "late"
        go_on.set()
        packed: list[TransferReady] = []
        while not packed:
            packed = [m for m in b.work() if isinstance(m, TransferReady)]
        assert [m.request_id for m in packed] == ["guided"]
    b.worker.receive(Release(packed[0].lease), b.now_s)
    assert not b.worker.busy and b.worker.heartbeat().waiting_tokens == 0


def test_a_bad_grammar_is_refused_for_good(bench) -> None:
    b = bench()
    b.begin("a", 10, structure=Structure("regex", "["))
    while not b.sent:
        b.worker.work(b.now_s)
    (refused,) = b.sent
    assert isinstance(refused, Refused) and (refused.code, refused.final) == ("invalid_request", True)
    assert not b.worker.busy and not b.worker.moving
