"""Processes in virtual time: synchronous serving code on threads, of which exactly one runs at any moment.

A thread gives way only in `Process.wait`. There it runs the timeline's events itself until one of them ends the wait of
some process; if that is another one, control passes to its thread. So the order of everything follows from the events
alone, and most waits cost no switch of threads.

A killed process is never resumed. Its thread ends with the run, by an exception in its wait, when nothing that it
still does can be seen.
"""

from __future__ import annotations

from _thread import LockType, allocate_lock
from collections.abc import Callable
from threading import Thread
from typing import Any

from tripool.simulate.rng import Rng
from tripool.simulate.timeline import Timeline

_PAUSE_CHANCE = 0.25
_PAUSE_S = {"read": 0.02, "write": 0.005, "transfer": 0.005}
"""Longest; reads of the cache are few, and evictions must have time to come between."""


class Killed(BaseException):
    """Unwinds a thread at the end of a run."""


class Baton:
    """Which thread runs. `step` runs the next event and says whether the run goes on."""

    def __init__(self, timeline: Timeline, rng: Rng, step: Callable[[], bool]) -> None:
        self.timeline, self.rng = timeline, rng
        self.unwinding = False
        self._step = step
        self._main = _closed_lock()
        self._next: LockType | None = None
        self._failure: BaseException | None = None
        self._processes: list[Process] = []

    def run(self) -> None:
        """The whole run. Raises what an event or a process raised."""
        try:
            self.give_way(self._main)
        finally:
            self.unwinding = True
            for process in self._processes:
                process.join()
        if self._failure is not None:
            raise self._failure

    def start(self, main: Callable[[Process], None], ended: Callable[[], None]) -> Process:
        """A new process; `ended` is called when its `main` returns."""
        process = Process(self, main, ended)
        self._processes.append(process)
        return process

    def resume(self, lock: LockType) -> None:
        assert self._next is None
        self._next = lock

    def give_way(self, lock: LockType | None) -> None:
        """Run events until a process is due. Returns when it is the turn of the caller, who waits by `lock`; at once
        without one."""
        while self._next is None and self._failure is None:
            try:
                if not self._step():
                    break
            except BaseException as error:  # noqa: BLE001 (raised again by `run`, in the thread that began it)
                self._failure = error
        turn, self._next = self._next or self._main, None
        if turn is not lock:
            turn.release()
            if lock is not None:
                lock.acquire()

    def fail(self, error: BaseException) -> None:
        """End the run with this error, whatever the code that noticed it would do with an exception."""
        self._failure = self._failure or error


class Process:
    def __init__(self, baton: Baton, main: Callable[[Process], None], ended: Callable[[], None]) -> None:
        self.dead = False
        self.doing = ""
        """What it waits for or in."""
        self.in_copy: dict[str, Callable[[], None]] = {}
        """Faults that strike in the middle of the next read or write."""
        self.turn_s = 0.0
        """When the worker's loop began its present turn."""
        self.wake_s = 0.0
        self._baton, self._timeline, self._rng = baton, baton.timeline, baton.rng
        self._main, self._ended = main, ended
        self._lock = _closed_lock()
        self._version = 0
        """Of the newest plan to resume it; older ones are void."""
        self._wakes = False
        self._stopped = self._due = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        self._plan(self._timeline.now_s)

    # ---- in its own thread ------------------------------------------------------------------------------------------

    def wait(self, until_s: float, doing: str, *, wakes: bool = False) -> None:
        """Let time pass. `wakes`: `wake` may end it sooner."""
        if self._baton.unwinding:
            raise Killed
        self.doing, self._wakes = doing, wakes
        self._plan(until_s)
        self._baton.give_way(self._lock)
        if self._baton.unwinding:
            raise Killed
        self.doing = ""

    def pause(self, doing: str) -> None:
        """In the middle of a copy: time may pass, and a fault may strike that waits for this."""
        strike = self.in_copy.pop(doing, None)
        if strike is not None:
            self._timeline.call_at(self.now_s, strike)
            self.wait(self.now_s, doing)
        elif self._rng.chance(_PAUSE_CHANCE):
            self.wait(self.now_s + self._rng.uniform(0.0, _PAUSE_S[doing]), doing)

    @property
    def now_s(self) -> float:
        return self._timeline.now_s

    def call_at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        self._timeline.call_at(time_s, action, *args)

    def fail(self, message: str) -> None:
        """A rule of the simulation is broken."""
        self._baton.fail(AssertionError(message))
        self.wait(self._timeline.now_s, "failed")

    def _run(self) -> None:
        self._lock.acquire()
        if self._baton.unwinding:
            return
        try:
            self._main(self)
        except Killed:
            return
        except BaseException as error:  # noqa: BLE001 (a crash of the process is a finding)
            self._baton.fail(error)
        self.dead = True
        self._timeline.expect(self._timeline.now_s, self._ended)
        self._baton.give_way(None)

    # ---- in events --------------------------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        return self._stopped

    def wake(self, at_s: float) -> None:
        if self._wakes and at_s < self.wake_s:
            self._plan(at_s)

    def stop(self) -> None:
        self._stopped = True

    def go_on(self) -> None:
        """In the middle of what it did; a wait that is over by now ends."""
        self._stopped = False
        if self._due:
            self._due = False
            self._plan(self._timeline.now_s)

    def kill(self) -> None:
        self.dead = True

    def join(self) -> None:
        if self._thread.is_alive():
            self._lock.release()
            self._thread.join()

    def _plan(self, at_s: float) -> None:
        self._version += 1
        self.wake_s = at_s
        self._timeline.call_at(at_s, self._resume, self._version)

    def _resume(self, version: int) -> None:
        if version != self._version or self.dead:
            return
        if self._stopped:
            self._due = True
        else:
            self._wakes = False
            self._baton.resume(self._lock)


def _closed_lock() -> LockType:
    lock = allocate_lock()
    lock.acquire()
    return lock
