"""The parts of the simulation that the rest relies on: chance, processes, connections."""

from __future__ import annotations

import pytest

from tripool.core import FinishReason, Request, SamplingParams, TokenEvent
from tripool.messages import (
    PROTOCOL,
    Answered,
    AnyMessage,
    Heartbeat,
    Hello,
    KvDescriptor,
    Release,
    Stamped,
    StartDecode,
    Tokens,
    TransferReady,
    Welcome,
    WorkerId,
)
from tripool.simulate.checker import Checker
from tripool.simulate.network import Network, SimTransport
from tripool.simulate.process import Baton, Process
from tripool.simulate.rng import Rng
from tripool.simulate.scenario import draw
from tripool.simulate.timeline import Timeline

LIFE = WorkerId("decode-0", 1)
HELLO = Hello(PROTOCOL, "decode", LIFE, 1, "m", 1, 1, 1, 1)


def test_dice_are_fair_and_the_same_everywhere() -> None:
    assert [Rng(0).bits(), Rng(1).bits()] == [0xE220A8397B1DCDAF, 0xBFEF8030DDC2D772]
    rng = Rng(7)
    throws = [rng.between(1, 6) for _ in range(6000)]
    assert all(800 < throws.count(face) < 1200 for face in range(1, 7))
    assert 400 < sum(rng.chance(0.25) for _ in range(2000)) < 600
    assert all(2.0 <= rng.uniform(2.0, 3.0) < 3.0 for _ in range(100))


def test_an_event_planned_in_seconds_is_never_early() -> None:
    """Else a process that waits until then would wait again, at the same time, for ever."""
    rng = Rng(3)
    for _ in range(2000):
        timeline, time_s = Timeline(), rng.uniform(0.0, 60.0)
        timeline.call_at(time_s, lambda: None)
        timeline.run(1)
        assert time_s <= timeline.now_s < time_s + 1e-12
        again_s = timeline.now_s
        timeline.call_at(again_s, lambda: None)
        timeline.run(1)
        assert again_s <= timeline.now_s, "time goes back"


def run_processes(*mains: object, until_s: float = 10.0) -> tuple[Baton, Timeline, list[str]]:
    """Run these, with a list to write to, until the time is over or all have ended."""
    timeline, log = Timeline(), []
    timeline.call_at(until_s, lambda: None)

    def step() -> bool:
        return timeline.run(1) and timeline.now_s < until_s

    baton = Baton(timeline, Rng(1), step)
    for main in mains:
        baton.start(lambda process, main=main: main(process, log), lambda: log.append("ended"))
    return baton, timeline, log


def count(name: str, every_s: float, times: int = 3):
    def main(process: Process, log: list[str]) -> None:
        for number in range(times):
            process.wait(process.now_s + every_s, "step")
            log.append(f"{name}{number}")

    return main


def test_processes_take_turns_by_the_clock() -> None:
    baton, _, log = run_processes(count("a", 1.0), count("b", 0.7))
    baton.run()
    assert log == ["b0", "a0", "b1", "a1", "b2", "ended", "a2", "ended"]


def test_a_stopped_process_goes_on_where_it_was_and_a_killed_one_does_not() -> None:
    baton, timeline, log = run_processes(count("a", 1.0), count("b", 1.0))
    first, second = baton._processes
    timeline.call_at(0.5, first.stop)
    timeline.call_at(2.5, first.go_on)
    timeline.call_at(1.5, second.kill)
    baton.run()
    assert log == ["b0", "a0", "a1", "a2", "ended"]


def test_what_a_process_raises_ends_the_run() -> None:
    def crash(process: Process, log: list[str]) -> None:
        process.wait(1.0, "step")
        raise KeyError("lost")

    baton, _, log = run_processes(crash, count("a", 2.0))
    with pytest.raises(KeyError, match="lost"):
        baton.run()
    assert log == []


def test_a_broken_rule_ends_the_run_whatever_the_code_around_it_catches() -> None:
    def careless(process: Process, log: list[str]) -> None:
        try:
            process.fail("a rule")
        except Exception:  # noqa: BLE001 (as a worker's loop does)
            log.append("caught")

    baton, _, log = run_processes(careless)
    with pytest.raises(AssertionError, match="a rule"):
        baton.run()
    assert log == []


