"""The pools' carrier over a real socket: one line is one session, however often it says Hello."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from tripool.config import RouterConfig
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.errors import SlowReader, TripoolError
from tripool.gateway.pools import Pools
from tripool.gateway.record import MAX_KEPT
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
    encode,
)
from tripool.token_stream import Tally

LIFE = WorkerId("prefill-0", 1)
HELLO = Hello(PROTOCOL, "prefill", LIFE, 1, "m", 4096, 8, 4096, 100)
PATIENT = RouterConfig(heartbeat_s=60.0, silence_s=600.0, stall_s=600.0)
"""Workers here say nothing between what the tests make them say."""
REQUEST = Request(id="r", prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=1), seed=0)
DEADLINE_S = 60.0


async def serve(address: str, num_hellos: int) -> tuple[list[AnyMessage], list[TokenEvent]]:
    """A request that waits when a worker comes which has been saying Hello for a while."""
    pools = Pools(["m"], PATIENT, addresses=[address], epoch=1, suspect=lambda message: None)
    context = zmq.asyncio.Context()
    worker = context.socket(zmq.DEALER)
    heard: list[AnyMessage] = []
    try:
        pools.start()
        stream = pools.backends["m"].stream(REQUEST)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        worker.setsockopt(zmq.ROUTING_ID, b"prefill-0.1.1")
        worker.connect(address)
        for _ in range(num_hellos):
            await worker.send(encode(HELLO))
        attempt = 0
        while not attempt or await worker.poll(300):
            message = decode(await asyncio.wait_for(worker.recv(), DEADLINE_S))
            heard.append(message)
            attempt = message.attempt if isinstance(message, StartPrefill) else attempt
        event = TokenEvent("r", 0, 0, 7, "length")
        await worker.send(encode(Tokens(LIFE, (Stamped(attempt, event),))))
        events = [await asyncio.wait_for(first, DEADLINE_S)]
        await stream.aclose()
        return heard, events
    finally:
        pools.close()
        worker.close(0)
        context.term()


def test_hellos_that_piled_up_are_one_hello(tmp_path: Path) -> None:
    heard, events = asyncio.run(serve(f"ipc://{tmp_path}/g", num_hellos=12))
    assert [message.attempt for message in heard if isinstance(message, StartPrefill)] == [1]
    assert any(isinstance(message, Welcome) for message in heard)
    assert [event.token_id for event in events] == [7]


def test_without_workers_it_says_what_is_missing(tmp_path: Path) -> None:
    """A load balancer that asks whether it is ready must not send requests that would only wait."""

    async def look() -> list[str]:
        pools = Pools(["m"], PATIENT, addresses=[f"ipc://{tmp_path}/g"], epoch=1, suspect=lambda message: None)
        pools.start()
        try:
            missing = [pools.backends["m"].stats().missing]
            for worker_id, role in ((LIFE, "prefill"), (WorkerId("decode-0", 1), "decode")):
                with zmq.Context() as context, context.socket(zmq.DEALER) as worker:
                    worker.setsockopt(zmq.ROUTING_ID, f"{worker_id}.1".encode())
                    worker.connect(f"ipc://{tmp_path}/g")
                    worker.send(encode(Hello(PROTOCOL, role, worker_id, 1, "m", 4096, 8, 4096, 100)))
                    async with asyncio.timeout(DEADLINE_S):
                        while not any(one["worker"] == worker_id.name for one in pools.describe()["workers"]):
                            await asyncio.sleep(0.01)
                missing.append(pools.backends["m"].stats().missing)
            return missing
        finally:
            pools.close()

    assert asyncio.run(look()) == ["there is no prefill worker", "there is no decode worker", ""]


def test_a_worker_whose_connection_has_ended_is_lost_before_it_was_silent_for_long(tmp_path: Path) -> None:
    """And one that only says nothing is not, though the gateway looks whether its connection is there."""

    async def look() -> tuple[list[str], bytes]:
        config = RouterConfig(heartbeat_s=0.05, silence_s=600.0, stall_s=600.0)
        pools = Pools(["m"], config, addresses=[f"ipc://{tmp_path}/g"], epoch=1, suspect=lambda message: None)
        pools.start()
        names = lambda: [one["worker"] for one in pools.describe()["workers"]]  # noqa: E731
        quiet, leaving = zmq.asyncio.Context(), zmq.asyncio.Context()
        try:
            lines = []
            for context, name in ((quiet, "prefill-0"), (leaving, "prefill-1")):
                lines.append(context.socket(zmq.DEALER))
                lines[-1].setsockopt(zmq.ROUTING_ID, f"{name}.1.1".encode())
                lines[-1].connect(f"ipc://{tmp_path}/g")
                await lines[-1].send(encode(replace_name(HELLO, name)))
            async with asyncio.timeout(DEADLINE_S):
                while len(names()) < 2:
                    await asyncio.sleep(0.01)
                assert isinstance(decode(await lines[0].recv()), Welcome)
                looked = await lines[0].recv()
                lines[1].close(0)
                while len(names()) == 2:
                    await asyncio.sleep(0.01)
            return names(), looked
        finally:
            pools.close()
            for line in lines:
                line.close(0)
            quiet.term()
            leaving.term()

    assert asyncio.run(look()) == (["prefill-0"], b"")


def replace_name(hello: Hello, name: str) -> Hello:
    return msgspec.structs.replace(hello, worker_id=WorkerId(name, 1))


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
        address, tally = f"ipc://{tmp_path}/g", Little()
        pools = Pools(["m"], PATIENT, addresses=[address], epoch=1, suspect=lambda message: None)
        context = zmq.asyncio.Context()
        worker = context.socket(zmq.DEALER)
        try:
            pools.start()
            stream = pools.backends["m"].stream(
                replace(REQUEST, params=SamplingParams(n=8, max_tokens=1)), watcher=tally
            )
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            worker.setsockopt(zmq.ROUTING_ID, b"prefill-0.1.1")
            worker.connect(address)
            await worker.send(encode(HELLO))
            while not isinstance(begin := decode(await asyncio.wait_for(worker.recv(), DEADLINE_S)), StartPrefill):
                pass
            events = tuple(Stamped(begin.attempt, TokenEvent("r", choice, 0, 7, "length")) for choice in range(1))
            await worker.send(encode(Tokens(LIFE, events)))
            assert (await asyncio.wait_for(first, DEADLINE_S)).choice == 0
            events = tuple(Stamped(begin.attempt, TokenEvent("r", choice, 0, 7, "length")) for choice in range(1, 5))
            await worker.send(encode(Tokens(LIFE, events)))
            message = decode(await asyncio.wait_for(worker.recv(), DEADLINE_S))
            while not isinstance(message, Cancel):
                message = decode(await asyncio.wait_for(worker.recv(), DEADLINE_S))
            with pytest.raises(SlowReader):
                await anext(stream)
            return tally
        finally:
            pools.close()
            worker.close(0)
            context.term()

    tally = asyncio.run(go())
    assert tally.num_made == {"r": 5} and tally.over_ids == ["r"]


def test_a_failure_reaches_a_reader_that_was_busy_meanwhile(tmp_path: Path) -> None:
    """Not the end of the stream, which would look like the end of the answer."""

    async def go() -> None:
        address = f"ipc://{tmp_path}/g"
        pools = Pools(["m"], PATIENT, addresses=[address], epoch=1, suspect=lambda message: None)
        context = zmq.asyncio.Context()
        worker = context.socket(zmq.DEALER)
        try:
            pools.start()
            stream = pools.backends["m"].stream(replace(REQUEST, params=SamplingParams(max_tokens=8)))
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            worker.setsockopt(zmq.ROUTING_ID, b"prefill-0.1.1")
            worker.connect(address)
            await worker.send(encode(HELLO))
            while not isinstance(begin := decode(await asyncio.wait_for(worker.recv(), DEADLINE_S)), StartPrefill):
                pass
            await worker.send(encode(Tokens(LIFE, (Stamped(begin.attempt, TokenEvent("r", 0, 0, 7)),))))
            assert (await asyncio.wait_for(first, DEADLINE_S)).token_id == 7
            await worker.send(encode(Refused(LIFE, "r", begin.attempt, "internal_error", "it failed", "", final=True)))
            async with asyncio.timeout(DEADLINE_S):
                while len(pools.backends["m"].coordinator.ledger):
                    await asyncio.sleep(0.01)
            with pytest.raises(TripoolError, match="it failed"):
                await anext(stream)
        finally:
            pools.close()
            worker.close(0)
            context.term()

    asyncio.run(go())


def test_what_is_known_of_an_open_request_outlives_a_thousand_others(tmp_path: Path) -> None:
    """Theirs may be another tenant's."""

    async def look() -> tuple[object, int]:
        pools = Pools(["m"], PATIENT, addresses=[f"ipc://{tmp_path}/g"], epoch=1, suspect=lambda message: None)
        pools.start()
        try:
            waiting = asyncio.ensure_future(anext(pools.backends["m"].stream(REQUEST)))
            await asyncio.sleep(0)
            for number in range(MAX_KEPT + 100):
                other = asyncio.ensure_future(anext(pools.backends["m"].stream(replace(REQUEST, id=f"o{number}"))))
                await asyncio.sleep(0)
                pools.backends["m"].cancel(f"o{number}")
                other.cancel()
            told = pools.backends["m"].explain("r").get("mode")
            waiting.cancel()
            return told, len(pools.backends["m"]._traces)
        finally:
            pools.close()

    assert asyncio.run(look()) == ("split", MAX_KEPT)
