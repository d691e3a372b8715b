"""What was made is counted whether it is read or not, and does not pile up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.core import Request, SamplingParams, Slo, TokenEvent, TokenLogprobs
from tripool.errors import EngineStopped, SlowReader, TripoolError
from tripool.token_stream import Tally, TokenStream


class Noting(Tally):
    def __init__(self, max_unread: float = 1000) -> None:
        super().__init__(max_unread)
        self.over_ids: list[str] = []

    def over(self, request_id: str) -> None:
        self.over_ids.append(request_id)


def request(request_id: str, n: int = 1) -> Request:
    return Request(id=request_id, prompt_ids=(1,), params=SamplingParams(n=n), seed=0)


def event(
    request_id: str, index: int = 0, *, choice: int = 0, last: bool = False, top: int | None = None
) -> TokenEvent:
    logprobs = None if top is None else TokenLogprobs(-1.0, tuple((i, -1.0 - i) for i in range(top)))
    return TokenEvent(request_id, choice, index, 7, "length" if last else None, logprobs, num_cached_tokens=3)


def read(stream: TokenStream) -> list[Any]:
    """All that is there, an error included."""

    async def all_there() -> list[Any]:
        found: list[Any] = []
        while stream._items:
            try:
                found.append(await stream.read())
            except TripoolError as error:
                found.append(error)
        return found

    return asyncio.run(all_there())


def test_tokens_count_when_they_come_and_a_request_is_over_when_its_last_has_come() -> None:
    noting = Noting()
    stream = TokenStream([request("a", n=2), request("b")], noting)
    for one in (event("a"), event("a", choice=1, last=True), event("b"), event("a", 1, last=True)):
        assert stream.put(one)
    assert noting.num_made == {"a": 3, "b": 1} and noting.num_cached == {"a": 3, "b": 3}
    assert noting.over_ids == ["a"] and stream.choices_left == {"a": 2, "b": 1}, "nothing of it was read yet"


@pytest.mark.parametrize("top", [None, 0, 20])
def test_beyond_its_bound_it_says_so_once_and_keeps_nothing(top: int | None) -> None:
    size = 1 + (top or 0)
    noting = Noting(max_unread=3 * size)
    stream = TokenStream([request("a"), request("b")], noting)
    assert [stream.put(event("a", index, top=top)) for index in range(5)] == [True, True, True, False, True]
    assert noting.num_made == {"a": 5} and noting.over_ids == ["a", "b"]
    (error,) = read(stream)
    assert isinstance(error, SlowReader)


def test_what_was_read_makes_room() -> None:
    stream = TokenStream([request("a")], Noting(max_unread=2))
    for index in range(0, 100, 2):
        assert stream.put(event("a", index)) and stream.put(event("a", index + 1))
        assert [one.index for one in read(stream)] == [index, index + 1]


def test_a_failure_comes_after_unread_events_or_at_once() -> None:
    for at_once in (False, True):
        noting = Noting()
        stream = TokenStream([request("a")], noting)
        stream.put(event("a"))
        stream.fail(EngineStopped("over"), at_once=at_once)
        assert noting.over_ids == ["a"]
        assert [type(item) for item in read(stream)] == ([] if at_once else [TokenEvent]) + [EngineStopped]


def test_a_cancelled_request_is_over_and_wakes_its_reader() -> None:
    async def go() -> None:
        noting = Noting()
        stream = TokenStream([request("a"), request("b")], noting)
        reader = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        stream.cancelled("a")
        stream.cancelled("a")
        assert noting.over_ids == ["a"] and stream.choices_left == {"b": 1}
        stream.put(event("a"))  # was on its way
        stream.put(event("b", last=True))
        found = await reader
        assert found is not None and found.request_id == "b" and stream.choices_left == {}
        assert await stream.read() is None, "all are over"

    asyncio.run(go())


@given(st.lists(st.one_of(st.integers(0, 3), st.just("read")), max_size=80), st.integers(1, 12))
def test_no_more_than_the_bound_ever_waits(steps: list[Any], bound: int) -> None:
    """The plain one: a list of sizes, as long as it fits."""
    stream, waiting, ended = TokenStream([request("a")], Noting(max_unread=bound)), list[int](), False
    for index, step in enumerate(steps):
        if ended:
            break
        if step == "read":
            if waiting:
                asyncio.run(stream.read())
                waiting.pop(0)
        else:
            waiting.append(1 + step)
            ended = sum(waiting) > bound
            assert stream.put(event("a", index, top=step)) == (not ended)
    assert ended == any(isinstance(item, SlowReader) for item in read(stream))


def test_a_background_answer_is_read_together_unless_it_may_stop_at_a_string() -> None:
    """Of an online answer every token is read as it comes; so is the first of any."""

    async def read_so_far(background: bool, stop: str = "") -> list[int]:
        params = SamplingParams(stop=stop or ())
        asked = Request(id="a", prompt_ids=(1,), params=params, seed=0, slo=Slo(background=background))
        stream, found, sizes = TokenStream([asked]), list[TokenEvent](), list[int]()

        async def reader() -> None:
            while (one := await stream.read()) is not None:
                found.append(one)

        reading = asyncio.create_task(reader())
        for index in range(100):
            stream.put(event("a", index, last=index == 99))
            for _ in range(3):
                await asyncio.sleep(0)
            sizes.append(len(found))
        await reading
        assert [one.index for one in found] == list(range(100))
        return sizes

    assert asyncio.run(read_so_far(False)) == asyncio.run(read_so_far(True, "x")) == list(range(1, 101))
    sizes = asyncio.run(read_so_far(True))
    assert sizes[0] == 1 and sizes[-1] == 100 and len(set(sizes)) <= 6
