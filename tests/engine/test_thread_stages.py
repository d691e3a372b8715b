"""What the engine's thread tells beside tokens: where the time before the first one went, and whether it moves."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

from tripool.core import Request, SamplingParams, Stages, TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.engine.thread import EngineThread

DEADLINE_S = 60.0
TEXT = fake_text()


class TimedEngine(PagedFake):
    """A step takes one second of a clock that nothing else moves, and waits for its gate."""

    def __init__(self, max_running: int = 64) -> None:
        super().__init__(TEXT, max_running=max_running)
        self.now_s = 100.0
        self.gate = threading.Event()
        self.stepping = threading.Event()

    def clock(self) -> float:
        return self.now_s

    def step(self) -> list[TokenEvent]:
        self.stepping.set()
        assert self.gate.wait(DEADLINE_S)
        events = super().step()
        self.now_s += 1.0
        return events


def request(id: str, **options: object) -> Request:
    params = SamplingParams.from_options({"ignore_eos": True} | options)
    return Request(id=id, prompt_ids=(9, 9), params=params, seed=1, end_ids=TEXT.end_ids)


def test_stages_come_with_each_choices_first_token():
    engine = TimedEngine(max_running=2)
    engine.gate.set()
    thread = EngineThread(engine, clock=engine.clock)

    async def both() -> list[TokenEvent]:
        requests = request("first", n=2, max_tokens=3), request("second", max_tokens=2), request("third", max_tokens=1)
        async with asyncio.timeout(DEADLINE_S), aclosing(thread.stream(*requests)) as events:
            return [event async for event in events]

    events = asyncio.run(both())
    assert thread.close(DEADLINE_S)
    told = {(event.request_id, event.choice): event.stages for event in events if event.index == 0}
    # Choice 1 of the first request waits for the prompt of choice 0, then for a slot; the third waits behind it.
    assert told == {
        ("first", 0): Stages(queue_s=0.0, prefill_s=1.0),
        ("first", 1): Stages(queue_s=0.0, prefill_s=3.0),
        ("second", 0): Stages(queue_s=0.0, prefill_s=1.0),
        ("third", 0): Stages(queue_s=3.0, prefill_s=1.0),
    }
    assert all(event.stages is None for event in events if event.index > 0)


def test_stats_tell_work_from_progress():
    engine = TimedEngine()
    thread = EngineThread(engine, clock=engine.clock)
    assert thread.context_tokens == engine.context_tokens
    engine.now_s += 500
    assert thread.stats().stalled_s == 0.0

    async def stall() -> None:
        async def read() -> int:
            async with aclosing(thread.stream(request("r", max_tokens=4))) as events:
                return len([event async for event in events])

        reading = asyncio.ensure_future(read())
        assert await asyncio.to_thread(engine.stepping.wait, DEADLINE_S)
        assert thread.stats().waiting == 1
        assert thread.stats().stalled_s == 0.0
        engine.now_s += 7
        assert thread.stats().stalled_s == 7.0
        engine.gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await reading == 4

    asyncio.run(stall())
    stats = thread.stats()
    assert (stats.running, stats.waiting, stats.num_steps, stats.stalled_s) == (0, 0, 4, 0.0)
    told = dict(thread.explain("r"))
    assert (told["mode"], told["engine"], told["found running"]) == ("colocated", "fake", 0)
    assert thread.explain("nobody") == {"mode": "colocated", "engine": "fake"}
    assert thread.close(DEADLINE_S)