class Wire:
    def __init__(self) -> None:
        self.timeline = Timeline()
        self.at_gateway: list[AnyMessage] = []
        self.network = Network(self.timeline, Rng(1), ["decode-0"])
        self.network.ends[0].to_gateway = lambda worker_id, message: self.at_gateway.append(message)
        self.network.ends[0].knows = lambda worker_id: True
        process = Baton(self.timeline, Rng(1), lambda: False).start(lambda process: None, lambda: None)
        self._transport = SimTransport(self.network, self.timeline, LIFE, process)
        self.channels = [self._transport.connect(f"{number}") for number in (0, 1, 2)]

    def say(self, session: int, message: AnyMessage) -> None:
        self.channels[session].send(message)

    @property
    def at_worker(self) -> list[tuple[int, AnyMessage]]:
        return [(int(channel.identity), message) for channel in self.channels for message in channel.receive()]

    def settle(self) -> None:
        end_s = self.timeline.now_s + 1
        self.timeline.call_at(end_s, lambda: None)
        while self.timeline.now_s < end_s:
            self.timeline.run(1)


def tokens(number: int) -> Tokens:
    return Tokens(LIFE, (Stamped(number, TokenEvent("r", 0, number, 1)),))


def test_messages_keep_their_order() -> None:
    wire = Wire()
    for message in (HELLO, *(tokens(i) for i in range(20))):
        wire.say(1, message)
    wire.settle()
    assert wire.at_gateway == [HELLO, *(tokens(i) for i in range(20))]


def test_an_earlier_session_reaches_nobody() -> None:
    wire = Wire()
    wire.say(1, HELLO)
    wire.settle()
    wire.say(2, HELLO)
    wire.say(1, tokens(1))
    wire.say(2, tokens(2))
    wire.settle()
    assert wire.at_gateway == [HELLO, HELLO, tokens(2)]
    wire.network.send_to_worker(LIFE, Welcome(1, 0.1))
    wire.settle()
    assert wire.at_worker == [(2, Welcome(1, 0.1))]


def test_a_heartbeat_is_taken_by_any_channel_of_a_worker_that_said_hello() -> None:
    wire = Wire()
    heartbeat = Heartbeat(LIFE, 1, 0, 0, 0)
    wire.say(1, heartbeat)
    wire.say(2, HELLO)
    wire.say(0, heartbeat)
    wire.settle()
    assert wire.at_gateway == [HELLO, heartbeat]


def test_a_break_loses_what_is_on_its_way() -> None:
    for keeps in (False, True):
        wire = Wire()
        wire.say(2, HELLO)
        wire.settle()
        wire.say(2, tokens(1))
        wire.network.send_to_worker(LIFE, Welcome(1, 0.1))
        wire.network.break_link("decode-0", keeps=keeps)
        wire.say(2, tokens(2))
        wire.network.mend_link("decode-0")
        wire.settle()
        assert wire.at_gateway == [HELLO, *([tokens(2)] if keeps else [])] and wire.at_worker == []


def test_scenarios_are_drawn_from_their_seed() -> None:
    assert draw(5) == draw(5) != draw(6)
    for seed in range(50):
        scenario = draw(seed)
        assert len(scenario.arrivals) >= 50 and len(scenario.faults) >= 5
        assert {spec.role for spec in scenario.workers.values()} == {"prefill", "decode"}
        assert draw(seed, faults=False).faults == []


def test_kv_may_be_gone_only_where_its_client_left_and_its_lease_was_ended() -> None:
    """Every order of the two; a lease that ended without a cancel, or is not ended after one, is still checked."""
    request = Request(id="r", prompt_ids=(1, 2), params=SamplingParams(max_tokens=4), seed=0)
    sender, ready = WorkerId("prefill-0", 1), KvDescriptor("shared", b"0")

    def leased(*events: str) -> bool:
        answer: tuple[list[int], FinishReason] = [1, 2, 3, 4], "length"
        checker = Checker(Timeline(), {}, False, lambda request, choice: answer)
        checker.arrived(request)
        checker.admitted("r")
        checker.offered(TransferReady(sender, "r", 1, 0, 7, 2, ready))
        checker.sent_to_worker(LIFE, StartDecode(request, 2, Answered(0, (1,)), ready, 0, 1.0))
        for event in events:
            if event == "cancelled":
                checker.cancelled("r")
            else:
                checker.sent_to_worker(sender, Release(int(event)))
        return checker.leased("r", 2) is not None

    assert leased() and leased("7") and leased("cancelled") and leased("cancelled", "8")
    assert not leased("cancelled", "7") and not leased("7", "cancelled")
