"""Supervisor: parent of all processes of a run. Starts, reaps and restarts them, and ends them in order.

It is never on the path of a token. A process is replaced only after it was reaped here, so nothing it could still write
is pending. If the supervisor itself is killed, its channels close; its children notice and exit.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.control.evidence import is_ending, is_runnable, num_oom_kills
from tripool.control.instance import Instance
from tripool.control.joined_instance import JoinedInstance
from tripool.control.launch import Child, Spec, bind, launch
from tripool.messages import (
    SUPERVISOR,
    Assign,
    Drain,
    MapChanged,
    Ready,
    Reaped,
    RemoteRank,
    SilentRank,
    Suspect,
    WorkerId,
)

_LOG = logging.getLogger("tripool.supervisor")
GATEWAY, COORDINATOR, STANDBY, HOST_SERVER = "gateway", "coordinator", "standby", "host-server"
_LOOK_S = 0.2
"""Polling interval of the processes, besides messages: a channel may stay open after its process ended."""
_START_S = 600.0
"""Longest time from a child's start until it is ready, loading a model included."""
_SILENCE_S = 5.0
"""Longest silence of a ready gateway or coordinator."""
_BALANCE_S, _MOVE_S = 0.5, 0.05
"""Between two looks at the loads of experts, and between two steps of moves: what a plan levels is wanted soon."""
_STANDBY_S = 3.0
"""Until the next standby is started, after one has become a rank: the rank needs the cores first."""
_STUCK_S, _RANK_SILENCE_S = 0.5, 10.0
"""Longest silence of a rank none of whose threads is runnable, and of another one: it computes, or waits for a core."""
_DRAIN_S = 9.0
"""Time for gateways to end their streams; longer than its own limits for that."""
_END_S = 3.0
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS)
_FIRST_RESTART_S = 0.1
_MAX_RESTART_S = 5.0
_HEALTHY_S = 10.0
"""A process that ran this long has recovered: its next failure counts as the first."""


@dataclass(slots=True)
class Backoff:
    """Restart delay of a process: short the first time, longer if it keeps failing."""

    _wait_s: float = _FIRST_RESTART_S

    def failed(self, ran_s: float) -> float:
        """Seconds until the next start, after a run of `ran_s`."""
        wait_s = _FIRST_RESTART_S if ran_s >= _HEALTHY_S else self._wait_s
        self._wait_s = min(2 * wait_s, _MAX_RESTART_S)
        return wait_s


