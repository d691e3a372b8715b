"""Consumers come and go, engines fail: nobody hangs and nothing stays open. Every wait here has a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from math import inf

import pytest

from grammar.counted import compiling
from tripool.core import Request, SamplingParams, Structure, TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.engine.thread import EngineThread
from tripool.errors import ContextOverflow, EngineStopped, InvalidRequest, SlowReader
from tripool.token_stream import Tally

DEADLINE_S = 60.0
TEXT = fake_text()


class GatedEngine(PagedFake):
    """Steps only while its gate is open; notes the threads that touch it."""

    def __init__(self, *, context_tokens: int = 10**9, failing: bool = False) -> None:
        super().__init__(TEXT, context_tokens=context_tokens)
        self.gate = threading.Event()
        self.gate.set()
        self.stepping, self.idle = threading.Event(), threading.Event()
        self.num_steps = 0
        self.failing = failing
        self.threads: set[str] = set()

    def add(self, request: Request) -> None:
        self.threads.add(threading.current_thread().name)
        super().add(request)
        self.idle.clear()

    def cancel(self, request_id: str) -> None:
        self.threads.add(threading.current_thread().name)
        super().cancel(request_id)
        if not self.open_requests:
            self.idle.set()

    def step(self) -> list[TokenEvent]:
        self.threads.add(threading.current_thread().name)
        self.num_steps += 1
        self.stepping.set()
        assert self.gate.wait(DEADLINE_S)
        if self.failing:
            raise RuntimeError("out of magic smoke")
        events = super().step()
        if not self.open_requests:
            self.idle.set()
        return events


@contextmanager
def running(engine: PagedFake) -> Iterator[EngineThread]:
    thread = EngineThread(engine)
    try:
        yield thread
    finally:
        assert thread.close(DEADLINE_S)


def request(id: str, **options: object) -> Request:
    params = SamplingParams.from_options({"ignore_eos": True} | options)
    return Request(id=id, prompt_ids=(9, 9), params=params, seed=1, end_ids=TEXT.end_ids)


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(bounded())


async def collect(thread: EngineThread, *requests: Request) -> list[TokenEvent]:
    async with aclosing(thread.stream(*requests)) as events:
        return [event async for event in events]


def test_streams_get_their_own_events_in_order():
    engine = GatedEngine()

    async def many(thread):
        return await asyncio.gather(*(collect(thread, request(f"r{i}", n=2, max_tokens=10 + i)) for i in range(20)))

    with running(engine) as thread:
        results = run(many(thread))
    for i, events in enumerate(results):
        assert {event.request_id for event in events} == {f"r{i}"}
        for choice in (0, 1):
            assert [event.index for event in events if event.choice == choice] == list(range(10 + i))
    assert engine.threads == {"tripool-engine"}
    assert not engine.open_requests


def test_one_stream_of_several_requests():
    with running(GatedEngine()) as thread:
        events = run(collect(thread, request("a", max_tokens=3), request("b", max_tokens=30)))
    assert [event.request_id for event in events].count("a") == 3
    assert [event.request_id for event in events].count("b") == 30


def test_several_loops_at_once():
    with running(GatedEngine()) as thread:
        counts: dict[str, int] = {}

        def consume(name: str) -> None:
            counts[name] = len(run(collect(thread, request(name, max_tokens=200))))

        consumers = [threading.Thread(target=consume, args=(f"loop{i}",)) for i in range(3)]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join(DEADLINE_S)
    assert counts == {f"loop{i}": 200 for i in range(3)}


def test_leaving_early_cancels():
    engine = GatedEngine()

    async def leave(thread):
        async with aclosing(thread.stream(request("r"))) as events:
            async for event in events:
                if event.index == 3:
                    break

    with running(engine) as thread:
        run(leave(thread))
        assert engine.idle.wait(DEADLINE_S)


def test_a_cancelled_task_cancels():
    engine = GatedEngine()

    async def cancel(thread):
        task = asyncio.ensure_future(collect(thread, request("r")))
        await asyncio.to_thread(engine.stepping.wait, DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with running(engine) as thread:
        run(cancel(thread))
        assert engine.idle.wait(DEADLINE_S)


def test_cancelling_one_request_leaves_its_neighbour():
    async def cancel_one(thread):
        seen = []
        async with aclosing(thread.stream(request("endless"), request("short", max_tokens=50))) as events:
            async for event in events:
                seen.append(event.request_id)
                if event.request_id == "endless":
                    thread.cancel("endless")
                    thread.cancel("endless")
        return seen

    engine = GatedEngine()
    with running(engine) as thread:
        seen = run(cancel_one(thread))
        assert seen.count("endless") == 1
        assert seen.count("short") == 50


def test_cancel_from_another_task_ends_a_waiting_stream():
    engine = GatedEngine()
    engine.gate.clear()

    async def cancel(thread):
        task = asyncio.ensure_future(collect(thread, request("r")))
        await asyncio.to_thread(engine.stepping.wait, DEADLINE_S)
        thread.cancel("r")
        return await task

    with running(engine) as thread:
        assert run(cancel(thread)) == []
        engine.gate.set()


def test_a_refused_request_raises_and_takes_its_group_along():
    engine = GatedEngine(context_tokens=100)
    with running(engine) as thread:
        with pytest.raises(ContextOverflow):
            run(collect(thread, request("fine", max_tokens=5), replace(request("big"), prompt_ids=(9,) * 100)))
        assert len(run(collect(thread, request("later", max_tokens=5)))) == 5
        assert not engine.open_requests


def test_a_closed_loop_does_not_hold_its_requests():
    engine = GatedEngine()
    with running(engine) as thread:
        loop = asyncio.new_event_loop()
        stream = thread.stream(request("r"))
        loop.run_until_complete(anext(stream))
        loop.close()  # without ending the stream: rude, but a program may
        assert engine.idle.wait(DEADLINE_S)
        with pytest.raises(StopIteration):  # how a coroutine that waits for nothing says that it is done
            stream.aclose().send(None)


def test_a_backlog_gives_way_to_other_tasks():
    engine = GatedEngine()

    async def consume(thread):
        num_turns = 0

        async def take_turns():
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async with aclosing(thread.stream(request("r", max_tokens=200))) as events:
            await anext(events)
            await asyncio.to_thread(engine.idle.wait, DEADLINE_S)  # all 200 are made, and wait to be read
            taking = asyncio.ensure_future(take_turns())
            num_read = len([event async for event in events])
            taking.cancel()
        return num_read, num_turns

    with running(engine) as thread:
        num_read, num_turns = run(consume(thread))
    assert num_read == 199
    assert num_turns > 190


def test_idle_thread_does_not_step():
    engine = GatedEngine()
    with running(engine) as thread:
        run(collect(thread, request("r", max_tokens=5)))
        assert engine.num_steps == 5
    assert engine.num_steps == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_engine_ends_every_stream():
    engine = GatedEngine(failing=True)
    engine.gate.clear()

    async def fail(thread):
        tasks = [asyncio.ensure_future(collect(thread, request(f"r{i}"))) for i in range(3)]
        await asyncio.to_thread(engine.stepping.wait, DEADLINE_S)
        engine.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineStopped] * 3
        assert "RuntimeError" in str(results[0]) and "magic smoke" not in str(results[0])
        with pytest.raises(EngineStopped, match="RuntimeError"):
            await collect(thread, request("later"))

    with running(engine) as thread:
        run(fail(thread))
        assert not thread.alive


def test_close_ends_open_streams_and_frees_the_engine():
    engine = GatedEngine()
    thread = EngineThread(engine)

    async def close():
        task = asyncio.ensure_future(collect(thread, request("r")))
        await asyncio.to_thread(engine.stepping.wait, DEADLINE_S)
        assert await asyncio.to_thread(thread.close, DEADLINE_S)
        with pytest.raises(EngineStopped):
            await task
        with pytest.raises(EngineStopped):
            await collect(thread, request("later"))

    run(close())
    assert not engine.open_requests
    assert thread.close(0)


def test_close_is_bounded_when_a_step_hangs():
    engine = GatedEngine()
    engine.gate.clear()
    thread = EngineThread(engine)

    async def close():
        task = asyncio.ensure_future(collect(thread, request("r")))
        await asyncio.to_thread(engine.stepping.wait, DEADLINE_S)
        assert not await asyncio.to_thread(thread.close, 0.01)
        with pytest.raises(EngineStopped):
            await task

    run(close())
    engine.gate.set()
    assert thread.close(DEADLINE_S)


class Counting(Tally):
    """May have little unread."""

    def __init__(self, max_unread: float = inf) -> None:
        super().__init__(max_unread)
        self.over_ids: list[str] = []

    def over(self, request_id: str) -> None:
        self.over_ids.append(request_id)


def test_what_is_not_read_counts_and_the_end_of_computing_is_told_before_the_end_of_reading():
    engine, tally = GatedEngine(), Counting()

    async def hang_up(thread):
        async with aclosing(thread.stream(request("r", n=3, max_tokens=50), watcher=tally)) as events:
            await anext(events)
            await asyncio.to_thread(engine.idle.wait, DEADLINE_S)
            while "r" not in tally.over_ids:
                await asyncio.sleep(0)
            return thread.stats().running

    with running(engine) as thread:
        assert run(hang_up(thread)) == 0
    assert tally.num_made == {"r": 150} and tally.over_ids == ["r"]


def test_who_does_not_read_is_computed_for_no_longer():
    engine, tally = GatedEngine(), Counting(max_unread=100)

    async def trickle(thread):
        events = thread.stream(request("r"), watcher=tally)
        with pytest.raises(SlowReader):  # noqa: PT012 (the engine may be so fast that already the first is too late)
            await anext(events)
            assert await asyncio.to_thread(engine.idle.wait, DEADLINE_S), "it would go on for ever"
            await anext(events)
        return len(await collect(thread, request("next", max_tokens=5)))

    with running(engine) as thread:
        assert run(trickle(thread)) == 5
    assert tally.over_ids == ["r"]


class Ordered(GatedEngine):
    """Notes in which order things are done: how many choices were added, and steps between."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[int] = []

    def add(self, request: Request) -> None:
        super().add(request)
        self.done.append(request.params.n)

    def step(self) -> list[TokenEvent]:
        self.done.append(0)
        return super().step()


