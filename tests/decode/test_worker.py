"""A decode worker, message by message: parcels in, tokens out, and what it still holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from grammar.counted import compiling
from tripool.core import Request, SamplingParams, Slo, Structure
from tripool.decode.worker import DecodeWorker
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.fabric.shared_memory import BlockTable, MappedKv, SharedMemoryTransfer
from tripool.messages import (
    Answered,
    AnyMessage,
    Cancel,
    KvDescriptor,
    Refused,
    StartDecode,
    StartPrefill,
    Tokens,
    TransferDone,
    TransferReady,
    WorkerId,
)
from tripool.prefill.worker import PrefillWorker

TEXT = fake_text()


class Bench:
    """A prefill worker makes true parcels for the decode worker under test."""

    def __init__(self, folder: Path) -> None:
        engine = PagedFake(TEXT)
        shape = {"block_tokens": engine.block_tokens, "block_bytes": engine.block_bytes, "num_slots": 256}
        self._transfer = SharedMemoryTransfer(folder, WorkerId("prefill-0", 1), **shape)
        self.sender = self._transfer.sender()
        self._made: list[AnyMessage] = []
        self._prefill = PrefillWorker(engine, WorkerId("prefill-0", 1), self.sender, self._made.append)
        self.sent: list[AnyMessage] = []
        self.now_s = 0.0
        self.set_up()

    def set_up(self, *, num_blocks: int = 64, max_running: int = 8) -> None:
        self.engine = PagedFake(TEXT, num_blocks=num_blocks, max_running=max_running)
        self.worker = DecodeWorker(
            self.engine,
            WorkerId("decode-0", 1),
            self._transfer.receiver(),
            self.sent.append,
            clock=lambda: self.now_s,
        )

    def descriptors(self, name: str, num_prompt: int, *, tenant: str = "", **params: object) -> list[StartDecode]:
        options = {"max_tokens": 20, "ignore_eos": True} | params
        request = Request(
            id=name,
            prompt_ids=tuple(range(4, 4 + num_prompt)),
            params=SamplingParams.from_options(options),
            seed=1,
            slo=Slo(tenant=tenant, job=name if tenant else ""),
        )
        self._made.clear()
        self._prefill.receive(
            StartPrefill(request, 1, tuple(Answered(c, ()) for c in range(request.params.n)), 60), 0.0
        )
        while self._prefill.busy or self._prefill.moving:
            self._prefill.work(0.0)
        events = [stamped.event for m in self._made if isinstance(m, Tokens) for stamped in m.events]
        first = {event.choice: event.token_id for event in events}
        packed = [message for message in self._made if isinstance(message, TransferReady)]
        return [
            StartDecode(request, 2 + p.choice, Answered(p.choice, (first[p.choice],)), p.descriptor, 0, 5.0)
            for p in sorted(packed, key=lambda p: p.choice)
        ]

    def attach(self, *adopts: StartDecode) -> None:
        for adopt in adopts:
            self.worker.receive(adopt, self.now_s)

    def work(self, turns: int = 1, *, turn_s: float = 0.001) -> list[AnyMessage]:
        self.sent.clear()
        for _ in range(turns):
            self.now_s += turn_s
            self.worker.work(self.now_s)
            self.engine.scheduler.check()
        return list(self.sent)

    @property
    def held(self) -> int:
        return self.worker.heartbeat().blocks_held


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.sender.close()


def test_adopted_and_then_token_by_token_to_the_end(bench: Bench) -> None:
    (adopt,) = bench.descriptors("a", 100)
    bench.attach(adopt)
    adopted, *tokens = bench.work(30)
    assert isinstance(adopted, TransferDone)
    assert (adopted.request_id, adopted.attempt, adopted.choice) == ("a", 2, 0)
    events = [stamped.event for message in tokens for stamped in message.events]
    assert [event.index for event in events] == list(range(1, 20))
    assert events[-1].finish_reason == "length"
    assert events[0].stages is not None and events[1].stages is None
    assert bench.held == 0
    assert not bench.worker.busy and not bench.worker.moving


def test_choices_of_a_request_share_what_is_the_same(bench: Bench) -> None:
    adopts = bench.descriptors("a", 200, n=3)
    bench.attach(*adopts)
    bench.work()
    assert bench.held == 3 + 3
    bench.worker.receive(Cancel("a", adopts[0].attempt), bench.now_s)
    assert bench.held == 3 + 2
    events = [stamped.event for message in bench.work(30) for stamped in message.events]
    assert {event.choice for event in events if event.finish_reason} == {1, 2}
    assert bench.held == 0


def test_a_choice_that_is_computed_again_shares_no_more_than_it_has(bench: Bench) -> None:
    first, second = bench.descriptors("a", 200, n=2)
    bench.attach(first)
    bench.work()
    (running,) = bench.worker._jobs.values()
    assert running.seq is not None
    bench.attach(second)
    (waiting,) = bench.worker._queue
    assert len(bench.worker._shared(waiting)) == 3
    running.seq.num_computed = 100  # as after a preemption, with all its blocks allocated again
    assert len(bench.worker._shared(waiting)) == 1


@pytest.mark.parametrize("harm", ["bytes", "gone", "shape", "short", "kind"])
def test_a_parcel_that_is_not_what_it_was_is_refused_but_not_for_good(bench: Bench, harm: str) -> None:
    (adopt,) = bench.descriptors("a", 100)
    table = BlockTable.of(adopt.descriptor)
    assert table is not None
    if harm == "bytes":
        bench.sender.memory.view(table.slots[1], table.block_bytes)[7] ^= 1
    elif harm == "kind":
        table = None
    else:
        changes = {"gone": {"arena": "gone.kv"}, "shape": {"block_bytes": 2 * table.block_bytes}}
        changes |= {"short": {"slots": table.slots[:1], "checksums": table.checksums[:1]}}
        table = msgspec.structs.replace(table, **changes[harm])
    descriptor = table.descriptor() if table is not None else KvDescriptor("another", adopt.descriptor.payload)
    bench.attach(StartDecode(adopt.request, adopt.attempt, adopt.answered, descriptor, 0, 5.0))
    bench.worker.work(bench.now_s)
    (refused,) = bench.sent
    assert isinstance(refused, Refused)
    assert (refused.code, refused.final, refused.attempt) == ("bad_kv", False, 2)
    assert bench.held == 0
    assert not bench.worker.moving


def test_without_room_it_waits_and_then_says_so(bench: Bench) -> None:
    first, second = *bench.descriptors("a", 100, max_tokens=40), *bench.descriptors("b", 100)
    bench.set_up(max_running=1)
    bench.attach(first, second)
    assert [type(message) for message in bench.work(3)] == [TransferDone, Tokens, Tokens, Tokens]
    assert bench.worker.heartbeat().waiting_tokens == 100
    bench.now_s = 6.0
    *_, refused = [message for message in bench.work(1) if not isinstance(message, Tokens)]
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.code, refused.final) == ("b", "overloaded", False)


def test_whoever_waits_gets_its_turn(bench: Bench) -> None:
    adopts = [*bench.descriptors("a", 100), *bench.descriptors("b", 300), *bench.descriptors("c", 10)]
    bench.set_up(num_blocks=6)
    bench.attach(*adopts)
    sent = bench.work(80)
    assert [message.request_id for message in sent if isinstance(message, TransferDone)] == ["a", "b", "c"]
    assert bench.held == 0


def test_long_parcels_come_in_pieces_between_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.decode.worker._COPY_BYTES", bench.engine.block_bytes)
    (short,), (long,) = bench.descriptors("a", 10, max_tokens=40), bench.descriptors("b", 300)
    bench.attach(short)
    bench.work()
    bench.attach(long)
    sent = bench.work(5)
    assert [type(message) for message in sent] == [Tokens] * 4 + [TransferDone, Tokens]
    table = BlockTable.of(long.descriptor)
    assert table is not None and len(table.slots) == 5


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_cancel_and_drop_free_at_any_point(bench: Bench, monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    monkeypatch.setattr("tripool.decode.worker._IDLE_COPY_BYTES", bench.engine.block_bytes)
    adopts = bench.descriptors("a", 300, n=2)
    bench.attach(*adopts)
    bench.work(turns)
    bench.worker.receive(Cancel("a", adopts[0].attempt), bench.now_s)
    bench.worker.receive(Cancel("a", 99), bench.now_s)
    bench.engine.scheduler.check()
    bench.worker.drop()
    bench.engine.scheduler.check()
    assert bench.held == 0
    assert bench.work() == []


def test_a_full_batch_makes_room_for_another_tenant(bench: Bench) -> None:
    bench.set_up(max_running=4)
    many = bench.descriptors("many", 10, tenant="a", n=8, max_tokens=60)
    bench.attach(*many)
    bench.work(3)
    one = bench.descriptors("one", 10, tenant="b", max_tokens=4)
    bench.attach(*one)  # behind four more of the first tenant that have no room
    told = bench.work(3)
    assert any(isinstance(message, TransferDone) and message.request_id == "one" for message in told)
    events = [stamped.event for m in told if isinstance(m, Tokens) for stamped in m.events]
    assert any(event.request_id == "one" for event in events)
    assert bench.engine.scheduler.num_preemptions == 1


def test_whoever_made_room_goes_on_with_the_same_tokens(bench: Bench) -> None:
    answers: list[dict[int, list[int]]] = []
    for disturbed in (False, True):
        bench.set_up(max_running=4)
        bench.attach(*bench.descriptors("many", 10, tenant="a", n=4, max_tokens=30))
        told = bench.work(3)
        if disturbed:
            bench.attach(*bench.descriptors("one", 10, tenant="b", max_tokens=4))
        told += bench.work(80)
        events = [stamped.event for m in told if isinstance(m, Tokens) for stamped in m.events]
        found: dict[int, list[int]] = {}
        for event in events:
            if event.request_id == "many":
                found.setdefault(event.choice, []).append(event.token_id)
        answers.append(found)
    assert answers[0] == answers[1] and all(len(tokens) == 29 for tokens in answers[0].values())


def test_between_much_that_is_adopted_the_batch_gets_its_step(bench: Bench, monkeypatch) -> None:
    """Choices of one request share their blocks: there is next to nothing to copy, and no limit in that."""
    bench.set_up(num_blocks=256, max_running=128)
    adopts = bench.descriptors("a", 63, n=100)
    done: list[str] = []
    attach, step = bench.engine.attach, bench.engine.step
    monkeypatch.setattr(bench.engine, "attach", lambda *args, **more: done.append("a") or attach(*args, **more))
    monkeypatch.setattr(bench.engine, "step", lambda: done.append("s") or step())
    bench.attach(*adopts)
    bench.work(4)
    assert done.count("a") == 100 and max(map(len, "".join(done).split("s"))) <= 64


def test_blocks_under_way_hold_up_their_own_request_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (slow,), (fast,) = bench.descriptors("slow", 100), bench.descriptors("fast", 100)
    here = {slow.descriptor: False, fast.descriptor: True}
    monkeypatch.setattr(MappedKv, "arrived", property(lambda kv: here[kv._table.descriptor()]))
    bench.attach(slow, fast)
    assert [m.request_id for m in bench.work(3) if isinstance(m, TransferDone)] == ["fast"]
    assert bench.worker.moving
    here[slow.descriptor] = True
    assert [m.request_id for m in bench.work() if isinstance(m, TransferDone)] == ["slow"]
    assert not bench.worker.moving
    (late,) = bench.descriptors("late", 100)
    here[late.descriptor] = False
    bench.attach(late)
    bench.work()
    bench.now_s += 5.0
    assert [m.request_id for m in bench.work() if isinstance(m, Refused)] == ["late"]


def test_a_grammar_that_is_being_compiled_holds_up_its_own_request_only(bench: Bench, monkeypatch) -> None:
    guided = bench.descriptors("guided", 100, structure=Structure("regex", "[a-z ]{50}"), tenant="one")
    plain = bench.descriptors("plain", 100, tenant="another")
    with compiling(monkeypatch) as (began, go_on):
        bench.attach(*guided, *plain)
        assert began.wait(60)
        assert [m.request_id for m in bench.work() if isinstance(m, TransferDone)] == ["plain"]
        assert bench.worker.moving
        go_on.set()
        adopted: list[TransferDone] = []
        while not adopted:  # another thread compiles, in real time: on a busy machine the deadline would be over
            adopted = [m for m in bench.work(turn_s=0.0) if isinstance(m, TransferDone)]
        assert adopted[0].request_id == "guided"
