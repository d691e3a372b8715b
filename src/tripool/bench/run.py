"""Sends requests in an open loop (at given times) or a closed loop (fixed concurrency) and measures times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from tripool.bench.endpoint import BodyMaker
from tripool.bench.events import EventReader
from tripool.bench.samples import Sample
from tripool.bench.wire import ExchangeFailed, HttpClient
from tripool.bench.workload import Shot

_LOOK_EVERY_S = 0.05


@dataclass(slots=True)
class Measured:
    """Measurements so far; usable at any time, complete when the run is over."""

    samples: list[Sample] = field(default_factory=list)
    duration_s: float = 0.0
    started: int = 0
    client_lags_s: list[float] = field(default_factory=list)

    @property
    def cancelled(self) -> int:
        return self.started - len(self.samples)


class Run:
    """One run of a list of shots. `measured` grows during the run; `stop` ends it early."""

    def __init__(
        self,
        client: HttpClient,
        bodies: BodyMaker,
        *,
        timeout_s: float,
        on_end: Callable[[Sample], object] = lambda sample: None,
    ) -> None:
        self.measured = Measured()
        self._client, self._bodies = client, bodies
        self._timeout_s, self._on_end = timeout_s, on_end
        self._stop = asyncio.Event()
        self._began_s = 0.0

    def stop(self) -> None:
        self._stop.set()

    async def go(self, shots: Sequence[Shot], *, concurrency: int | None = None) -> Measured:
        """An open loop, or a closed one with `concurrency`. Ends when all requests have ended, or when stopped."""
        self._began_s = perf_counter()
        load = self._closed(shots, concurrency) if concurrency is not None else self._open(shots)
        tasks = [asyncio.ensure_future(work) for work in (load, self._stop.wait(), self._watch_own_lag())]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.measured.duration_s = self._now_s()
        if not tasks[0].cancelled():
            tasks[0].result()  # raise exceptions of the task
        return self.measured

    async def _open(self, shots: Sequence[Shot]) -> None:
        async with asyncio.TaskGroup() as group:
            for shot in shots:
                assert shot.due_s is not None, "an open loop needs times"
                body = self._bodies.body(shot)  # built ahead of time, so that it does not delay sending
                wait_s = shot.due_s - self._now_s()
                # Yield even without waiting, so that other answers are read in between.
                await asyncio.sleep(max(0.0, wait_s))
                group.create_task(self._shoot(shot, body))

    async def _closed(self, shots: Sequence[Shot], concurrency: int) -> None:
        queue = iter(shots)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(shots))):
                group.create_task(self._shoot_all(queue))

    async def _shoot_all(self, queue: Iterator[Shot]) -> None:
        for shot in queue:
            await self._shoot(shot, self._bodies.body(shot))

    async def _shoot(self, shot: Shot, body: bytes) -> None:
        self.measured.started += 1
        sample = Sample(shot.index, shot.input_tokens, shot.output_tokens, self._now_s(), shot.due_s)
        reader = EventReader(sample, self._began_s)
        try:
            status = await self._client.exchange(
                "POST", self._bodies.path, body, reader.feed, timeout_s=self._timeout_s
            )
            reader.finish(status)
        except ExchangeFailed as failure:
            sample.error, sample.detail = failure.kind, failure.detail
        sample.end_s = self._now_s()
        self.measured.samples.append(sample)
        self._on_end(sample)

    async def _watch_own_lag(self) -> None:
        """A late timer shows that this process, not the server, was slow."""
        while True:
            due_s = perf_counter() + _LOOK_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
            self.measured.client_lags_s.append(max(0.0, perf_counter() - due_s))

    def _now_s(self) -> float:
        return perf_counter() - self._began_s