def test_between_much_that_is_added_others_get_their_steps():
    engine = Ordered()
    engine.gate.clear()

    async def flood(thread):
        tasks = [asyncio.ensure_future(collect(thread, request("first", max_tokens=3)))]
        await asyncio.to_thread(engine.stepping.wait, DEADLINE_S)
        tasks += [asyncio.ensure_future(collect(thread, request(f"r{i}", n=16, max_tokens=1))) for i in range(40)]
        while thread._commands.qsize() < 40:
            await asyncio.sleep(0)
        engine.gate.set()
        await asyncio.gather(*tasks)

    with running(engine) as thread:
        run(flood(thread))
    added, most = 0, 0
    for count in engine.done:
        added = added + count if count else 0
        most = max(most, added)
    assert sum(engine.done) == 1 + 40 * 16 and most <= 64


GUIDED = Structure("regex", "[a-z]{3}")


def test_a_grammar_that_takes_long_to_compile_holds_up_its_own_request_only(monkeypatch):
    engine = GatedEngine()

    async def compete(thread):
        guided = asyncio.ensure_future(collect(thread, request("guided", structure=GUIDED, n=2)))
        await asyncio.to_thread(began.wait, DEADLINE_S)
        assert len(await collect(thread, request("plain", max_tokens=20))) == 20
        assert not guided.done() and thread.stats().stalled_s == 0.0
        go_on.set()
        assert {event.request_id for event in await guided} == {"guided"}

    with compiling(monkeypatch) as (began, go_on), running(engine) as thread:
        run(compete(thread))


