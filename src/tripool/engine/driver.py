"""Drives an engine: carries out commands between two steps and reports what each step gave. Knows no stream.

It runs in a thread of the server (`thread.py`) or as the whole of a process (`process.py`). Nothing but commands,
steps and one report for each step is on its path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

from tripool.core import Request, ServingStats, Stages, TokenEvent
from tripool.engine.wire import AddRequests, CancelRequest, Command, Ended, Facts, StepReport, StopEngine
from tripool.engine_protocol import StepEngine
from tripool.errors import RequestFailed, TripoolError

_MAX_ADDED = 64
"""Choices added between two steps, those of the last request not counted: running sequences wait for them."""
_PREPARING_S = 0.001
"""Between two looks at grammars that are being compiled, while nothing else is to be done."""

_logger = logging.getLogger("tripool.engine")


class _Open(msgspec.Struct, eq=False):
    """A request that the engine has."""

    added_s: float
    choices_left: int
    started_s: float | None = None
    """When the first step with it began."""


class _Preparing(msgspec.Struct, eq=False):
    """Requests of one AddRequests, without those that were cancelled meanwhile."""

    requests: list[Request]
    added_s: float
    grammars: set[Future[Any]]
    """Held, so that what was compiled is there when the requests are added."""


class EngineDriver:
    def __init__(
        self,
        engine: StepEngine,
        take: Callable[[float | None], Command | None],
        report: Callable[[StepReport], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`take`: the next command, waiting for it so many seconds at most, or without end; None if there is none."""
        self._engine, self._take, self._report, self._clock = engine, take, report, clock
        self._open: dict[str, _Open] = {}
        self._preparing: list[_Preparing] = []
        self._num_steps = 0
        self._held_by = ""
        """The limit that bounded the last step."""
        self._ended: list[Ended] = []
        self._facts: dict[str, Facts] = {}
        """Not reported yet, like those that have ended."""

    def run(self) -> None:
        """Until it is stopped. Raises what leaves the engine of no use, and what `take` raises."""
        while self._obey():
            if self._engine.busy:
                self._step()
        for request_id in self._open:
            self._engine.cancel(request_id)

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Carry out what is there, waiting for it when the engine is idle; False when it is to stop.

        Stops after `_MAX_ADDED` choices: running sequences get their step in between.
        """
        num_preparing, num_obeyed, num_added = self._num_preparing, 0, self._add_prepared()
        wait_s = 0.0 if self._engine.busy or self._ended else _PREPARING_S if self._preparing else None
        while (command := self._take(wait_s)) is not None:
            if isinstance(command, StopEngine):
                return False
            if isinstance(command, CancelRequest):
                self._cancel(command.request_id)
            else:
                num_added += self._begin(command)
            num_obeyed, wait_s = num_obeyed + 1, 0.0
            if num_added >= _MAX_ADDED and self._engine.busy:
                break
        is_idle = num_obeyed > 0 and not self._engine.busy  # then no step reports it
        if is_idle or self._ended or num_preparing != self._num_preparing:
            self._send([], self._engine.stats())
        return True

    def _begin(self, command: AddRequests) -> int:
        """Number of choices added. A request waits for its grammar, not the engine."""
        grammars = {future for request in command.requests if (future := self._engine.prepare(request))}
        if all(future.done() for future in grammars):
            return self._add(command.requests, command.added_s)
        self._preparing.append(_Preparing(list(command.requests), command.added_s, grammars))
        return 0

    def _add_prepared(self) -> int:
        """Those whose grammars are compiled, oldest first; errors of a grammar are raised when it is added."""
        ready = [one for one in self._preparing if all(future.done() for future in one.grammars)]
        self._preparing = [one for one in self._preparing if one not in ready]
        return sum(self._add(one.requests, one.added_s) for one in ready)

    @property
    def _num_preparing(self) -> int:
        return sum(len(one.requests) for one in self._preparing)

    def _add(self, requests: Sequence[Request], added_s: float) -> int:
        """All or none."""
        found = self._engine.stats()
        for position, request in enumerate(requests):
            self._facts[request.id] = {
                "found running": found.running,
                "found waiting": found.waiting,
                "found KV in use": f"{100 * found.kv_usage:.0f} %",
            }
            try:
                self._engine.add(request)
            except TripoolError as refused:
                return self._refuse(requests, position, refused)
            except Exception:
                _logger.exception("request %s could not be added", request.id)
                return self._refuse(requests, position + 1, RequestFailed.of(request.id))
            self._open[request.id] = _Open(added_s, request.params.n)
        return sum(request.params.n for request in requests)

    def _refuse(self, requests: Sequence[Request], num_added: int, error: TripoolError) -> int:
        for added in requests[:num_added]:
            self._cancel(added.id)
        self._ended.append(Ended(tuple(request.id for request in requests), error))
        return 0

    def _cancel(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._engine.cancel(request_id)
        for one in self._preparing:
            one.requests = [request for request in one.requests if request.id != request_id]

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        begun_s = self._clock()
        events = self._engine.step()
        ended_s = self._clock()
        self._num_steps += 1
        for request_id in self._engine.started:
            if (started := self._open.get(request_id)) is not None:
                started.started_s = begun_s
                self._note_wait(request_id, begun_s - started.added_s)
        stats = self._engine.stats()
        self._held_by = stats.held_by
        reported = [self._seen(event, ended_s) for event in events]
        for request_id in self._engine.take_failed():
            self._open.pop(request_id, None)
            self._ended.append(Ended((request_id,), RequestFailed.of(request_id)))
        self._send(reported, stats)

    def _seen(self, event: TokenEvent, now_s: float) -> TokenEvent:
        """A choice's first event gets the time that it took to get here."""
        if event.index > 0 and event.finish_reason is None:
            return event
        opened = self._open.get(event.request_id)
        if opened is None:
            return event
        if event.finish_reason is not None:
            opened.choices_left -= 1
            if opened.choices_left == 0:
                del self._open[event.request_id]
        if event.index > 0:
            return event
        started_s = opened.added_s if opened.started_s is None else opened.started_s
        return replace(event, stages=Stages(queue_s=started_s - opened.added_s, prefill_s=now_s - started_s))

    def _note_wait(self, request_id: str, waited_s: float) -> None:
        """A request that did not start in the last step waited for the limit of that step."""
        limit = self._held_by or "the step under way"
        self._facts.setdefault(request_id, {})[f"held back: {limit}"] = f"{1e3 * waited_s:.1f} ms"

    def _send(self, events: list[TokenEvent], stats: ServingStats) -> None:
        ended, facts = self._ended, self._facts
        self._ended, self._facts = [], {}
        self._report(StepReport(events, ended, facts, stats, self._num_steps, self._num_preparing))
