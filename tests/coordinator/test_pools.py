"""Workers, coordinator and gateway over real sockets: one line is one session, however often it says Hello."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tripool.config import RouterConfig
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.errors import SlowReader, TripoolError
from tripool.messages import (
    PROTOCOL,
    AnyMessage,
    Cancel,
    Hello,
    Refused,
    Stamped,
    StartPrefill,
    Tokens,
    Welcome,
    WorkerId,
    decode,
)
from tripool.router.service import MAX_KEPT
from tripool.token_stream import Tally

from .serving import DEADLINE_S, serving

LIFE = WorkerId("prefill-0", 1)
HELLO = Hello(PROTOCOL, "prefill", LIFE, 1, "m", 4096, 8, 4096, 100)
REQUEST = Request(id="r", prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=1), seed=0)


def test_hellos_that_piled_up_are_one_hello(tmp_path: Path) -> None:
    """A request that waits when a worker comes which has been saying Hello for a while."""

    async def go() -> tuple[list[AnyMessage], TokenEvent]:
        async with serving(tmp_path) as server:
            stream = server.backend.stream(REQUEST)
            first = asyncio.ensure_future(anext(stream))
            await server.until_there("r")
            worker = await server.worker(HELLO)
            for _ in range(11):
                await worker.send(HELLO)
            heard: list[AnyMessage] = []
            attempt = 0
            while not attempt or await worker.line.poll(300):
                heard.append(message := await worker.hear())
                attempt = message.attempt if isinstance(message, StartPrefill) else attempt
            event = TokenEvent("r", 0, 0, 7, "length")
            await worker.send(Tokens(LIFE, (Stamped(attempt, event),)))
            told = await asyncio.wait_for(first, DEADLINE_S)
            await stream.aclose()
            return heard, told

    heard, event = asyncio.run(go())
    assert [message.attempt for message in heard if isinstance(message, StartPrefill)] == [1]
    assert any(isinstance(message, Welcome) for message in heard)
    assert event.token_id == 7


def test_without_workers_it_says_what_is_missing(tmp_path: Path) -> None:
    """A load balancer that asks whether it is ready must not send requests that would only wait."""

    async def look() -> list[str]:
        async with serving(tmp_path) as server:
            missing = []

            async def until(change: str | None) -> None:
                async with asyncio.timeout(DEADLINE_S):
                    while (now := server.backend.stats().missing) == change:
                        await asyncio.sleep(0.01)
                missing.append(now)

            await until(None)
            for worker_id, role in ((LIFE, "prefill"), (WorkerId("decode-0", 1), "decode")):
                await server.worker(Hello(PROTOCOL, role, worker_id, 1, "m", 4096, 8, 4096, 100))
                await until(missing[-1])
            return missing

    assert asyncio.run(look()) == ["there is no prefill worker", "there is no decode worker", ""]


def test_a_worker_whose_connection_has_ended_is_lost_before_it_was_silent_for_long(tmp_path: Path) -> None:
    """And one that only says nothing is not, though the coordinator looks whether its connection is there."""

    async def look() -> tuple[list[str], bytes]:
        config = RouterConfig(heartbeat_s=0.05, silence_s=600.0, stall_s=600.0)
        async with serving(tmp_path, config) as server:
            names = lambda: [one["worker"] for one in server.coordinator.pools.describe()["workers"]]  # noqa: E731
            quiet = await server.worker(HELLO)
            leaving = await server.worker(msgspec.structs.replace(HELLO, worker_id=WorkerId("prefill-1", 1)))
            async with asyncio.timeout(DEADLINE_S):
                while len(names()) < 2:
                    await asyncio.sleep(0.01)
                assert isinstance(await quiet.hear(), Welcome)
                looked = await quiet.line.recv()
                leaving.line.close(0)
                while len(names()) == 2:
                    await asyncio.sleep(0.01)
            return names(), looked

    assert asyncio.run(look()) == (["prefill-0"], b"")


class Little(Tally):
    """May have little unread."""

    def __init__(self) -> None:
        super().__init__(max_unread=3)
        self.over_ids: list[str] = []

    def over(self, request_id: str) -> None:
        self.over_ids.append(request_id)


def test_who_does_not_read_is_computed_for_no_longer(tmp_path: Path) -> None:
    """All that comes is counted; beyond its bound the worker is told to stop, and the reader why."""

    async def go() -> Little:
        tally = Little()
        async with serving(tmp_path) as server:
            request = replace(REQUEST, params=SamplingParams(n=8, max_tokens=1))
            stream = server.backend.stream(request, watcher=tally)
            first = asyncio.ensure_future(anext(stream))
            worker = await server.worker(HELLO)
            begin = await worker.begun()
            events = tuple(Stamped(begin.attempt, TokenEvent("r", choice, 0, 7, "length")) for choice in range(1))
            await worker.send(Tokens(LIFE, events))
            assert (await asyncio.wait_for(first, DEADLINE_S)).choice == 0
            events = tuple(Stamped(begin.attempt, TokenEvent("r", choice, 0, 7, "length")) for choice in range(1, 5))
            await worker.send(Tokens(LIFE, events))
            while not isinstance(await worker.hear(), Cancel):
                pass
            with pytest.raises(SlowReader):
                await anext(stream)
            return tally

    tally = asyncio.run(go())
    assert tally.num_made == {"r": 5} and tally.over_ids == ["r"]


def test_a_failure_reaches_a_reader_that_was_busy_meanwhile(tmp_path: Path) -> None:
    """Not the end of the stream, which would look like the end of the answer."""

    async def go() -> None:
        async with serving(tmp_path) as server:
            stream = server.backend.stream(replace(REQUEST, params=SamplingParams(max_tokens=8)))
            first = asyncio.ensure_future(anext(stream))
            worker = await server.worker(HELLO)
            begin = await worker.begun()
            await worker.send(Tokens(LIFE, (Stamped(begin.attempt, TokenEvent("r", 0, 0, 7)),)))
            assert (await asyncio.wait_for(first, DEADLINE_S)).token_id == 7
            await worker.send(Refused(LIFE, "r", begin.attempt, "internal_error", "it failed", "", final=True))
            async with asyncio.timeout(DEADLINE_S):
                while server.link.num_open:
                    await asyncio.sleep(0.01)
            assert not len(server.coordinator.service)
            with pytest.raises(TripoolError, match="it failed"):
                await anext(stream)

    asyncio.run(go())


def test_last_tokens_of_one_step_all_reach_their_client(tmp_path: Path) -> None:
    """The service is done with the request before the first of them is sent."""

    async def go() -> None:
        async with serving(tmp_path) as server:
            stream = server.backend.stream(replace(REQUEST, params=SamplingParams(n=3, max_tokens=1)))
            first = asyncio.ensure_future(anext(stream))
            worker = await server.worker(HELLO)
            begin = await worker.begun()
            events = tuple(Stamped(begin.attempt, TokenEvent("r", choice, 0, 7, "length")) for choice in range(3))
            await worker.send(Tokens(LIFE, events))
            async with asyncio.timeout(DEADLINE_S):
                choices = [(await first).choice, *[event.choice async for event in stream]]
            assert choices == [0, 1, 2] and not server.link.num_open

    asyncio.run(go())


def test_what_is_known_of_an_open_request_outlives_a_thousand_others(tmp_path: Path) -> None:
    """Theirs may be another tenant's."""

    async def look() -> tuple[object, int]:
        async with serving(tmp_path) as server:
            service = server.coordinator.service
            waiting = asyncio.ensure_future(anext(server.backend.stream(REQUEST)))
            await server.until_there("r")
            for number in range(MAX_KEPT + 100):
                other = replace(REQUEST, id=f"o{number}")
                server.coordinator.pools.carry_out(service.submit([other], server.tenants[""], 1.0))
                server.coordinator.pools.carry_out(service.cancel(other.id, 1.0))
            told = (await server.backend.explained("r")).get("mode")
            waiting.cancel()
            return told, len(service._told)

    assert asyncio.run(look()) == ("split", MAX_KEPT)


def test_a_worker_that_says_what_it_is_not_asked_is_not_heard(tmp_path: Path) -> None:
    async def go() -> bytes:
        async with serving(tmp_path) as server:
            worker = await server.worker(HELLO)
            await worker.line.send(b"\xc1 not a message")
            await worker.send(HELLO)
            return bytes(await worker.line.recv())

    assert isinstance(decode(asyncio.run(go())), Welcome)
