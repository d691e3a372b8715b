"""The coordinator is lost and another one is there: what gateways hold of their answers is enough to go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tripool.core import TokenEvent
from tripool.errors import RateLimited
from tripool.messages import Answered, Stamped, Tokens
from tripool.tenants import Limits, Tenant

from .serving import DEADLINE_S, serving
from .test_pools import HELLO, LIFE, REQUEST

LONG = replace(REQUEST, params=replace(REQUEST.params, max_tokens=4, n=2))


def tokens(attempt: int, *events: TokenEvent) -> Tokens:
    return Tokens(LIFE, tuple(Stamped(attempt, event) for event in events))


def test_an_answer_goes_on_where_its_client_is(tmp_path: Path) -> None:
    """One choice is done, one has a token: the new coordinator has just the rest computed, and counts on."""

    async def go() -> tuple[list[TokenEvent], tuple[Answered, ...]]:
        async with serving(tmp_path) as server:
            stream = server.backend.stream(LONG)
            first = asyncio.ensure_future(anext(stream))
            worker = await server.worker(HELLO)
            begin = await worker.begun()
            done = TokenEvent("r", 0, 0, 5, "stop", num_cached_tokens=2)
            drafted = TokenEvent("r", 1, 0, 6, num_cached_tokens=2, num_draft_tokens=3, num_accepted_draft_tokens=1)
            await worker.send(tokens(begin.attempt, done, drafted))
            events = [await asyncio.wait_for(first, DEADLINE_S), await asyncio.wait_for(anext(stream), DEADLINE_S)]
            server.replace(epoch=2)
            await server.until_there("r")
            await worker.send(HELLO)
            again = await worker.begun()
            rest = [TokenEvent("r", 1, index, 6 + index, num_draft_tokens=1) for index in (1, 2)]
            last = TokenEvent("r", 1, 3, 9, "length", num_draft_tokens=2, num_accepted_draft_tokens=2)
            await worker.send(tokens(again.attempt, *rest, last))
            async with asyncio.timeout(DEADLINE_S):
                events += [event async for event in stream]
            assert not len(server.coordinator.service) and not server.link.num_open
            return events, again.answered

    events, answered = asyncio.run(go())
    assert answered == (Answered(1, (6,)),)
    assert [(event.choice, event.index, event.token_id) for event in events] == [
        (0, 0, 5), (1, 0, 6), (1, 1, 7), (1, 2, 8), (1, 3, 9)
    ]  # fmt: skip
    assert (events[-1].num_cached_tokens, events[-1].num_draft_tokens, events[-1].num_accepted_draft_tokens) == (
        2,
        5,
        3,
    )


def test_what_comes_while_there_is_none_waits_for_the_next(tmp_path: Path) -> None:
    async def go() -> tuple[TokenEvent, object]:
        async with serving(tmp_path) as server:
            server.coordinator.close()
            async with asyncio.timeout(DEADLINE_S):
                while server.link.welcome:
                    await asyncio.sleep(0.005)
            assert server.backend.stats().missing == "there is no coordinator"
            stream = server.backend.stream(REQUEST)
            first = asyncio.ensure_future(anext(stream))
            asked = asyncio.ensure_future(server.backend.explained("r"))
            gone = asyncio.ensure_future(anext(server.backend.stream(replace(REQUEST, id="gone"))))
            await asyncio.sleep(0.01)
            gone.cancel()
            server.replace(epoch=2)
            worker = await server.worker(HELLO)
            begin = await worker.begun()
            await worker.send(tokens(begin.attempt, TokenEvent("r", 0, 0, 7, "length")))
            event = await asyncio.wait_for(first, DEADLINE_S)
            assert "gone" not in server.coordinator.service
            return event, await asyncio.wait_for(asked, DEADLINE_S)

    event, told = asyncio.run(go())
    assert event.token_id == 7 and told is not None


def test_a_coordinator_of_a_lower_epoch_is_refused(tmp_path: Path) -> None:
    """It was stopped while another took its place."""

    async def go() -> list[int]:
        async with serving(tmp_path) as server:
            epochs = [server.link.epoch]
            server.replace(epoch=5)
            async with asyncio.timeout(DEADLINE_S):
                while server.link.epoch < 5:
                    await asyncio.sleep(0.005)
            epochs.append(server.link.epoch)
            stream = server.backend.stream(REQUEST)
            waiting = asyncio.ensure_future(anext(stream))
            await server.until_there("r")
            server.replace(epoch=4)
            worker = await server.worker(HELLO)
            await asyncio.wait_for(worker.hear(), DEADLINE_S)
            assert "r" not in server.coordinator.service, "it decides nothing"
            server.replace(epoch=6)
            await server.until_there("r")
            epochs.append(server.link.epoch)
            waiting.cancel()
            return epochs

    assert asyncio.run(go()) == [1, 5, 6]


def test_rates_are_kept_by_the_coordinator(tmp_path: Path) -> None:
    """Whichever gateway counts a request."""
    tenant = Tenant(name="t", namespace="t", limits=Limits(requests_per_minute=1))

    async def go() -> None:
        async with serving(tmp_path, t=tenant) as server:
            await server.backend.enter(tenant)
            with pytest.raises(RateLimited) as refused:
                await server.backend.enter(tenant)
            assert 1 < (refused.value.retry_after_s or 0) <= 60

    asyncio.run(go())
