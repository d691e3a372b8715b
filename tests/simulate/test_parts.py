"""The parts of the simulation that the rest believes in: chance, the made-up model, connections."""

from __future__ import annotations

from dataclasses import replace

from tripool.core import Request, SamplingParams
from tripool.messages import PROTOCOL, AnyMessage, Heartbeat, Hello, Welcome, WorkerId
from tripool.sequence import Seq, Task
from tripool.simulate.clock import Clock
from tripool.simulate.model import END_ID, Memory, answer, sample
from tripool.simulate.network import Network
from tripool.simulate.rng import Rng
from tripool.simulate.scenario import draw

LIFE = WorkerId("decode-0", 1)
HELLO = Hello(PROTOCOL, "decode", LIFE, 1, "m", 1, 1, 1, 1)


def test_dice_are_fair_and_the_same_everywhere() -> None:
    assert [Rng(0).bits(), Rng(1).bits()] == [0xE220A8397B1DCDAF, 0xBFEF8030DDC2D772]
    rng = Rng(7)
    throws = [rng.between(1, 6) for _ in range(6000)]
    assert all(800 < throws.count(face) < 1200 for face in range(1, 7))
    assert 400 < sum(rng.chance(0.25) for _ in range(2000)) < 600
    assert all(2.0 <= rng.uniform(2.0, 3.0) < 3.0 for _ in range(100))


def request(**more: object) -> Request:
    base = Request(
        id="r", prompt_ids=(1, 2, 3, 4, 5), params=SamplingParams(max_tokens=9), seed=3, end_ids=frozenset({END_ID})
    )
    return replace(base, **more)


def test_an_answer_depends_on_everything_it_should() -> None:
    usual = answer(request(), 0)
    assert usual == answer(request(id="other"), 0)
    for other in (request(seed=4), request(prompt_ids=(2, 2, 3, 4, 5)), request(namespace="b")):
        assert answer(other, 0) != usual
    assert answer(request(), 1) != usual


def test_memory_computes_the_answer_in_any_cut_and_wrong_memory_another() -> None:
    tokens, _ = answer(request(params=SamplingParams(max_tokens=6, ignore_eos=True)), 0)
    for cut in (1, 2, 5):
        memory, seq = Memory(8, 2), Seq(request(), 0, 0, 9, [1, 2, 3, 4, 5], table=[7, 2, 0, 5, 1, 3])
        for token in tokens:
            while seq.num_computed < len(seq.tokens):
                task = Task(seq, seq.work(cut))
                value = memory.run(task)
                seq.num_computed = task.work.stop
            assert sample(value, seq.request, 0, len(seq.tokens)) == token
            seq.tokens.append(token)
    last = Task(seq, seq.work(1))
    right = memory.run(last)
    memory.write(seq.table[4], (1, 2))  # the block before it
    assert memory.run(last) != right


class Wire:
    def __init__(self) -> None:
        self.clock = Clock(None)
        self.at_gateway: list[AnyMessage] = []
        self.at_worker: list[tuple[int, AnyMessage]] = []
        self.network = Network(
            self.clock,
            Rng(1),
            ["decode-0"],
            lambda worker_id, session, message: self.at_worker.append((session, message)),
            lambda worker_id, message: self.at_gateway.append(message),
        )

    def say(self, session: int, message: AnyMessage) -> None:
        self.network.send_to_gateway(LIFE, session, message)

    def settle(self) -> None:
        self.clock.at(self.clock.now_s + 1, lambda: None)
        end_s = self.clock.now_s + 1
        while self.clock.now_s < end_s:
            self.clock.step()


def heartbeat(num_steps: int) -> Heartbeat:
    return Heartbeat(LIFE, num_steps, 0, 0, 0)


def test_messages_keep_their_order() -> None:
    wire = Wire()
    for message in (HELLO, *(heartbeat(i) for i in range(20))):
        wire.say(1, message)
    wire.settle()
    assert wire.at_gateway == [HELLO, *(heartbeat(i) for i in range(20))]


def test_an_earlier_session_reaches_nobody() -> None:
    wire = Wire()
    wire.say(1, HELLO)
    wire.settle()
    wire.say(2, HELLO)
    wire.say(1, heartbeat(1))
    wire.say(2, heartbeat(2))
    wire.settle()
    assert wire.at_gateway == [HELLO, HELLO, heartbeat(2)]
    wire.network.send_to_worker(LIFE, Welcome(1, 0.1))
    wire.settle()
    assert wire.at_worker == [(2, Welcome(1, 0.1))]


def test_a_break_loses_what_is_on_its_way() -> None:
    for keeps in (False, True):
        wire = Wire()
        wire.say(1, HELLO)
        wire.settle()
        wire.say(1, heartbeat(1))
        wire.network.send_to_worker(LIFE, Welcome(1, 0.1))
        wire.network.break_link("decode-0", keeps=keeps)
        wire.say(1, heartbeat(2))
        wire.network.mend_link("decode-0")
        wire.settle()
        assert wire.at_gateway == [HELLO, *([heartbeat(2)] if keeps else [])] and wire.at_worker == []


def test_scenarios_are_drawn_from_their_seed() -> None:
    assert draw(5) == draw(5) != draw(6)
    for seed in range(50):
        scenario = draw(seed)
        assert len(scenario.arrivals) >= 50 and len(scenario.faults) >= 5
        assert {spec.role for spec in scenario.workers.values()} == {"prefill", "decode"}
        assert draw(seed, faults=False).faults == []