class Supervisor:
    """`specs`: one for the gateway, the coordinator and each worker. Cache members named by them are started from
    `cache_spec(name, block_bytes)` once one of their workers has reported its block size. `instances`: those of several
    ranks; `standby`: a process that has imported what a rank needs, and becomes the next rank that is started again."""

    def __init__(
        self,
        specs: Sequence[Spec],
        folder: Path,
        *,
        cache_spec: Callable[[str, int], Spec] | None = None,
        instances: Sequence[Instance | JoinedInstance] = (),
        standby: Spec | None = None,
        start: Callable[[Spec, int, float], Child] = launch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._start, self._clock = start, clock
        self._instances, self._standby = {instance.name: instance for instance in instances}, standby
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, Child] = {}
        self._backoffs = {spec.name: Backoff() for spec in specs}
        self._due = {spec.name: (clock(), spec) for spec in specs}
        """Processes to start, and when."""
        self._cache, self._cache_spec = tuple(dict.fromkeys(name for spec in specs for name in spec.cache)), cache_spec
        self._unreported: list[Reaped] = []
        """Reaped workers that not every cache member has been informed of."""
        # Epochs are counted, not timed: after a clock is set back, a new epoch must still be the highest.
        self._epochs = count(1)
        self._pool = PoolClient(LocalHost(folder), self._cache, WorkerId(SUPERVISOR, next(self._epochs)))
        self._balance_s = clock()
        """When to look at the loads of experts next."""
        self._was_ready = False
        self._num_oom_kills = num_oom_kills()
        self.stopping = False
        """Set it, also from a signal handler: `run` ends the children in order and returns."""

    def run(self, on_ready: Callable[[], object]) -> None:
        """Until `stopping` is set. `on_ready` is called once all but cache members have been ready together."""
        try:
            while not self.stopping:
                self._start_due()
                self._listen(min(_LOOK_S, max(0.0, self._balance_s - self._clock())))
                if not self._was_ready and all(name in self._cache or self._is_ready(name) for name in self._backoffs):
                    self._was_ready = True
                    on_ready()
                    if self._standby is not None:
                        self._backoffs[STANDBY], self._due[STANDBY] = Backoff(), (self._clock(), self._standby)
                self._look()
            self._stop()
        finally:
            for child in list(self._children.values()):
                child.kill()
                self._reap(child)
            self._selector.close()
            self._pool.close()

    def _start_due(self) -> None:
        now_s = self._clock()
        for name, (due_s, spec) in list(self._due.items()):
            if due_s <= now_s:
                del self._due[name]
                if spec.instance and self._is_ready(STANDBY):
                    self._assign(spec, now_s)
                    continue
                try:
                    child = self._start(spec, next(self._epochs), now_s)
                except OSError as error:  # out of processes or memory; others keep running
                    self._schedule(spec, 0.0, "process not started", {"child": name, "reason": error.strerror})
                    continue
                bind(child.process.pid, spec.cpus)
                _LOG.info("process started", extra=_facts(child))
                self._children[name] = child
                self._selector.register(child.supervisor_channel, selectors.EVENT_READ, child)
                if child.pidfd is not None:
                    self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _assign(self, spec: Spec, now_s: float) -> None:
        """The standby becomes this rank, and another one takes its place later."""
        child = self._children[spec.name] = self._children.pop(STANDBY)
        child.spec, child.worker_id = spec, WorkerId(spec.name, next(self._epochs))
        child.started_s, child.ready = now_s, False
        bind(child.process.pid, spec.cpus)
        child.supervisor_channel.send(Assign(spec.argv, child.worker_id.epoch))
        _LOG.info("process started", extra=_facts(child) | {"from": STANDBY})
        assert self._standby is not None
        self._due[STANDBY] = (now_s + _STANDBY_S, self._standby)

    def _listen(self, timeout_s: float) -> None:
        next_s = min((due_s for due_s, _ in self._due.values()), default=float("inf"))
        timeout_s = max(0.0, min(timeout_s, next_s - self._clock()))
        for key, _ in self._selector.select(timeout_s):
            child: Child = key.data
            for message in child.supervisor_channel.receive():
                child.heard_s = self._clock()
                if isinstance(message, Ready) and message.worker_id == child.worker_id:  # not one of the standby it was
                    if not child.ready:
                        took_s = round(self._clock() - child.started_s, 3)
                        _LOG.info("process ready", extra=_facts(child) | {"took_s": took_s})
                        self._change_map(child, enters=True)
                    child.ready = True
                    self._start_cache(child.spec.cache, message.block_bytes)
                elif isinstance(message, Suspect):
                    self._end(message.worker_id)
                elif isinstance(message, SilentRank):
                    self._end_silent(message.instance or child.spec.instance, message)
                elif isinstance(message, RemoteRank):
                    instance = self._instances.get(message.instance)
                    if isinstance(instance, Instance) and instance.remote(message.rank, message.process):
                        self._announce(instance)

    def _is_ready(self, name: str) -> bool:
        child = self._children.get(name)
        return child is not None and child.ready

    def _start_cache(self, names: Sequence[str], block_bytes: int) -> None:
        if block_bytes and self._cache_spec is not None:
            for name in names:
                if name not in self._backoffs:  # else another worker has reported the same size
                    self._backoffs[name] = Backoff()
                    self._due[name] = (self._clock(), self._cache_spec(name, block_bytes))

    def _look(self) -> None:
        now_s = self._clock()
        self._unreported = [reaped for reaped in self._unreported if self._pool.report(reaped)]
        for child in list(self._children.values()):
            late = not child.ready and now_s - child.started_s > _START_S
            silent = child.ready and child.spec.role in (GATEWAY, COORDINATOR) and now_s - child.heard_s > _SILENCE_S
            if late or silent:
                self._ended(child, f"not ready after {_START_S:g} s" if late else f"silent for {_SILENCE_S:g} s")
            elif child.supervisor_channel.ended or child.process.poll() is not None:
                self._ended(child, None)
            else:
                child.cpu.look(now_s)
        self._num_oom_kills = num_oom_kills()
        for child in list(self._children.values()):
            instance = self._instances.get(child.spec.instance)
            if instance is not None and child.ready and child.spec.rank in instance.outdated():
                self._ended(child, "given up by the other hosts")
        if now_s >= self._balance_s:
            moved = [instance for instance in self._instances.values() if instance.balance()]
            for instance in moved:
                self._announce(instance)
            self._balance_s = now_s + (_MOVE_S if moved else _BALANCE_S)

    def _end(self, worker_id: WorkerId) -> None:
        child = self._children.get(worker_id.name)
        if child is not None and child.worker_id == worker_id:  # else it has ended and was replaced
            busy = child.cpu.is_busy(self._clock())
            self._ended(child, f"suspected by the coordinator{', and busy' if busy else ''}", busy=busy)

    def _end_silent(self, instance: str, report: SilentRank) -> None:
        """A report may concern a process that has been given up since."""
        known = self._instances.get(instance)
        if known is None or not known.is_there(report.rank, report.map_epoch):
            return
        if not any((child.spec.instance, child.spec.rank) == (instance, report.rank) for child in self._all()):
            self._silent_elsewhere(known, report)
            return
        for child in self._all():
            if (child.spec.instance, child.spec.rank, child.ready) != (instance, report.rank, True):
                continue
            pid, silence_s = child.process.pid, report.silence_s
            if is_ending(pid):
                self._ended(child, None)
            elif silence_s > _RANK_SILENCE_S or (silence_s > _STUCK_S and not is_runnable(pid)):
                self._ended(child, f"silent for {silence_s:.1f} s to {report.worker_id.name}")

    def _all(self) -> list[Child]:
        return list(self._children.values())

    def _of_role(self, role: str) -> list[Child]:
        return [child for child in self._children.values() if child.spec.role == role]

    def _silent_elsewhere(self, instance: Instance | JoinedInstance, report: SilentRank) -> None:
        """A rank of another host: that host knows whether it is slow or stuck; the server's own host gives
        it up in the end."""
        if isinstance(instance, Instance) and report.silence_s > _RANK_SILENCE_S and instance.leave(report.rank):
            self._announce(instance)
        elif HOST_SERVER in self._children and not report.instance:
            report_on = SilentRank(report.worker_id, report.rank, report.map_epoch, report.silence_s, instance.name)
            self._children[HOST_SERVER].supervisor_channel.send(report_on)

    def _change_map(self, child: Child, *, enters: bool) -> None:
        instance, rank = self._instances.get(child.spec.instance), child.spec.rank
        if instance is not None and (instance.enter(rank) if enters else instance.leave(rank)):
            self._announce(instance)
        if child.spec.name == HOST_SERVER and not enters:  # ranks on other hosts are out of reach
            for other in self._instances.values():
                if isinstance(other, Instance):
                    for rank in other.remote_ranks():
                        other.remote(rank, 0)
                    self._announce(other)

    def _announce(self, instance: Instance | JoinedInstance) -> None:
        for child in self._children.values():
            if child.spec.instance == instance.name:
                child.supervisor_channel.send(MapChanged(instance.epoch))

    def _ended(self, child: Child, reason: str | None, *, busy: bool = False) -> None:
        """Reap a child and schedule its restart. `reason`: why the supervisor ends it, if so. `busy`: it was
        computing.
        """
        signals = {number.value: number.name for number in signal.Signals}
        ran_s, code = self._clock() - child.started_s, self._reap(child, busy=busy)
        how = {"signal": signals.get(-code, str(-code))} if code < 0 else {"exit_code": code}
        self._schedule(child.spec, ran_s, "process ended", _facts(child) | how | {"reason": reason})

    def _schedule(self, spec: Spec, ran_s: float, what: str, facts: dict[str, str | int | None]) -> None:
        wait_s = self._backoffs[spec.name].failed(ran_s)
        self._due[spec.name] = (self._clock() + wait_s, spec)
        _LOG.warning(what, extra=facts | {"ran_s": round(ran_s, 3), "again_in_s": round(wait_s, 3)})

    def _reap(self, child: Child, *, busy: bool = False) -> int:
        """Kill and wait; only then inform the others and free its memory."""
        short_of_memory = num_oom_kills() > self._num_oom_kills and child.process.poll() == -signal.SIGKILL
        child.kill()
        self._change_map(child, enters=False)  # before it is reaped: other ranks wait for its answers
        code = child.process.wait()
        self._selector.unregister(child.supervisor_channel)
        child.supervisor_channel.close()
        if child.pidfd is not None:
            self._selector.unregister(child.pidfd)
            os.close(child.pidfd)
        del self._children[child.spec.name]
        for left in self._folder.glob(f"{child.worker_id}.*"):
            left.unlink(missing_ok=True)
        if child.spec.name in self._cache or child.spec.role in (GATEWAY, COORDINATOR, STANDBY):
            return code  # these write to no other process's memory
        reaped = Reaped(child.worker_id, crashed=busy or short_of_memory or _crashed(code))
        for coordinator in self._of_role(COORDINATOR):
            coordinator.supervisor_channel.send(reaped)
        if self._cache:
            self._unreported.append(reaped)
        return code

    def _stop(self) -> None:
        """End the gateways first, which drain their streams; then all others."""
        _LOG.info("stopping", extra={"processes": len(self._children)})
        gateways = self._of_role(GATEWAY)
        for gateway in gateways:
            gateway.supervisor_channel.send(Drain())
        self._await(gateways, _DRAIN_S)
        rest = list(self._children.values())
        for child in rest:
            child.terminate()
        self._await(rest, _END_S)

    def _await(self, children: Sequence[Child], timeout_s: float) -> None:
        """Wait until they have ended, at most for `timeout_s`."""
        deadline_s = self._clock() + timeout_s
        waiting = list(children)
        while waiting and self._clock() < deadline_s:
            self._selector.select(min(_LOOK_S, max(0.0, deadline_s - self._clock())))
            for child in list(waiting):
                for _ in child.supervisor_channel.receive():
                    pass
                if child.process.poll() is not None:
                    waiting.remove(child)
                    self._reap(child)


def _crashed(code: int) -> bool:
    """Whether a process with this exit status failed by itself, rather than being killed or asked to end."""
    return code > 0 or -code in _CRASHES


def _facts(child: Child) -> dict[str, str | int | None]:
    return {"child": child.spec.name, "child_pid": child.process.pid, "epoch": child.worker_id.epoch}