@pytest.mark.parametrize("left", [0, 1])
def test_what_is_cancelled_while_its_grammar_is_compiled_is_never_added(monkeypatch, left: int):
    engine = GatedEngine()

    async def cancel(thread):
        both = [request(f"r{i}", structure=GUIDED) for i in range(2)]
        task = asyncio.ensure_future(collect(thread, *both))
        await asyncio.to_thread(began.wait, DEADLINE_S)
        for each in both[left:]:
            thread.cancel(each.id)
        go_on.set()
        assert {event.request_id for event in await task} == {each.id for each in both[:left]}

    with compiling(monkeypatch) as (began, go_on), running(engine) as thread:
        run(cancel(thread))
        assert not thread._streams
    assert not engine.open_requests


def test_a_client_that_leaves_while_its_grammar_is_compiled_takes_it_from_nobody(monkeypatch):
    engine = GatedEngine()

    async def leave(thread):
        tasks = [asyncio.ensure_future(collect(thread, request(f"r{i}", structure=GUIDED))) for i in range(2)]
        await asyncio.to_thread(began.wait, DEADLINE_S)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        go_on.set()
        assert await tasks[1]

    with compiling(monkeypatch) as (began, go_on), running(engine) as thread:
        run(leave(thread))


def test_a_bad_grammar_is_refused_as_before():
    with running(GatedEngine()) as thread:
        with pytest.raises(InvalidRequest, match="unclosed"):
            run(collect(thread, request("bad", structure=Structure("regex", "["))))
        assert run(collect(thread, request("good", structure=GUIDED)))
