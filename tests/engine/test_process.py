"""An engine in a process of its own, really started: streams as of `EngineThread`, and what the end of a process is."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.fake_program import PROGRAM
from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams, Structure, TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.process import EngineProcess
from tripool.engine.thread import EngineThread
from tripool.engine.wire import OpenEngine
from tripool.errors import ContextOverflow, DeviceOutOfMemory, EngineStopped, InvalidRequest, SlowReader
from tripool.serving.worker import load_pool_engine
from tripool.token_stream import Tally

DEADLINE_S = 60.0
TEXT = fake_text()
SLOW = "fake:step_ms=5,context=100000,blocks=4096"


@contextmanager
def process(model: str) -> Iterator[EngineProcess]:
    opened = OpenEngine(model, EngineConfig(max_running=256))
    engine = EngineProcess(opened, (*PROGRAM, "engine"))
    try:
        yield engine
    finally:
        assert engine.close(DEADLINE_S)


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineProcess]:
    with process(SLOW) as engine:
        yield engine


def request(id: str, **options: object) -> Request:
    params = SamplingParams.from_options({"ignore_eos": True} | options)
    return Request(id=id, prompt_ids=(9, 9), params=params, seed=1, end_ids=TEXT.end_ids)


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(bounded())


async def collect(engine, *requests: Request, watcher: Tally | None = None) -> list[TokenEvent]:
    async with aclosing(engine.stream(*requests, watcher=watcher)) as events:
        return [event async for event in events]


async def until(done) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not done():
            await asyncio.sleep(0.001)


def in_order(events: list[TokenEvent]) -> list[TokenEvent]:
    """Choice by choice, without times."""
    return sorted((replace(event, stages=None) for event in events), key=lambda event: (event.choice, event.index))


def test_many_streams_get_what_a_thread_gives(shared):
    requests = [request(f"r{i}", n=1 + i % 3, max_tokens=5 + i % 7, logprobs=i % 2 or None) for i in range(80)]
    fast = SLOW.replace("step_ms=5", "step_ms=0")
    thread = EngineThread(load_pool_engine(fast, EngineConfig(max_running=256), "decode"))  # type: ignore[arg-type]

    async def all_of(engine):
        return await asyncio.gather(*(collect(engine, one) for one in requests))

    expected, found = run(all_of(thread)), run(all_of(shared))
    assert thread.close(DEADLINE_S)
    for mine, theirs in zip(found, expected, strict=True):
        assert in_order(mine) == in_order(theirs)
    firsts = [event for events in found for event in events if event.index == 0]
    assert all(event.stages is not None and 0 <= event.stages.queue_s < DEADLINE_S for event in firsts)
    assert shared.stats().num_steps > 0 and shared.stats().running == 0 and shared.stats().stalled_s == 0.0
    told = dict(shared.explain("r7"))
    assert told["mode"] == "colocated" and "found running" in told and any("held back" in name for name in told)


def test_long_messages_go_both_ways(shared):
    async def ask():
        long = replace(request("long", max_tokens=2, prompt_logprobs=5), prompt_ids=(9,) * 30_000)
        events = await collect(shared, long)
        assert events[0].prompt_logprobs is not None and len(events[0].prompt_logprobs) == 29_999

    run(ask())


def test_a_cancelled_request_leaves_its_neighbour_and_the_engine(shared):
    async def cancel_one():
        seen = []
        async with aclosing(shared.stream(request("endless"), request("short", max_tokens=20))) as events:
            async for event in events:
                seen.append(event.request_id)
                if event.request_id == "endless":
                    shared.cancel("endless")
        await until(lambda: shared.stats().running == 0)
        return seen

    seen = run(cancel_one())
    assert seen.count("short") == 20


def test_leaving_early_frees_the_engine(shared):
    async def leave():
        async with aclosing(shared.stream(request("left"))) as events:
            async for event in events:
                if event.index == 3:
                    break
        await until(lambda: shared.stats().running == 0)

    run(leave())


def test_who_does_not_read_is_computed_for_no_longer(shared):
    async def trickle():
        tally = Tally(max_unread=20)
        events = shared.stream(request("slow"), watcher=tally)
        with pytest.raises(SlowReader):  # noqa: PT012 (it may come with the first read or with the second)
            await anext(events)
            await until(lambda: shared.stats().running == 0)
            await anext(events)

    run(trickle())


def test_errors_of_a_request_come_as_they_are(shared):
    with pytest.raises(ContextOverflow, match="maximum context length"):
        run(collect(shared, request("fine", max_tokens=5), replace(request("big"), prompt_ids=(9,) * 200_000)))
    with pytest.raises(InvalidRequest) as wrong:
        run(collect(shared, replace(request("empty"), prompt_ids=())))
    assert (wrong.value.param, wrong.value.hint) == ("prompt", "send at least one token")
    with pytest.raises(InvalidRequest, match="unclosed"):
        run(collect(shared, request("bad", structure=Structure("regex", "["))))
    guided = run(collect(shared, request("good", structure=Structure("regex", "[a-z]{3}"))))
    assert guided[-1].finish_reason == "stop"
    assert shared.stats().running == 0


def test_a_signal_to_end_is_for_the_server(shared):
    async def send():
        async with aclosing(shared.stream(request("r", max_tokens=20))) as events:
            first = await anext(events)
            os.kill(shared.pid, signal.SIGTERM)
            return [first, *[event async for event in events]]

    assert len(run(send())) == 20


def test_a_killed_process_ends_every_stream(caplog):
    async def kill(engine):
        tasks = [asyncio.ensure_future(collect(engine, request(f"r{i}"))) for i in range(3)]
        await until(lambda: engine.stats().running == 3)
        os.kill(engine.pid, signal.SIGKILL)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineStopped) and "process has ended" in str(result)
        with pytest.raises(EngineStopped):
            await collect(engine, request("later"))
        assert not engine.alive
        await until(lambda: engine.stats().running == 0)

    with process(SLOW) as engine:
        run(kill(engine))
    (ended,) = [record for record in caplog.records if record.getMessage() == "engine process ended"]
    assert ended.how == "SIGKILL"


def test_a_failing_engine_ends_every_stream_with_its_kind(capfd):
    with process("failing") as engine:
        with pytest.raises(EngineStopped, match="RuntimeError") as stopped:
            run(collect(engine, request("r")))
        assert "magic smoke" not in str(stopped.value) and not engine.alive
    assert "ended by an exception" in capfd.readouterr().err, "the log of the process has it"


def test_a_hanging_step_is_a_stall_and_close_ends_it():
    async def stall(engine):
        task = asyncio.ensure_future(collect(engine, request("r")))
        await until(lambda: engine.stats().running == 1)
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: engine.stats().stalled_s > 0.2)
        assert not await asyncio.to_thread(engine.close, 0)
        with pytest.raises(EngineStopped, match="shut down"):
            await task
        assert await asyncio.to_thread(engine.close, 0.01)  # killed

    with process(SLOW) as engine:
        run(stall(engine))


def test_errors_of_the_start_are_typed():
    with pytest.raises(DeviceOutOfMemory) as failed, process("small-device"):
        pass
    assert (failed.value.hint, failed.value.status) == ("lower --kv-gb", 507)
    with pytest.raises(EngineStopped, match="while it was loading: exit code 1"), process("broken"):
        pass


PARENT = """
import os, sys, threading
from engine.fake_program import PROGRAM
from tripool.config import EngineConfig
from tripool.engine import process
from tripool.engine.wire import OpenEngine
popen = process.subprocess.Popen
def started(*args, **options):
    child = popen(*args, **options)
    print(child.pid, flush=True)
    return child
process.subprocess.Popen = started
process.EngineProcess(OpenEngine(sys.argv[1], EngineConfig()), (*PROGRAM, "engine"))
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("model", ["fake", "endless"])
def test_an_engine_ends_with_its_server(model: str):
    """Also while it loads."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", PARENT, model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None
        child = os.pidfd_open(int(server.stdout.readline()))
        if model == "fake":
            assert server.stdout.readline() == b"ready\n"
        server.kill()
    ended = select.poll()
    ended.register(child, select.POLLIN)
    assert ended.poll(1e3 * DEADLINE_S), "the engine's process outlives its server"
    os.close(child)
