"""A standby coordinator: follows the leader's log, and leads when the leader's lock is free.

The run folder's lock file has one owner: the kernel frees it when the owner's process has ended, and not before. So two
coordinators of one host never lead at the same time. A leader that is silent is killed first, as the supervisor kills a
worker before anything of it is used again; one that was stopped never wakes up to decide.

| the leader | this process |
|---|---|
| ends | has the lock at once, and leads |
| is stopped, or silent for long | kills it, then the same |
| ends while no other is there | the next to start has the lock, without a log |

The file holds the epoch of the last leader: each new one has a higher one, which gateways and workers insist on. A
leader reads it before it decides anything, and ends if it is not its own: so one that another arbiter has replaced, or
that goes on where no silent leader can be killed, decides nothing more either.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from tripool.control.evidence import is_stopped
from tripool.fabric.channel import Line, identity_of
from tripool.fabric.gateway_wire import Follow, Leads, Log, ToStandby, read_to_standby
from tripool.messages import PROTOCOL, WorkerId
from tripool.router.replica import Lease, Replica

_LOG = logging.getLogger("tripool.coordinator")
_LOOK_S = 0.05
_FOLLOW_S = 0.5
"""Between two requests to follow while the leader's log does not come."""


class LeaderLock:
    """`acquire` in a thread of its own: it waits for the leader's end."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "leader", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquire(self, *, wait: bool = True) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    @property
    def epoch(self) -> int:
        """Of the last leader."""
        return int(os.pread(self._fd, 32, 0) or b"0")

    def next_epoch(self) -> int:
        """For the owner alone."""
        epoch = self.epoch + 1
        os.pwrite(self._fd, b"%d" % epoch, 0)
        return epoch


class Standby:
    """`wait` returns when this process owns the lock, with what it knows from the log."""

    def __init__(self, lock: LeaderLock, address: str, worker_id: WorkerId, clock: Callable[[], float]) -> None:
        self._lock, self._address, self._worker_id, self._clock = lock, address, worker_id, clock
        self._leader: int | None = None
        """Its process, as a file descriptor."""
        self._pid = 0
        self.knows = False
        """Whether the log has come."""

    async def wait(self) -> Replica:
        loop, free = asyncio.get_running_loop(), asyncio.Event()

        def acquire() -> None:
            self._lock.acquire()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the process with it
                loop.call_soon_threadsafe(free.set)

        threading.Thread(target=acquire, daemon=True).start()
        replica, context = Replica(), zmq.Context[zmq.Socket[bytes]]()
        line = Line(context, self._address, f"{identity_of(self._worker_id)}log", read_to_standby)
        try:
            await self._follow(line, replica, free)
        finally:
            line.close()
            context.term()
            if self._leader is not None:
                os.close(self._leader)
        return replica

    async def _follow(self, line: Line[ToStandby], replica: Replica, free: asyncio.Event) -> None:
        now_s = self._clock()
        lease, asked_s, heard_s = Lease(now_s), float("-inf"), float("-inf")
        while not free.is_set():
            now_s = self._clock()
            for message in line.receive():
                lease.renew(now_s)
                heard_s = now_s
                if isinstance(message, Leads):
                    replica.clear()
                    self._watch(message.pid)
                elif isinstance(message, Log):
                    replica.apply(message.record)
                    self.knows = True
            if now_s - max(asked_s, heard_s) > _FOLLOW_S:  # again, if the connection broke and is there again
                line.send(Follow(PROTOCOL, self._worker_id))
                asked_s = now_s
            if self._leader is not None and lease.is_over(now_s, stopped=is_stopped(self._pid)):
                _LOG.warning("leader is silent", extra={"leader_pid": self._pid})
                self._end(self._leader)
                lease.renew(now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await free.wait()

    @staticmethod
    def _end(leader: int) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(leader, signal.SIGKILL)

    def _watch(self, pid: int) -> None:
        if self._leader is None and sys.platform == "linux":  # elsewhere the supervisor ends a silent one
            with contextlib.suppress(ProcessLookupError):
                self._leader, self._pid = os.pidfd_open(pid), pid
                _LOG.info("standby", extra={"leader_pid": pid})
