"""Work before admission: no tenant takes all threads, and the queue is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from tripool.errors import InvalidRequest, Overloaded
from tripool.gateway.fair_pool import FairPool

DEADLINE_S = 60.0


class Stage:
    """Work that signals when it began and ends on an event."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()
        self._go = threading.Semaphore(0)
        self._began = threading.Semaphore(0)

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            with self._lock:
                self.order.append(name)
                self.running += 1
                self.most_running = max(self.most_running, self.running)
            self._began.release()
            assert self._go.acquire(timeout=DEADLINE_S)
            with self._lock:
                self.running -= 1
            return name

        return run

    async def wait_begun(self) -> None:
        assert await asyncio.to_thread(self._began.acquire, timeout=DEADLINE_S)

    def let_go(self, count: int = 1) -> None:
        self._go.release(count)


def pool(num_threads: int = 2, max_waiting: int = 64, max_wait_s: float = DEADLINE_S) -> FairPool:
    return FairPool("test", num_threads=num_threads, max_waiting=max_waiting, max_wait_s=max_wait_s)


def test_a_second_piece_waits_behind_everybody_elses_first() -> None:
    async def go() -> list[str]:
        stage, shared = Stage(), pool()
        tasks = [asyncio.ensure_future(shared.run("flood", stage.work(f"flood-{n}"))) for n in range(8)]
        await stage.wait_begun()
        tasks += [asyncio.ensure_future(shared.run(name, stage.work(name))) for name in ("a", "b")]
        await stage.wait_begun()  # at once, though eight were there before: no named tenant has all the threads
        stage.let_go(10)
        await asyncio.gather(*tasks)
        return stage.order

    order = asyncio.run(go())
    assert order[:2] == ["flood-0", "a"] and order.index("b") <= 3


def test_no_more_at_once_than_threads_and_without_names_all_of_them() -> None:
    async def go() -> int:
        stage, shared = Stage(), pool(num_threads=3)
        tasks = [asyncio.ensure_future(shared.run("", stage.work(str(n)))) for n in range(9)]
        for _ in range(3):
            await stage.wait_begun()
        stage.let_go(9)
        await asyncio.gather(*tasks)
        return stage.most_running

    assert asyncio.run(go()) == 3


def test_what_waits_is_bounded_and_a_flood_leaves_room() -> None:
    async def go() -> None:
        stage, shared = Stage(), pool(num_threads=1, max_waiting=40)
        tasks = [asyncio.ensure_future(shared.run("flood", stage.work("f"), size=4)) for _ in range(3)]
        await stage.wait_begun()
        with pytest.raises(Overloaded):
            await shared.run("flood", stage.work("f"), size=4)
        tasks.append(asyncio.ensure_future(shared.run("other", stage.work("other"), size=100)))
        await asyncio.sleep(0)
        stage.let_go(len(tasks))
        assert (await asyncio.gather(*tasks))[-1] == "other"

    asyncio.run(go())


def test_errors_come_back_and_threads_go_on() -> None:
    def fail() -> None:
        raise InvalidRequest("no")

    async def go() -> str:
        shared = pool(num_threads=1)
        for _ in range(3):
            with pytest.raises(InvalidRequest):
                await shared.run("a", fail)
        return await shared.run("a", lambda: "fine")

    assert asyncio.run(go()) == "fine"


def test_waiting_too_long_is_an_error_and_a_cancelled_piece_is_dropped() -> None:
    async def go() -> None:
        stage, shared = Stage(), pool(num_threads=1, max_wait_s=0.05)
        inside = asyncio.ensure_future(shared.run("a", stage.work("inside")))
        await stage.wait_begun()
        with pytest.raises(Overloaded):
            await shared.run("b", stage.work("late"))
        gone = asyncio.ensure_future(shared.run("b", stage.work("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        stage.let_go(3)
        assert await inside == "inside"
        assert await shared.run("b", stage.work("next")) == "next"
        assert stage.order == ["inside", "next"] and not shared._waiting and not shared._waiting_size

    asyncio.run(go())
